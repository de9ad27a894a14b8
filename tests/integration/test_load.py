"""From files to a model: four formats, one set of logits; packed or not; quantized on the way; and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import llamarium
from closeness import Reference, assert_close_to_reference, model_reference
from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.errors import CheckpointError, OptionError, TokenizerError
from llamarium.model import LlamaForCausalLM
from llamarium.quant.ggml.linear import EmbeddingGGML, LinearGGML
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.tokenizer.backends.characters import CharacterTokenizer

pytestmark = pytest.mark.torch

IDS = torch.tensor([[1, 5, 17, 200, 3, 255, 0, 42], [9, 8, 7, 6, 5, 4, 3, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 100, 8193, 20000, 100000, 131071]])


@torch.no_grad()
def logits(path: Path, **options: Any) -> torch.Tensor:
    return llamarium.load(path, device="cpu", **{"dtype": "float32", **options}).model(IDS, POSITIONS)


def reference(path: Path) -> Reference:
    return model_reference(llamarium.load(path, device="cpu", dtype="float32").model, IDS, POSITIONS)


@torch.no_grad()
def oracle(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mask = torch.ones_like(IDS)
    return model(IDS, position_ids=POSITIONS.expand_as(IDS), attention_mask=mask).logits


@pytest.mark.parametrize("tied", [True, False])
def test_four_formats_give_the_same_logits(tied: bool, model_files: Callable[..., Any]) -> None:
    files = model_files(tie_word_embeddings=tied)
    single = files.huggingface()
    expected = oracle(single)
    found = {"huggingface": logits(single), "meta": logits(files.meta()), "gguf": logits(files.gguf_file("F32"))}
    found["meta, 2 shards"] = logits(files.meta(shards=2))
    found["sharded"] = logits(files.huggingface(shards=3))
    assert_close_to_reference(found["huggingface"], expected, reference(single))
    assert all(torch.equal(found["huggingface"], values) for values in found.values()), "the same weights, to the bit"


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_folder_equals_its_decoded_weights(double_quant: bool, model_files: Callable[..., Any]) -> None:
    files = model_files(dtype=torch.float32, head_dim=64, hidden_size=256)
    folder, decoded = files.nf4(double_quant=double_quant)
    whole = replace(files, weights=decoded).huggingface()
    expected, exact = logits(whole), reference(whole)
    for dequantize in ("auto", "use", "load"):
        assert_close_to_reference(logits(folder, dequantize=dequantize), expected, exact)
    kinds = {"auto": Linear4bit, "use": Linear4bit, "load": torch.nn.Linear}
    for dequantize, kind in kinds.items():
        model = llamarium.load(folder, device="cpu", dequantize=dequantize).model
        assert type(model.model.layers[0].mlp.up_proj) is kind or kind is torch.nn.Linear
        assert isinstance(model.lm_head, torch.nn.Linear)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_gguf_packed_equals_unpacked(type_name: str, model_files: Callable[..., Any]) -> None:
    path = model_files().gguf_file(type_name)
    expected = logits(path)
    if type_name in ("F16", "BF16"):
        with pytest.raises(OptionError, match="no tensor is quantized"):
            logits(path, dequantize="use")
        return
    model = llamarium.load(path, dtype="float32", device="cpu", dequantize="use").model
    assert isinstance(model.model.layers[0].self_attn.q_proj, LinearGGML)
    assert isinstance(model.model.embed_tokens, EmbeddingGGML)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(), "tied: one storage"
    with torch.no_grad():
        assert_close_to_reference(model(IDS, POSITIONS), expected, reference(path))


@pytest.mark.parametrize(
    ("method", "kind", "tolerance"),
    [("Q8_0", LinearPacked, 0.03), ("NF4", Linear4bit, 0.25), ("q4_1", LinearPacked, 0.25)],
)
def test_quantizing_on_load(method: Any, kind: type, tolerance: float, model_files: Callable[..., Any]) -> None:
    folder = model_files().huggingface()
    llama = llamarium.load(folder, dtype="float32", device="cpu", quantize=method)
    linears = [m for m in llama.model.modules() if isinstance(m, kind)]
    assert len(linears) == 7 * llama.config.num_hidden_layers
    assert isinstance(llama.model.lm_head, torch.nn.Linear)
    assert llama.model.lm_head.weight is llama.model.model.embed_tokens.weight
    expected = logits(folder)
    with torch.no_grad():
        error = (llama.model(IDS, POSITIONS) - expected).norm() / expected.norm()
    assert 1e-4 < error < tolerance
    held = {s.key: s.dtype for s in llama.sources}
    assert held["model.layers.0.mlp.up_proj.weight"] == method.upper()
    assert held["model.embed_tokens.weight"] == "F32"


@torch.no_grad()
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_are_packed_for_the_kernels_unless_something_else_is_asked_for(
    type_name: str, model_files: Callable[..., Any]
) -> None:
    path = model_files().gguf_file(type_name)
    packed = llamarium.load(path, device="cpu")
    linears = [m for m in packed.model.modules() if isinstance(m, LinearPacked)]
    assert len(linears) == 7 * packed.config.num_hidden_layers + 1 and isinstance(packed.runner, NativeRunner)
    assert packed.model.lm_head.weight is packed.model.model.embed_tokens.weight, "a tied head is the same storage"
    exact = llamarium.load(path, dtype="float32", device="cpu")
    for key in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = packed.model.get_submodule(key).dequantize()
        assert torch.equal(weight, exact.model.get_parameter(f"{key}.weight")), "nothing is lost"
    for others in ({"dequantize": "load"}, {"dequantize": "use"}, {"dtype": "float32"}, {"dtype": "float16"}):
        llama = llamarium.load(path, device="cpu", **others)
        assert not any(isinstance(m, LinearPacked) for m in llama.model.modules())
        at_each_use = others == {"dequantize": "use"}
        assert isinstance(llama.runner, ModuleRunner if at_each_use else NativeRunner)
    found, expected = packed.model(IDS, POSITIONS).float(), exact.model(IDS, POSITIONS)
    assert (found - expected).norm() / expected.norm() < 0.03


def test_without_the_kernels_gguf_is_unpacked(model_files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.kernels.native.library", lambda: None)
    llama = llamarium.load(model_files().gguf_file("Q8_0"), device="cpu")
    assert {s.dtype for s in llama.sources} == {"BF16"} and isinstance(llama.runner, ModuleRunner)


@pytest.mark.parametrize(("strict", "kind"), [(False, None), (True, CheckpointError)])
def test_packed_weights_that_are_not_finite_are_counted(
    strict: bool, kind: Any, model_files: Callable[..., Any]
) -> None:
    path = model_files().gguf_file("Q8_0")
    table = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[table.offset : table.offset + 2] = b"\x00\x7e"  # a block's scale: NaN
    path.write_bytes(data)
    if strict:
        with pytest.raises(kind, match=r"blk\.0\.ffn_up\.weight has 32 weights that are NaN"):
            llamarium.load(path, device="cpu", strict=True)
    else:
        with pytest.warns(UserWarning, match="has 32 weights that are NaN"):
            llamarium.load(path, device="cpu")


def test_what_is_quantized_while_loading_answers_in_c_where_the_kernels_multiply_it(
    model_files: Callable[..., Any],
) -> None:
    folder = model_files().huggingface()
    for method, kind in (("Q8_0", NativeRunner), ("Q4_1", NativeRunner), ("NF4", ModuleRunner)):
        assert isinstance(llamarium.load(folder, device="cpu", quantize=method).runner, kind), method


def test_deterministic_is_given_or_refused(model_files: Callable[..., Any]) -> None:
    folder = model_files().huggingface()
    for dtype, kv_dtype in (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")):
        runner = llamarium.load(folder, device="cpu", dtype=dtype, deterministic=True).runner
        assert isinstance(runner, NativeRunner) and runner.is_row_exact and runner.kv_dtype == kv_dtype
    with pytest.raises(OptionError, match="deterministic needs the C kernels"):
        llamarium.load(folder, device="cpu", deterministic=True, quantize="NF4")


def test_input_bits_reach_both_who_answer_and_are_refused_where_nothing_is_rounded(
    model_files: Callable[..., Any],
) -> None:
    gguf, folder = model_files().gguf_file("Q4_1"), model_files().huggingface()
    for path, options in ((gguf, {}), (folder, {"quantize": "Q8_0"})):
        for asked, expected in ((None, 8), (8, 8), (16, 16)):
            llama = llamarium.load(path, device="cpu", input_bits=asked, **options)
            assert isinstance(llama.runner, NativeRunner) and llama.runner.input_bits == expected
            linears = [module for module in llama.model.modules() if isinstance(module, LinearPacked)]
            assert linears and all(linear.input_bits == expected for linear in linears)
    for refused in ({}, {"dtype": "float32"}, {"quantize": "NF4"}):  # weights of floats, in C and in PyTorch; NF4
        with pytest.raises(OptionError, match="input_bits=8 was asked for, which is for packed weights"):
            llamarium.load(folder, device="cpu", input_bits=8, **refused)
    with pytest.raises(OptionError, match="input_bits is 4; expected 8, 16"):
        llamarium.load(gguf, device="cpu", input_bits=4)  # pyright: ignore[reportArgumentType]


def test_sources_tell_each_weight_s_way(model_files: Callable[..., Any]) -> None:
    llama = llamarium.load(model_files().gguf_file("Q8_0"), device="cpu")
    sources = {s.key: s for s in llama.sources}
    q_proj = sources["model.layers.1.self_attn.q_proj.weight"]
    assert (q_proj.name, q_proj.stored_dtype, q_proj.dtype) == ("blk.1.attn_q.weight", "Q8_0", "Q8_0")
    assert q_proj.permuted
    assert q_proj.file.name == "Q8_0.gguf"
    assert not sources["model.layers.1.self_attn.v_proj.weight"].permuted
    head = sources["lm_head.weight"]
    assert (head.tied_to, head.num_bytes) == ("model.embed_tokens.weight", 0)
    held, head_bytes = sum(s.num_bytes for s in llama.sources), llama.model.lm_head.weight.numel()
    assert (
        held == sum(t.numel() * t.element_size() for t in llama.model.state_dict(keep_vars=True).values()) - head_bytes
    )
    assert set(sources) == set(llama.model.state_dict())


def test_progress_reaches_the_whole(model_files: Callable[..., Any]) -> None:
    seen: list[tuple[int, int]] = []
    llamarium.load(model_files().huggingface(), device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(("value", "type_name"), [(float("nan"), None), (float("inf"), None), (float("nan"), "Q8_0")])
def test_weights_that_are_not_finite(value: float, type_name: str | None, model_files: Callable[..., Any]) -> None:
    files = model_files()
    if type_name is None:
        files.weights["model.layers.1.mlp.up_proj.weight"][3, 5:8] = value
        path, found = files.huggingface(), "model.layers.1.mlp.up_proj.weight has 3 weights that are NaN or infinite"
    else:
        path, found = files.gguf_file(type_name), "blk.0.attn_k.weight has 32 weights that are NaN or infinite"
        _break_first_scale(path)
    with pytest.warns(UserWarning, match=found):
        llamarium.load(path, device="cpu")
    with pytest.raises(CheckpointError, match=f"{found}; expected none"):
        llamarium.load(path, device="cpu", strict=True)


def _break_first_scale(path: Path) -> None:
    from llamarium.checkpoints.gguf.file import read_gguf

    tensor = read_gguf(path).tensors["blk.0.attn_k.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = b"\x00\x7e"  # the first block's scale, a float16 NaN
    path.write_bytes(content)


def test_options_that_cannot_be_honoured(model_files: Callable[..., Any]) -> None:
    folder, packed = model_files().huggingface(), model_files().gguf_file("Q8_0")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (folder, {"dtype": "int8"}, "dtype is 'int8'; expected auto, bfloat16"),
        (folder, {"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        (folder, {"device": "toaster"}, "device 'toaster' cannot be used"),
        (folder, {"quantize": "int3"}, "int3"),
        (folder, {"dequantize": "load"}, "no tensor is quantized"),
        (packed, {"dequantize": "sometimes"}, "sometimes"),
        (packed, {"dequantize": "use", "quantize": "nf4"}, "is quantized already"),
    ]
    for path, options, message in cases:
        with pytest.raises(OptionError, match=message):
            llamarium.load(path, **{"device": "cpu", **options})


def test_a_folder_without_a_tokenizer_computes_but_reads_no_text(model_files: Callable[..., Any]) -> None:
    llama = llamarium.load(model_files().huggingface(), device="cpu")
    assert llama.model(torch.tensor([[1, 2]])).shape == (1, 2, 256)
    for ask in (lambda: llama.generate("hello"), lambda: llama.tokenizer, lambda: llama.chat([])):
        with pytest.raises(TokenizerError, match="has no tokenizer files"):
            ask()


def test_a_tokenizer_of_a_kind_that_is_not_read_costs_only_the_text(model_files: Callable[..., Any]) -> None:
    folder = model_files().huggingface()
    characters = b"\x12\x02\x18\x04"  # SentencePiece's model_type CHAR
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02" + characters)
    with pytest.warns(UserWarning, match="no text"):
        llama = llamarium.load(folder)
    assert llama.model(torch.tensor([[1, 2]])).shape == (1, 2, 256)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: a SentencePiece model of type characters"):
        llama.generate("hello")


def test_a_tokenizer_larger_than_the_model_is_refused(model_files: Callable[..., Any], tmp_path: Path) -> None:
    folder = model_files().huggingface()
    characters = "".join(chr(0x4E00 + i) for i in range(300))
    CharacterTokenizer.from_text(characters).save(folder)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 30\d ids and the model 256 rows"):
        llamarium.load(folder, device="cpu")


def test_the_same_process_loads_the_next_good_file(model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files()
    good = files.huggingface()
    bad = tmp_path / "bad"
    bad.mkdir()
    tensors = load_file(good / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, bad / "model.safetensors")
    (bad / "config.json").write_text(json.dumps(files.config.to_hf()))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        llamarium.load(bad, device="cpu")
    assert isinstance(llamarium.load(good, device="cpu").model, LlamaForCausalLM)


def test_dtype_auto_is_as_stored(model_files: Callable[..., Any]) -> None:
    files = model_files()
    assert llamarium.load(files.huggingface(), device="cpu").model.dtype is torch.bfloat16
    assert llamarium.load(files.gguf_file("F32"), device="cpu").model.dtype is torch.float32
    assert llamarium.load(files.gguf_file("F16"), device="cpu").model.dtype is torch.float16
    assert llamarium.load(files.gguf_file("Q8_0"), device="cpu").model.dtype is torch.bfloat16


def test_a_gguf_s_tokenizer_is_found_wherever_the_weights_are(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").symlink_to(smollm2_path)
    (tmp_path / "blob").symlink_to(smollm2_path)
    expected = llamarium.load_tokenizer(smollm2_path).encode("The cat sat")
    for path in (tmp_path / "folder", tmp_path / "blob"):
        assert llamarium.load_tokenizer(path).encode("The cat sat") == expected


def test_a_model_with_spare_rows_names_them(model_files: Callable[..., Any]) -> None:
    folder = model_files(vocab_size=64, eos_token_id=(), bos_token_id=None).huggingface()
    CharacterTokenizer.from_text("abc").save(folder)
    llama = llamarium.load(folder, device="cpu")
    unused = 63
    bias = {i: 100.0 if i == unused else 0.0 for i in range(64)}
    (answer,) = llama.generate("abc", max_new_tokens=3, temperature=0.0, logit_bias=bias, logprobs=1).completions
    assert answer.token_ids == (unused,) * 3
    assert answer.text == ""
    assert answer.logprobs is not None
    assert answer.logprobs[0].token == "<63>"
    assert len(llama.next_tokens("abc", k=64)[0].candidates) == 64
