"""Adapters against `peft`: what one writes the other reads, and both compute the same logits."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import llamarium
from llamarium.adapters.config import ALL_PROJECTIONS, LoRAConfig
from llamarium.adapters.files import base_name
from llamarium.adapters.lora import apply_lora, lora_linears
from llamarium.adapters.merge import merge_adapters
from llamarium.adapters.modules import load_adapter
from llamarium.adapters.save import save_adapter
from llamarium.errors import CheckpointError, UnsupportedFormatError
from llamarium.file_names import ADAPTER, ADAPTER_CONFIG
from llamarium.inspect.forward import logits_of
from llamarium.kernels import native
from llamarium.runtime.native.runner import NativeRunner
from llamarium.tokenizer.backends.huggingface import HuggingFaceBackend
from llamarium.tokenizer.backends.pipeline import byte_level_json, llama3_cutter
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.bpe import BYTE_TO_CHARACTER
from llamarium.tokenizer.special import SpecialTokens
from llamarium.train.config import FinetuneConfig
from llamarium.train.finetune import prepare

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]  # peft's use of transformers

IDS = torch.tensor([[1, 5, 17, 200, 3, 255, 0, 42], [9, 8, 7, 6, 5, 4, 3, 2]])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TARGETS = ("q_proj", "v_proj", "o_proj", "mlp.up_proj", "layers.1.mlp.down_proj")
VARIANTS: dict[str, dict[str, bool]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.fixture
def base(model_files: Callable[..., Any]) -> Path:
    return model_files(dtype=torch.float32).huggingface()


def theirs(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def randomize(tensors: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in tensors:
            if "lora_B" in name:
                tensor.normal_(0, 0.3, generator=generator)
            elif "lora_embedding_A" in name:
                tensor.normal_(0, 0.05, generator=generator)
            elif "magnitude" in name:
                tensor.mul_(torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_ours_in_peft(variant: str, base: Path, tmp_path: Path) -> None:
    model = llamarium.load(base, device="cpu").model
    before = model(IDS)
    apply_lora(model, LoRAConfig(r=4, alpha=8, target_modules=TARGETS, **VARIANTS[variant]))
    randomize(model.named_parameters())
    save_adapter(model, tmp_path / "a", base_model=str(base))
    found = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "a").eval()
    torch.testing.assert_close(found(IDS).logits, model(IDS), **CLOSE)
    assert (model(IDS) - before).abs().max() > 0.01
    merged = found.merge_and_unload()
    torch.testing.assert_close(merge_adapters(model)(IDS), merged(IDS).logits, **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("targets", ["named", "all-linear"])
@torch.no_grad()
def test_pefts_in_ours(variant: str, targets: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=targets if targets == "all-linear" else list(TARGETS),
        task_type="CAUSAL_LM",
        **VARIANTS[variant],
    )
    wrapped = peft.get_peft_model(theirs(base), config).eval()
    randomize(wrapped.named_parameters())
    wrapped.save_pretrained(tmp_path / "a")
    model = llamarium.load(base, device="cpu").model
    load_adapter(model, tmp_path / "a")
    assert sum(1 for _ in lora_linears(model)) == (14 if targets == "all-linear" else 9)
    torch.testing.assert_close(model(IDS), wrapped(IDS).logits, **CLOSE)
    save_adapter(model, tmp_path / "b", base_model=str(base))
    left, right = (json.loads((tmp_path / name / ADAPTER_CONFIG).read_text()) for name in "ab")
    assert {key: value for key, value in right.items() if key != "target_modules"}.items() <= left.items()
    assert sorted(left["target_modules"]) == sorted(right["target_modules"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_pefts(variant: str, base: Path, tmp_path: Path) -> None:
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=4, alpha=8, target_modules=TARGETS, **VARIANTS[variant]))
    randomize(model.named_parameters())
    save_adapter(model, tmp_path / "a")
    other = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "a", is_trainable=True)
    weights = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(1))
    (model(IDS) * weights).sum().backward()
    (other(IDS).logits * weights).sum().backward()
    grads = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(ours) == len(grads) > 0
    for name, grad in ours.items():
        key = "base_model.model." + name.replace(".weight", ".default.weight")
        if name.endswith("lora_magnitude_vector"):
            key = f"base_model.model.{name}.default.weight"
        torch.testing.assert_close(grad, grads[key], rtol=1e-4, atol=1e-4)


def test_a_begins_as_pefts_does(base: Path) -> None:
    wrapped = peft.get_peft_model(theirs(base), peft.LoraConfig(r=64, target_modules=["q_proj"]))
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=64, target_modules=("q_proj",)))
    name = "model.layers.0.self_attn.q_proj"
    ours = model.get_submodule(name).lora_A.weight
    other = wrapped.get_submodule(f"base_model.model.{name}").lora_A["default"].weight
    assert ours.abs().max().item() == pytest.approx(other.abs().max().item(), rel=1e-2)
    assert ours.std().item() == pytest.approx(other.std().item(), rel=3e-2)


# --- what a run hands over --------------------------------------------------------------------------------------------

CONTROL = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|im_start|> <|im_end|>".split()
)
TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "tool", "content": "42"},
]


@pytest.fixture
def chatless(model_files: Callable[..., Any]) -> Path:
    """A base whose vocabulary has the control tokens of two dialog formats, and which has no template."""
    special = {name: 256 + i for i, name in enumerate(CONTROL)}
    vocab = {character: i for i, character in enumerate(BYTE_TO_CHARACTER.values())}
    contents = byte_level_json(vocab=vocab, merges=[], special=special, cutter=llama3_cutter(), whole_pieces=False)
    known = SpecialTokens(ids=special, bos=256, eos=(257,), add_bos=True)
    backend = HuggingFaceBackend(contents, special, byte_level=True, source="bytes")
    base = model_files(dtype=torch.float32, vocab_size=263, bos_token_id=256, eos_token_id=(257,)).huggingface()
    Tokenizer(backend, known, vocab_size=263, source="bytes").save(base)
    return base


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(("chat_format", "end"), [("auto", 260), ("llama3", 260), ("chatml", 262)])
def test_a_tuned_model_carries_its_dialog_format(
    method: Any, chat_format: Any, end: int, chatless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / "examples.jsonl", tmp_path / "tuned"
    data.write_text(json.dumps({"messages": TALK}) + "\n")
    monkeypatch.chdir(chatless.parent)
    config = FinetuneConfig(
        model=chatless.name, data=str(data), method=method, chat_format=chat_format, validation=0.0, device="cpu"
    )
    setup = prepare(config)
    out.mkdir()
    setup.save(out)
    ids = setup.tokenizer.chat(TALK, add_generation_prompt=False)
    assert list(setup.train.examples[0].ids) == ids and end in ids
    oracle = transformers.AutoTokenizer.from_pretrained(out)
    for prompt in (True, False):
        expected = oracle.apply_chat_template(TALK, add_generation_prompt=prompt, return_dict=False)
        assert setup.tokenizer.chat(TALK, add_generation_prompt=prompt) == expected
    if method == "lora":
        monkeypatch.chdir(tmp_path)  # the base was given by a relative path
        assert base_name(out) == str(chatless)
        llama = llamarium.load(adapter=out, device="cpu")
        peft.PeftModel.from_pretrained(theirs(chatless), out)
    else:
        llama = llamarium.load(out, device="cpu")
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"][:2] == [257, end]
    assert llama.tokenizer.chat(TALK, add_generation_prompt=False) == ids
    assert end in llama.stop_ids and llama.generation_config["eos_token_id"][:2] == [257, end]


def test_all_linear_is_written_as_names(base: Path, tmp_path: Path) -> None:
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=2, target_modules="all-linear"))
    save_adapter(model, tmp_path / "a")
    assert sorted(json.loads((tmp_path / "a" / ADAPTER_CONFIG).read_text())["target_modules"]) == sorted(
        ALL_PROJECTIONS
    )
    wrapped = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "a")
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 14


def test_a_built_in_base_is_named_as_the_hub_names_it(base: Path, tmp_path: Path) -> None:
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=2))
    save_adapter(model, tmp_path / "ours", base_model="smollm2-135m")
    save_adapter(model, tmp_path / "theirs", base_model="HuggingFaceTB/SmolLM2-135M-Instruct")
    for name in ("ours", "theirs"):
        config = json.loads((tmp_path / name / ADAPTER_CONFIG).read_text())
        assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_name(tmp_path / "ours") == "smollm2-135m"
    assert base_name(tmp_path / "theirs") == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_pissa_is_refused(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    peft.get_peft_model(theirs(base), config).save_pretrained(tmp_path / "a")
    with pytest.raises(llamarium.errors.UnsupportedFormatError, match="pissa"):
        load_adapter(llamarium.load(base, device="cpu").model, tmp_path / "a")


# --- adapters as peft writes them -------------------------------------------------------------------------------------

PARTS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
UNSLOTH = rf"(?:\bmodel\.layers\.[\d]{{1,}}\.(?:self_attn|attention|mlp|feed_forward)\.(?:(?:{PARTS})))"
KINDS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
    "regex": {"target_modules": r".*layers\.1\.(self_attn\.[qk]_proj|mlp\.(gate|down)_proj)"},
    "unsloth": {"target_modules": UNSLOTH},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"]},
    "exclude regex": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.0\..*"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 7},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 50, "down_proj": 24},
    },
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    "saved Linear": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["layers.0.mlp.up_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3, 200]},
    "tokens by name": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [255, 0]}},
    "tied on purpose": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


def randomized(base: Path, variant: dict[str, bool], fields: dict[str, Any], folder: Path) -> Any:
    """An adapter of peft, saved, of which every trained number matters."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 64, "task_type": "CAUSAL_LM", "init_lora_weights": False, **variant, **fields}
    )
    wrapped = peft.get_peft_model(theirs(base), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and ".lora_" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.filterwarnings("ignore")  # peft's advice about tied weights
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_that_peft_writes(
    kind: str, variant: str, tied: bool, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=tied).huggingface()
    wrapped = randomized(base, VARIANTS[variant], KINDS[kind], tmp_path / "a")
    expected = wrapped(IDS).logits
    plain = llamarium.load(base, device="cpu", dtype="float32")
    assert (plain.model(IDS) - expected).abs().max() > 5e-3, "the adapter matters"

    llama = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32")
    is_native = native.library() is not None
    for row, ids in zip(expected, IDS.tolist(), strict=True):
        torch.testing.assert_close(torch.from_numpy(np.concatenate([*logits_of(llama.runner, ids)])), row, **CLOSE)
    torch.testing.assert_close(llama.model(IDS), expected, **CLOSE)
    assert isinstance(llama.runner, NativeRunner) == is_native, "the modules that were built are not edits"

    model = plain.model
    load_adapter(model, tmp_path / "a", trainable=True)
    torch.testing.assert_close(model(IDS), expected, **CLOSE)
    save_adapter(model, tmp_path / "b", base_model=str(base))
    again = llamarium.load(base, adapter=tmp_path / "b", device="cpu", dtype="float32")
    torch.testing.assert_close(
        torch.from_numpy(np.concatenate([*logits_of(again.runner, IDS[0].tolist())])), expected[0], **CLOSE
    )
    reread = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "b").eval()
    torch.testing.assert_close(reread(IDS).logits, expected, **CLOSE)
    torch.testing.assert_close(merge_adapters(model)(IDS), expected, **CLOSE)


def resized(base: Path, num_rows: int) -> Any:
    model = theirs(base)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    return model


RESIZED: dict[str, dict[str, Any]] = {
    "layers": {},
    "modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "corrected": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "corrected with DoRA": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "tokens": {"trainable_token_indices": [7, 249]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_rows", [259, 250])
@pytest.mark.parametrize("kind", RESIZED)
@torch.no_grad()
def test_a_resized_vocabulary(
    kind: str, num_rows: int, tied: bool, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=tied).huggingface()
    torch.manual_seed(0)
    fields = {"target_modules": ["q_proj"], **RESIZED[kind]}
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **fields)
    wrapped = peft.get_peft_model(resized(base, num_rows), config).eval()
    if kind == "layers":
        embedding = wrapped.get_input_embeddings().weight
        embedding.add_(torch.randn_like(embedding) * 0.1)
    wrapped.save_pretrained(tmp_path / "a")
    ids = IDS[:1].clamp(max=num_rows - 1)
    expected = wrapped(ids).logits[0]
    llama = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32")
    assert llama.config.vocab_size == num_rows
    torch.testing.assert_close(
        torch.from_numpy(np.concatenate([*logits_of(llama.runner, ids[0].tolist())])), expected, **CLOSE
    )
    torch.testing.assert_close(llama.model(ids)[0], expected, **CLOSE)
    model = llamarium.load(base, device="cpu", dtype="float32").model
    load_adapter(model, tmp_path / "a")
    torch.testing.assert_close(model(ids)[0], expected, **CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], r".*(q_proj|embed_tokens)"], ids=str)
@pytest.mark.parametrize("patterns", [{}, {"rank_pattern": {"embed_tokens|lm_head": 3}}], ids=["plain", "patterns"])
@torch.no_grad()
def test_corrections_that_are_tied_on_purpose(
    targets: Any, patterns: dict[str, Any], model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=True).huggingface()
    fields = {"target_modules": targets, "ensure_weight_tying": True, "lora_alpha": 4, **patterns}
    expected = randomized(base, VARIANTS["rslora"], fields, tmp_path / "a")(IDS).logits
    llama = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32")
    found = torch.from_numpy(np.concatenate([*logits_of(llama.runner, IDS[0].tolist())]))
    torch.testing.assert_close(found, expected[0], **CLOSE)
    torch.testing.assert_close(llama.model(IDS), expected, **CLOSE)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
@pytest.mark.parametrize("has_biases", [True, False], ids=["biases", "no biases"])
@torch.no_grad()
def test_trained_biases(bias: str, has_biases: bool, model_files: Callable[..., Any], tmp_path: Path) -> None:
    base = model_files(dtype=torch.float32, attention_bias=has_biases).huggingface()
    expected = randomized(base, VARIANTS["dora"], {"target_modules": ["q_proj"], "bias": bias}, tmp_path / "a")(IDS)
    llama = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32")
    found = torch.from_numpy(np.concatenate([*logits_of(llama.runner, IDS[0].tolist())]))
    torch.testing.assert_close(found, expected.logits[0], **CLOSE)
    torch.testing.assert_close(llama.model(IDS), expected.logits, **CLOSE)

    model = llamarium.load(base, device="cpu", dtype="float32").model
    if not has_biases:
        load_adapter(model, tmp_path / "a", trainable=True)
        return
    with pytest.raises(UnsupportedFormatError, match="biases"):
        load_adapter(model, tmp_path / "a", trainable=True)
    load_adapter(model, tmp_path / "a")
    torch.testing.assert_close(merge_adapters(model)(IDS), expected.logits, **CLOSE)
    tensors = load_file(tmp_path / "a" / ADAPTER)
    name = next(name for name in tensors if name.endswith(".bias"))
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "a" / ADAPTER)
    with pytest.raises(CheckpointError, match="missing"):
        llamarium.load(base, adapter=tmp_path / "a", device="cpu")


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_two_copies_of_a_module_must_agree(model_files: Callable[..., Any], tmp_path: Path) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=False).huggingface()
    randomized(base, {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / ADAPTER)
    head = tensors["base_model.model.lm_head.weight"]
    save_file(tensors | {"base_model.model.lm_head.modules_to_save.weight": head + 1}, tmp_path / "a" / ADAPTER)
    with pytest.raises(CheckpointError, match="twice"):
        llamarium.load(base, adapter=tmp_path / "a", device="cpu")


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_older_keys_and_a_pickle(base: Path, tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    wrapped = randomized(base, VARIANTS["dora"], fields, tmp_path / "a")
    expected = wrapped(IDS).logits
    tensors = load_file(tmp_path / "a" / ADAPTER)
    spellings = {
        "default": lambda key: re.sub(r"(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))", r"\1.default", key),
        "wrapped": lambda key: key.replace("lm_head.weight", "lm_head.modules_to_save.default.weight"),
        "bare": lambda key: key.removeprefix("base_model.model."),
        "twice": lambda key: "base_model.model." + key,
    }
    for spelling in spellings.values():
        save_file({spelling(key): value for key, value in tensors.items()}, tmp_path / "a" / ADAPTER)
        model = llamarium.load(base, device="cpu", dtype="float32").model
        load_adapter(model, tmp_path / "a")
        torch.testing.assert_close(model(IDS), expected, **CLOSE)
    (tmp_path / "a" / ADAPTER).unlink()
    torch.save(tensors, tmp_path / "a" / "adapter_model.bin")
    model = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32").model
    torch.testing.assert_close(model(IDS), expected, **CLOSE)


# --- adapters of the embedding and the head ---------------------------------------------------------------------------

TABLES: dict[str, tuple[str, ...]] = {
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "both": ("embed_tokens", "lm_head", "q_proj"),
}


@pytest.mark.filterwarnings("ignore")  # peft's advice about tied weights
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", TABLES)
def test_adapters_of_tables_compute_and_learn_as_pefts(
    kind: str, variant: str, tied: bool, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=tied).huggingface()
    model = llamarium.load(base, device="cpu", dtype="float32").model
    before = model(IDS)
    trained = apply_lora(model, LoRAConfig(r=4, alpha=8, target_modules=TABLES[kind], **VARIANTS[variant]))
    torch.testing.assert_close(model(IDS), before, rtol=1e-6, atol=1e-6)
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    assert trained == sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    randomize(model.named_parameters())
    save_adapter(model, tmp_path / "a", base_model=str(base))

    other = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "a", is_trainable=True).eval()
    expected = other(IDS).logits
    assert (expected - before).abs().max() > 5e-3
    torch.testing.assert_close(model(IDS), expected, **CLOSE)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (model(IDS) * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs_by_name = {
        name.removeprefix("base_model.model.").replace(".default", "").replace("vector.weight", "vector"): p.grad
        for name, p in other.named_parameters()
        if p.requires_grad
    }
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs_by_name.keys() and ours
    for name, grad in ours.items():
        assert grad is not None
        torch.testing.assert_close(grad, theirs_by_name[name], rtol=1e-4, atol=1e-4)

    served = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32")
    assert isinstance(served.runner, NativeRunner) == (native.library() is not None)
    found = torch.from_numpy(np.concatenate([*logits_of(served.runner, IDS[0].tolist())]))
    torch.testing.assert_close(found, expected[0].detach(), **CLOSE)

    llamarium.merge(tmp_path / "a", tmp_path / "merged", dtype="float32", device="cpu")
    with torch.no_grad():
        merged = theirs(tmp_path / "merged")
        torch.testing.assert_close(merged(IDS).logits, expected, **CLOSE)
        assert torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight) is False

    again = llamarium.load(base, device="cpu", dtype="float32").model
    load_adapter(again, tmp_path / "a", trainable=True)
    names = {name for name, p in again.named_parameters() if p.requires_grad}
    assert names == ours.keys(), "the corrections go on, not a whole table"
    save_adapter(again, tmp_path / "b", base_model=str(base))
    one, two = (load_file(tmp_path / name / ADAPTER) for name in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_embedding_adapter_of_peft_is_trained_further_as_an_adapter(
    variant: str, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=False).huggingface()
    wrapped = randomized(base, VARIANTS[variant], KINDS["both"], tmp_path / "a")
    model = llamarium.load(base, device="cpu", dtype="float32").model
    load_adapter(model, tmp_path / "a", trainable=True)
    torch.testing.assert_close(model(IDS), wrapped(IDS).logits, **CLOSE)
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(IDS).log_softmax(-1)[..., 3].sum().neg().backward()
    optimizer.step()
    save_adapter(model, tmp_path / "b", base_model=str(base))
    other = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "b").eval()
    torch.testing.assert_close(model(IDS), other(IDS).logits, **CLOSE)


@pytest.mark.filterwarnings("ignore")
def test_an_embedding_begins_as_pefts_does(base: Path) -> None:
    wrapped = peft.get_peft_model(theirs(base), peft.LoraConfig(r=64, target_modules=["embed_tokens"]))
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=64, target_modules=("embed_tokens",)))
    ours: Any = model.model.embed_tokens
    other = wrapped.get_submodule("base_model.model.model.embed_tokens")
    assert not ours.lora_embedding_A.any() and not other.lora_embedding_A["default"].any()
    assert ours.lora_embedding_B.shape == other.lora_embedding_B["default"].shape
    assert ours.lora_embedding_B.std().item() == pytest.approx(other.lora_embedding_B["default"].std().item(), rel=3e-2)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_an_adapted_embedding_counts_where_modules_run_the_model(
    model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, tie_word_embeddings=False).huggingface()
    wrapped = randomized(base, {}, {"target_modules": ["embed_tokens"]}, tmp_path / "a")
    expected = llamarium.load(base, device="cpu", dtype="float32", quantize="nf4").model
    before = expected(IDS)
    merged = wrapped.merge_and_unload().get_input_embeddings().weight
    expected.model.embed_tokens = torch.nn.Embedding.from_pretrained(merged)
    llama = llamarium.load(base, adapter=tmp_path / "a", device="cpu", dtype="float32", quantize="nf4")
    torch.testing.assert_close(llama.model(IDS), expected(IDS), **CLOSE)
    assert (llama.model(IDS) - before).abs().max() > 5e-3
