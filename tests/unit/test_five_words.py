"""`examples/five_words.py`: every matrix that it prints is what the library's modules compute, and fits a terminal."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarium.attention import CausalAttend, attend_eagerly
from llamarium.config import ModelConfig
from llamarium.model import LlamaForCausalLM

pytestmark = pytest.mark.torch

PATH = Path(__file__).parents[2] / "examples" / "five_words.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("five_words", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """Attends as the library does and keeps what it saw: (1, T, heads, H) as (heads, T, H)."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def __call__(self, layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        eager = attend_eagerly(q, CausalAttend().context(layer_idx, k, v))
        heads = {"q rotated": q, "k rotated": k, "v": v, "head outputs": eager.out_BTNH}
        self.seen = {name: x[0].transpose(0, 1) for name, x in heads.items()}
        self.seen |= {"attention": eager.pattern_BNTS[0], "scores with the mask": eager.scores_BNTS[0]}
        return eager.out_BTNH


def modules_matrices(example: Any, ids: list[int], weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return what the library's modules compute, under the example's names."""
    config = ModelConfig(
        vocab_size=5, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=16, rms_norm_eps=example.EPS,
        rope_theta=example.THETA, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    layer, out, attend = model.model.layers[0], {}, Recorder()
    places = {
        "rows": model.model.embed_tokens, "norm before attention": layer.input_layernorm,
        "attention's output": layer.self_attn.o_proj, "norm before the MLP": layer.post_attention_layernorm,
        "gate": layer.mlp.gate_proj, "up": layer.mlp.up_proj, "MLP's output": layer.mlp.down_proj,
        "after the MLP": layer, "final norm": model.model.norm, "q": layer.self_attn.q_proj,
        "k": layer.self_attn.k_proj,
    }  # fmt: skip
    for name, module in places.items():
        module.register_forward_hook(lambda _module, _args, result, name=name: out.__setitem__(name, result[0]))
    for name, module in (
        ("heads joined", layer.self_attn.o_proj),
        ("after attention", layer.post_attention_layernorm),
        ("SiLU(gate) * up", layer.mlp.down_proj),
    ):
        module.register_forward_pre_hook(lambda _module, args, name=name: out.__setitem__(name, args[0][0]))
    with torch.no_grad():
        out["logits"] = model(torch.tensor([ids]), attend=attend)[0]
    out |= attend.seen | {"batch": out["rows"][None], "probabilities": out["logits"].softmax(-1)}
    for name in "qk":
        out[name] = out[name].unflatten(-1, (-1, 4)).transpose(0, 1)
    return out


@pytest.mark.parametrize("ids", [[0, 2, 3], [4], [1, 2, 2, 0, 3, 4, 1]])
def test_every_matrix_is_the_librarys(example: Any, ids: list[int]) -> None:
    weights = example.make_weights(seed=len(ids))
    found, expected = example.run(ids, weights), modules_matrices(example, ids, weights)
    assert found.keys() == example.ABOUT.keys() == expected.keys() | {"scores"}
    assert found["rows"].shape == (len(ids), 8) and found["batch"].shape == (1, len(ids), 8)
    for name, matrix in expected.items():
        np.testing.assert_allclose(found[name], matrix, rtol=1.3e-6, atol=1e-5, err_msg=name)
    seen = ~np.isneginf(found["scores with the mask"])
    np.testing.assert_array_equal(found["scores"][seen], found["scores with the mask"][seen])


@pytest.mark.parametrize("words", [[], ["you", "love", "cats", "I"], ["dogs"] * 8])
def test_it_prints_all_of_them_within_80_columns(
    words: list[str], example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["five_words.py", *words])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in example.ABOUT:
        assert any(line.startswith(f"{name}, (") for line in lines)
    assert words or ("rows, (3, 8): the table's row of each word" in lines and "the ids [0, 2, 3]" in "".join(lines))


@pytest.mark.parametrize(("words", "message"), [(["I", "hate"], "'hate' is not in the"), (["I"] * 9, "at most 8")])
def test_other_texts_are_refused(
    words: list[str], message: str, example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["five_words.py", *words])
    with pytest.raises(SystemExit):
        example.main()
    assert message in capsys.readouterr().err
