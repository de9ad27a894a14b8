"""Our Llama against transformers': logits, hidden states, greedy tokens; and the faults that this must catch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm as TheirRMSNorm

from closeness import assert_close_to_reference, model_reference
from llamarium.attention import CausalAttend, EagerAttend
from llamarium.attention import base as attention_base
from llamarium.attention.paged import PagedAttend, PagedCache, Segment
from llamarium.config import ModelConfig
from llamarium.model import LlamaAttention, LlamaForCausalLM, LlamaRMSNorm, LlamaRotaryEmbedding, Rotary
from llamarium.model import llama as llama_module
from llamarium.model.rope import rotate_complex

pytestmark = pytest.mark.torch

NAMES = ["llama-3.2-1b", "llama-3.1-8b", "llama-3.2-3b", "llama-2", "mqa", "yarn", "linear", "biases"]
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}

# Far apart, because RoPE only shows in distances: within a few tokens no scaling is visible.
POSITIONS = torch.tensor(
    [*range(16), 100, 1000, 5000, 8191, 8192, 8193, 9000, 16384, 20000, 32768, 65536, 100000, 131070, 131071]
)


def sample_ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 512, (rows, len(POSITIONS)), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_logits(ours: LlamaForCausalLM, theirs: Any) -> None:
    """Every position's logits, at positions up to the last of the context."""
    ids, positions = sample_ids(), POSITIONS.expand(2, -1)
    # The explicit mask keeps transformers from taking the gaps for borders between packed documents.
    expected = theirs(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    assert_close_to_reference(ours(ids, positions), expected, model_reference(ours, ids, positions))


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, pair_of: Callable[[str], Any]) -> None:
    pair = pair_of(name)
    check_logits(pair.ours, pair.theirs)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_hidden_states_by_layer(name: str, pair_of: Callable[[str], Any]) -> None:
    pair, ids, positions = pair_of(name), sample_ids(), POSITIONS.expand(2, -1)
    theirs = pair.theirs(
        ids, position_ids=positions, attention_mask=torch.ones_like(ids), output_hidden_states=True
    ).hidden_states
    model = pair.ours.model
    x_BTD = model.embed_tokens(ids)
    rotary = model.rotary_emb(positions, x_BTD.dtype)
    torch.testing.assert_close(x_BTD, theirs[0], rtol=0, atol=0)
    for i, layer in enumerate(model.layers):
        x_BTD = layer(x_BTD, rotary, CausalAttend())
        expected = theirs[i + 1]  # the last one comes after the final norm
        torch.testing.assert_close(model.norm(x_BTD) if i == 2 else x_BTD, expected, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_64_greedy_tokens(name: str, pair_of: Callable[[str], Any]) -> None:
    pair, prompt = pair_of(name), sample_ids(1)[:, :9]
    expected = pair.theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    c = pair.config
    cache = PagedCache(
        num_layers=c.num_hidden_layers,
        num_blocks=5,
        block_size=16,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        dtype=torch.float32,
    )
    ids, new = prompt, prompt
    for _ in range(64):
        start, end = ids.shape[1] - new.shape[1], ids.shape[1]
        attend = PagedAttend(cache, [Segment(slice(0, end - start), start, slice(0, end))])
        new = pair.ours(new, torch.arange(start, end).unsqueeze(0), attend)[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_rounds_where_theirs_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 256, generator=generator) * 3).to(dtype)
    weight = torch.randn(256, generator=generator).to(dtype)
    ours, theirs = LlamaRMSNorm(256, 1e-5).to(dtype), TheirRMSNorm(256, 1e-5).to(dtype)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    # One unit in the last place of float32 may fall on the other side of a rounding border; a wrong order of
    # casts moves a tenth of all values.
    differing = (ours(x) != theirs(x)).float().mean()
    assert differing < (0.2 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_rotation_equals_the_complex_form(name: str, pair_of: Callable[[str], Any]) -> None:
    rotary_emb = pair_of(name).ours.model.rotary_emb
    head_dim = rotary_emb.config.head_dim
    x = torch.randn(1, len(POSITIONS), 3, head_dim, generator=torch.Generator().manual_seed(2))
    rotated = rotary_emb(POSITIONS.unsqueeze(0), torch.float32).rotate(x)
    frequencies, factor = rotary_emb.frequencies(x.device), rotary_emb.attention_factor
    expected = rotate_complex(x, POSITIONS.unsqueeze(0), frequencies, factor)
    torch.testing.assert_close(rotated, expected)


def drop_scaling(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    ours.model.rotary_emb = LlamaRotaryEmbedding(dataclasses.replace(ours.config, rope_scaling=None))


def factor_8_for_32(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    assert ours.config.rope_scaling is not None and ours.config.rope_scaling.factor == 32
    scaling = dataclasses.replace(ours.config.rope_scaling, factor=8.0)
    ours.model.rotary_emb = LlamaRotaryEmbedding(dataclasses.replace(ours.config, rope_scaling=scaling))


def theta_10000(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    ours.model.rotary_emb = LlamaRotaryEmbedding(dataclasses.replace(ours.config, rope_theta=10000.0))


def swap_k_and_v(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    true = LlamaAttention.project
    patch.setattr(LlamaAttention, "project", lambda self, x: tuple(true(self, x)[i] for i in (0, 2, 1)))


def positions_off_by_one_for_k(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    def forward(self: LlamaAttention, x: torch.Tensor, rotary: Rotary, attend: Any) -> torch.Tensor:
        q, k, v = self.project(x)
        late = Rotary(rotary.cos_BT1H.roll(1, 1), rotary.sin_BT1H.roll(1, 1))
        return self.o_proj(attend(self.layer_idx, rotary.rotate(q), late.rotate(k), v).flatten(-2))

    patch.setattr(LlamaAttention, "forward", forward)


def positions_ignored(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    true = LlamaRotaryEmbedding.forward
    patch.setattr(
        LlamaRotaryEmbedding, "forward", lambda self, p, dtype: true(self, torch.arange(p.shape[1]).expand_as(p), dtype)
    )


def interleaved_pairs(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    def rotate(self: Rotary, x: torch.Tensor) -> torch.Tensor:
        paired = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = paired * self.cos_BT1H + paired.roll(x.shape[-1] // 2, -1) * self.sin_BT1H
        return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    patch.setattr(Rotary, "rotate", rotate)


def rotate_the_other_way(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    """q and k turned backwards alike would cancel; only k turns the wrong way."""

    def forward(self: LlamaAttention, x: torch.Tensor, rotary: Rotary, attend: Any) -> torch.Tensor:
        q, k, v = self.project(x)
        back = Rotary(rotary.cos_BT1H, -rotary.sin_BT1H)
        return self.o_proj(attend(self.layer_idx, rotary.rotate(q), back.rotate(k), v).flatten(-2))

    patch.setattr(LlamaAttention, "forward", forward)


def head_untied(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    ours.lm_head.weight = torch.nn.Parameter(torch.randn(ours.lm_head.weight.shape, generator=generator) * 0.02)


def mask_shifted(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    true = attention_base.visible_in_row

    class Shifted(EagerAttend):
        def context(self, layer_idx: int, k: torch.Tensor, v: torch.Tensor) -> Any:
            mask = true(k.shape[1], None, False, k.device)
            return attention_base.Context(k, v, mask | mask.roll(-1, 1))

    patch.setattr(llama_module, "CausalAttend", Shifted)


def no_mask(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama_module, "CausalAttend", lambda **_: CausalAttend(bidirectional=True))


def heads_grouped_by_stride(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    """Head n reads key-value head n % K instead of n // G."""

    def attend(layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[2] // k.shape[2]
        return EagerAttend()(layer_idx, q, k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1))

    patch.setattr(llama_module, "CausalAttend", lambda **_: attend)


def scale_forgotten(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        llama_module, "CausalAttend", lambda **_: lambda i, q, k, v: CausalAttend()(i, q * q.shape[-1] ** 0.5, k, v)
    )


def gate_and_up_swapped(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    for layer in ours.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def gelu_for_silu(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("llamarium.model.mlp.SiLUActivation.forward", lambda self, x: F.gelu(x))


def eps_wrong(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    ours.model.layers[0].input_layernorm.eps = 1e-3


def norms_swapped(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    for layer in ours.model.layers:
        norms = layer.post_attention_layernorm, layer.input_layernorm
        layer.input_layernorm, layer.post_attention_layernorm = norms


def last_norm_left_out(ours: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    ours.model.norm = torch.nn.Identity()


FAULTS = [
    drop_scaling,
    factor_8_for_32,
    theta_10000,
    swap_k_and_v,
    positions_off_by_one_for_k,
    positions_ignored,
    interleaved_pairs,
    rotate_the_other_way,
    head_untied,
    mask_shifted,
    no_mask,
    heads_grouped_by_stride,
    scale_forgotten,
    gate_and_up_swapped,
    gelu_for_silu,
    eps_wrong,
    norms_swapped,
    last_norm_left_out,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_no_fault_survives(
    fault: Callable[[LlamaForCausalLM, pytest.MonkeyPatch], None],
    pair_of: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each deliberate fault, on the model that has what it breaks, must fail the logits check."""
    pair = pair_of("llama-3.2-1b")
    mutant = LlamaForCausalLM(pair.config)
    mutant.load_state_dict(pair.ours.state_dict())
    check_logits(mutant, pair.theirs)  # sound before
    fault(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        check_logits(mutant, pair.theirs)


def test_norm_cast_order_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one fault that float32 cannot show: weight applied before rounding."""
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight).to(x.dtype),
    )
    with pytest.raises(AssertionError):
        test_rms_norm_rounds_where_theirs_does(torch.bfloat16)


def test_config_spellings_agree() -> None:
    """The v4 and the v5 spelling of one config are the same config."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    base: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    v4 = ModelConfig.from_hf({**base, "rope_theta": 5e5, "rope_scaling": scaling})
    v5 = ModelConfig.from_hf({**base, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert v4 == v5 == ModelConfig.from_hf(v4.to_hf())
