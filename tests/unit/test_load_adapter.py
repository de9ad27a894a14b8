"""`load(adapter=...)`: the adapter's answers, without torch where the base runs in C, and on its own base alone."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.adapters import base_check
from llamarium.adapters.base_check import Base, WeightBase
from llamarium.adapters.files import SavedAdapter, read_adapter
from llamarium.adapters.lora import LoRAConfig, apply_lora, lora_linears
from llamarium.adapters.merge import merge_adapters
from llamarium.adapters.modules import ModuleBase, load_adapter
from llamarium.adapters.save import adapter_metadata, save_adapter
from llamarium.api import Llama
from llamarium.checkpoints.checkpoint import stored_fingerprint
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.save import save_model
from llamarium.errors import CheckpointError, OptionError, TokenizerError, UnknownNameError
from llamarium.generation.adapters import head_reader
from llamarium.inspect.forward import Memory, advance
from llamarium.kernels import native
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner
from llamarium.train.data.bpe import train_characters
from strong_adapters import strengthen

pytestmark = pytest.mark.torch

IDS = [1, 5, 17, 200, 3, 255, 0, 42]
VARIANTS = {
    "lora": LoRAConfig(r=2),
    "rslora": LoRAConfig(r=4, alpha=8, use_rslora=True),
    "dora": LoRAConfig(r=4, use_dora=True),
    "some": LoRAConfig(r=2, target_modules=("q_proj", "layers.1.mlp.down_proj", "lm_head")),
}
STORAGES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32", "deterministic": True},
    "NF4": {"quantize": "NF4"},
    "Q4_1": {"quantize": "Q4_1"},
}
needs_c = pytest.mark.skipif(native.library() is None, reason="without the C kernels all of it is modules")


def trained(base: Path, folder: Path, config: LoRAConfig, seed: int = 0, **options: Any) -> Path:
    """An adapter for a base, of which every number matters."""
    model = llamarium.load(base, device="cpu", **options).model
    apply_lora(model, config)
    strengthen(model, 0.1, seed=seed, stretch=1.3)
    save_adapter(model, folder, base_model=str(base))
    return folder


def logits(runner: Runner) -> np.ndarray:
    memory = Memory(runner, len(IDS))
    return np.asarray(advance(runner, memory.cache, [memory.begin(IDS, len(IDS))]))


def in_float(base: Path, adapter: Path | None, **options: Any) -> np.ndarray:
    """What the modules compute in float32."""
    model = llamarium.load(base, device="cpu", **options).model
    if adapter is not None:
        load_adapter(model, adapter)
    return logits(ModuleRunner(model.float()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_answers_as_the_modules_with_the_adapter(
    storage: str, variant: str, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(tie_word_embeddings=False).huggingface()
    as_loaded = STORAGES[storage] if storage == "float16" else {}  # rounds the base, so that it is another one
    adapter = trained(base, tmp_path / "a", VARIANTS[variant], **as_loaded)
    llama = llamarium.load(adapter=adapter, device="cpu", **STORAGES[storage])
    if native.library() is not None:
        assert isinstance(llama.runner, NativeRunner) == (storage != "NF4")
    plain = {key: value for key, value in STORAGES[storage].items() if key != "deterministic"}
    expected, without = in_float(base, adapter, **plain), in_float(base, None, **plain)
    scale = float(expected.std())
    np.testing.assert_allclose(logits(llama.runner), expected, rtol=0, atol=0.05 * scale)
    assert not np.allclose(expected, without, atol=0.2 * scale), "the adapter matters"
    before = logits(llama.runner)
    with torch.no_grad():
        found = llama.model(torch.tensor([IDS]))[0, -1].float().numpy()
    np.testing.assert_allclose(found, expected[0], rtol=0, atol=0.05 * scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the modules have been edited
        assert (logits(llama.runner) == before).all(), "asking for the modules changes nothing"


@needs_c
def test_a_base_that_is_named_by_its_bytes_or_was_compared_before_is_not_compared(
    model_files: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMARIUM_CACHE", str(tmp_path / "cache"))
    base = model_files(tie_word_embeddings=False).huggingface()
    older = trained(base, tmp_path / "older", VARIANTS["lora"])
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, VARIANTS["lora"])
    strengthen(model, 0.1, seed=0)
    named = adapter_metadata(model, str(base), stored_fingerprint(open_checkpoint(base)))
    save_adapter(model, tmp_path / "named", base_model=str(base), metadata=named)
    compared: list[Path] = []
    compare = base_check._compare

    def counted(one: Base, saved: SavedAdapter) -> bool:
        compared.append(saved.folder)
        return compare(one, saved)

    monkeypatch.setattr(base_check, "_compare", counted)
    for dtype in ("bfloat16", "float32", "bfloat16"):
        llamarium.load(adapter=tmp_path / "named", device="cpu", dtype=dtype)  # type: ignore[arg-type]
        llamarium.load(adapter=older, device="cpu", dtype=dtype)  # type: ignore[arg-type]
    assert compared == [older], "once, and remembered"

    other = model_files(tie_word_embeddings=False, seed=5).huggingface()
    for folder in (tmp_path / "named", older):
        with pytest.raises(CheckpointError, match="was trained on another base"):
            llamarium.load(other, adapter=folder, device="cpu")
    (tmp_path / "cache" / "checked-adapters").chmod(0o500)
    llamarium.load(adapter=trained(base, tmp_path / "third", VARIANTS["lora"], seed=2), device="cpu")


@needs_c
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stored", ["hf", "F32", "Q8_0", "Q4_0", "Q4_1", "tied"])
def test_weights_and_modules_say_the_same_of_a_base(
    stored: str, variant: str, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    if stored == "tied" and variant == "some":
        pytest.skip("a tied head has no adapter")
    files = model_files(tie_word_embeddings=stored == "tied")
    base = files.gguf_file(stored) if stored.startswith("Q") else files.huggingface()
    options = {"dtype": "float32"} if stored == "F32" else {}
    adapter = trained(base, tmp_path / "a", VARIANTS[variant])
    llama = llamarium.load(base, device="cpu", **options)
    assert llama.runner.adapters is not None
    weights = WeightBase(llama.runner, read_adapter(adapter, llama.config))
    load_adapter(llama.model, adapter)
    modules = ModuleBase(llama.model)
    assert weights.fingerprint() == modules.fingerprint()
    assert weights.linears_fingerprint() == modules.linears_fingerprint()
    found, expected = weights.share(), modules.share()
    assert found is not None and expected is not None
    assert found.of_correction == pytest.approx(expected.of_correction, rel=1e-4, abs=1e-6)
    assert found.noise == pytest.approx(expected.noise, rel=1e-5)


@needs_c
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_torch_is_not_imported(variant: str, model_files: Callable[..., Any], tmp_path: Path) -> None:
    base = model_files().huggingface()
    adapter = trained(base, tmp_path / "a", VARIANTS[variant])
    code = (
        "import sys, llamarium\n"
        f"llama = llamarium.load(adapter={str(adapter)!r}, device='cpu')\n"
        "llama.generate([1, 5, 17], max_tokens=2, temperature=0.0) if llama.optional_tokenizer else llama.runner\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("storage", ["bfloat16", "NF4", "Q4_1"])
def test_another_base_and_one_that_contains_the_adapter_are_refused(
    storage: str, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files().huggingface()
    adapter = trained(base, tmp_path / "a", VARIANTS["lora"])
    other = model_files(seed=1).huggingface()
    with pytest.raises(CheckpointError, match="trained on another base"):
        llamarium.load(other, adapter=adapter, device="cpu", **STORAGES[storage])
    model = llamarium.load(base, device="cpu").model
    load_adapter(model, adapter)
    save_model(merge_adapters(model), tmp_path / "merged")
    with pytest.raises(CheckpointError, match="contains this adapter already"):
        llamarium.load(tmp_path / "merged", adapter=adapter, device="cpu", **STORAGES[storage])


def test_what_lies_beside_the_adapter_is_the_models_and_is_looked_at_first(
    model_files: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_files().huggingface()
    adapter = trained(base, tmp_path / "a", VARIANTS["lora"])
    assert llamarium.load(adapter=adapter, device="cpu").optional_tokenizer is None
    train_characters(["abc"]).save(adapter)
    assert llamarium.load(str(base), adapter=str(adapter), device="cpu").encode("cab") is not None

    def read(*_: object) -> Llama:
        raise AssertionError("the weights are read before the adapter is refused")

    monkeypatch.setattr("llamarium.api.load_weights", read)
    (adapter / "tokenizer.json").write_text("{}")
    for path in adapter.glob("characters.json"):
        path.unlink()
    with pytest.raises(TokenizerError):
        llamarium.load(adapter=adapter, device="cpu")
    (adapter / "tokenizer.json").unlink()
    (adapter / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="damaged"):
        llamarium.load(adapter=adapter, device="cpu")


def test_an_adapter_without_a_base_says_how_to_name_it(model_files: Callable[..., Any], tmp_path: Path) -> None:
    base = model_files().huggingface()
    adapter = trained(base, tmp_path / "a", VARIANTS["lora"])
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{base}"', "null"))
    with pytest.raises(OptionError, match=r"names no base model; name it with -m \(in Python: model=\)"):
        llamarium.load(adapter=adapter)
    llamarium.load(base, adapter=adapter, device="cpu")


@needs_c
def test_an_adapter_that_is_trained_further_in_place_is_what_answers(
    model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(tie_word_embeddings=False).huggingface()
    llama = llamarium.load(adapter=trained(base, tmp_path / "a", VARIANTS["lora"]), device="cpu")
    before, model = logits(llama.runner), llama.model
    with torch.no_grad():
        for _, linear in lora_linears(model):
            linear.lora_B.weight.mul_(-3)
    with pytest.warns(UserWarning, match="PyTorch answers"):
        after = logits(llama.runner)
    assert (after == logits(ModuleRunner(model))).all() and not np.allclose(after, before, atol=0.1 * before.std())


@needs_c
def test_an_adapter_that_is_no_folder_is_refused_with_words() -> None:
    for wrong in (object(), 3, {"a": 1}):
        with pytest.raises(OptionError, match=r"adapter is .*; expected a text or a path"):
            llamarium.load("shakespeare-char", adapter=wrong)  # pyright: ignore[reportArgumentType]


@needs_c
def test_an_answer_is_read_by_the_head_of_the_adapter_that_it_began_with(
    model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(tie_word_embeddings=False).huggingface()
    train_characters([bytes(range(32, 127)).decode()]).save(base)
    folder = trained(base, tmp_path / "some", VARIANTS["some"])
    llama, stream_MD = llamarium.load(base, device="cpu"), np.ones((1, 128), np.float32)
    own = llamarium.load(base, adapter=folder, device="cpu").runner.read_stream(stream_MD)
    with llama.engine(adapters={"some": folder}, kv_memory=2**22) as engine:
        with_head, plain = (engine.stream(IDS, adapter=name, max_tokens=2) for name in ("some", None))
        for answers in (with_head, plain):
            answers.result()
        engine.choices.remove("some")
        read = [head_reader(*answers.runs_on).read_stream(stream_MD) for answers in (with_head, plain)]
    assert np.array_equal(read[0], own) and np.array_equal(read[1], llama.runner.read_stream(stream_MD))
    assert not np.array_equal(*read)


def test_an_engine_answers_with_several_adapters_side_by_side(model_files: Callable[..., Any], tmp_path: Path) -> None:
    base = model_files(tie_word_embeddings=False).huggingface()
    train_characters([bytes(range(32, 127)).decode()]).save(base)
    folders = {name: trained(base, tmp_path / name, VARIANTS[name], seed=i) for i, name in enumerate(("lora", "dora"))}
    llama = llamarium.load(base, device="cpu")
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "seed": 1}
    prompt = [1, 5, 17, 20, 3, 42]
    expected = {None: llama.generate(prompt, **options)}
    for name, folder in folders.items():
        expected[name] = llamarium.load(base, adapter=folder, device="cpu").generate(prompt, **options)
    with llama.engine(adapters=folders, kv_memory=2**22) as engine:
        for _ in range(2):  # cold, then over what each has left in the cache
            asked = {name: engine.stream(prompt, adapter=name, **options) for name in expected}
            assert {name: answers.result() for name, answers in asked.items()} == expected
        with pytest.raises(UnknownNameError, match="adapter is 'other'; expected lora, dora"):
            engine.stream(prompt, adapter="other")
    assert len({answer.completions[0].token_ids for answer in expected.values()}) == 3
    with pytest.raises(OptionError, match="has an adapter already"):
        llamarium.load(base, adapter=folders["lora"], device="cpu").engine(adapters=folders)
    with pytest.raises(OptionError, match="need a model that the C kernels run"):
        llamarium.load(base, device="cpu", quantize="NF4").engine(adapters=folders)
    dialogs = llamarium.load("smollm2-135m", device="cpu").tokenizer
    dialogs.save(folders["lora"])
    with pytest.raises(llamarium.LlamariumError):
        llama.engine(adapters=folders)
