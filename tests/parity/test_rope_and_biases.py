"""RoPE scalings and biases in folders of transformers, against it: both runners, quantized, adapted, exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import llamarium
from llamarium.config import ModelConfig
from llamarium.errors import LlamariumError
from llamarium.inspect.trace import trace
from llamarium.runtime.native.runner import NativeRunner

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's use of transformers
]

SHAPE = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn with its own factor": {"rope_scaling": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0}},
    "attention": {"attention_bias": True},
    "mlp": {"mlp_bias": True, "tie_word_embeddings": True},
    "both": {"attention_bias": True, "mlp_bias": True, "rope_scaling": YARN},
}
BIASED = ["attention", "mlp", "both"]
IDS = torch.randint(0, 160, (256,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **KINDS[kind]}))
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.5)
            made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "-"))
            model.save_pretrained(made[kind])
        return made[kind]

    return get


def theirs(folder: Path, **options: Any) -> Any:
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    return theirs(folder)(torch.tensor([IDS])).logits[0]


def in_c(llama: Any, ids: list[int] = IDS) -> torch.Tensor:
    assert isinstance(llama.runner, NativeRunner)
    return torch.from_numpy(trace(llama.runner, ids, names=["logits"]).arrays["logits", None])


def close(found: torch.Tensor, expected: torch.Tensor, share: float = 2e-5) -> None:
    assert float((found - expected).abs().max()) < share * float(expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_both_runners_compute_the_same_logits(kind: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(kind)
    expected = their_logits(folder)
    llama = llamarium.load(folder, dtype="float32")
    close(in_c(llama), expected)
    close(llama.model(torch.tensor([IDS]))[0], expected)


@pytest.mark.parametrize("kind", ["yarn", "both"])
def test_answers_are_the_same_tokens(kind: str, folder_of: Callable[[str], Path]) -> None:
    folder, prompt = folder_of(kind), IDS[:100]
    expected = theirs(folder).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 100, dtype=torch.long), max_new_tokens=40,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )[0, 100:].tolist()  # fmt: skip
    ids = list(prompt)
    llama = llamarium.load(folder, dtype="float32")
    for token in expected:
        assert int(in_c(llama, ids)[-1].argmax()) == token
        ids.append(token)


def test_a_text_beyond_a_dynamic_scalings_context_is_refused(folder_of: Callable[[str], Path]) -> None:
    llama = llamarium.load(folder_of("dynamic"), dtype="float32")
    for compute in (lambda: llama.model(torch.tensor([[*IDS, 1]])), lambda: in_c(llama, [*IDS, 1])):
        with pytest.raises(LlamariumError) as caught:
            compute()
        assert "257" in str(caught.value) and "256" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["hf", "gguf"])
@torch.no_grad()
def test_an_export_computes_the_same(kind: str, format: Any, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = folder_of(kind), tmp_path / ("model.gguf" if format == "gguf" else "model")
    llamarium.export(folder, out, format=format, type="F32", with_tokenizer=False)
    again = llamarium.load(out, dtype="float32")
    expected = their_logits(folder)
    close(in_c(again), expected)
    close(again.model(torch.tensor([IDS]))[0], expected)
    config = ModelConfig.from_file(folder / "config.json")
    assert (again.config.attention_bias, again.config.mlp_bias) == (config.attention_bias, config.mlp_bias)
    if format == "hf":
        close(their_logits(out), expected)


@pytest.mark.parametrize("kind", BIASED)
@torch.no_grad()
def test_quantized_models_keep_their_biases(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of(kind)
    expected = their_logits(folder)
    llamarium.quantize(folder, tmp_path / "packed", type="Q8_0")
    for llama in (llamarium.load(tmp_path / "packed"), llamarium.load(folder, quantize="Q8_0")):
        close(in_c(llama), expected, 0.1)
        close(llama.model(torch.tensor([IDS]))[0].float(), expected, 0.1)
    nf4 = llamarium.load(folder, quantize="NF4", dtype="float32")
    biases = [name for name, module in nf4.model.named_modules() if getattr(module, "bias", None) is not None]
    assert len(biases) == 2 * {"attention": 4, "mlp": 3, "both": 7}[kind]
    x = torch.randn(3, 64)
    name = biases[0]
    linear, plain = nf4.model.get_submodule(name), theirs(folder).get_submodule(name)
    torch.testing.assert_close(linear(x), x @ linear.dequantize().T + plain.bias)


@pytest.mark.parametrize("kind", ["attention", "both"])
@pytest.mark.parametrize("dora", [False, True])
@torch.no_grad()
def test_adapters_beside_biases(kind: str, dora: bool, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    import peft

    folder = folder_of(kind)
    targets = ["q_proj", "k_proj", "o_proj", "down_proj"]
    torch.manual_seed(3)
    adapted = peft.get_peft_model(
        theirs(folder),
        peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False, use_dora=dora),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.eval()(torch.tensor([IDS])).logits[0]
    llama = llamarium.load(folder, adapter=tmp_path / "adapter", dtype="float32")
    close(in_c(llama), expected)
    close(llama.model(torch.tensor([IDS]))[0], expected)
    with pytest.warns(UserWarning, match="tokenizer"):
        llamarium.merge(tmp_path / "adapter", tmp_path / "merged", model=folder, dtype="float32")
    close(their_logits(tmp_path / "merged"), expected)


def test_heads_and_their_bias_sum_to_attention(folder_of: Callable[[str], Path]) -> None:
    from llamarium.inspect.probes.attribution import NAMES
    from llamarium.inspect.probes.heads import heads_joined

    llama = llamarium.load(folder_of("both"), dtype="float32")
    found = trace(llama.runner, IDS[:20], names=NAMES)
    joined = heads_joined(llama.runner, found, 1)
    assert float(np.abs(joined.rounding_TD).max()) < 1e-4 * float(np.abs(joined.added_TND).max())
