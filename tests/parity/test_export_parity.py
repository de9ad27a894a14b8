"""What is written, read by others: transformers, the gguf package and llama.cpp."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

import llamarium
from llamarium.checkpoints.gguf.export import export_gguf
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.checkpoints.huggingface.reader import HuggingFaceCheckpoint
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.save import model_weights, save_model
from llamarium.model import LlamaForCausalLM
from llamarium.options.loading import LoadOptions
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.bpe import train_bpe

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.2-3b", "llama-2", "mqa", "yarn", "linear", "biases"]
)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 10**6])
@torch.no_grad()
def test_a_saved_folder_gives_the_same_logits_in_transformers(
    name: str, max_shard_bytes: int, pair_of: Callable[[str], Any], tmp_path: Path
) -> None:
    ours = pair_of(name).ours
    save_model(ours, tmp_path, max_shard_bytes=max_shard_bytes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.float32
    ids = torch.arange(24).view(2, 12) * 17 % ours.config.vocab_size
    torch.testing.assert_close(theirs(ids).logits, pair_of(name).theirs(ids).logits, rtol=0, atol=0)
    again, _ = load_model(HuggingFaceCheckpoint(tmp_path), LoadOptions(device="cpu"))
    assert again.config == ours.config
    torch.testing.assert_close(again(ids), ours(ids), rtol=0, atol=0)


# --- GGUF -------------------------------------------------------------------------------------------------------------

TEXT = "Once upon a time there was a llama, 1234 llamas. It's écrit: ça va?\n\n  Yes; yes!"
PROMPT = "upon a llama: ça"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([TEXT] * 20, 290).with_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")


def exported(name: str, type_name: str, bpe: Tokenizer, pair_of: Callable[[str], Any], folder: Path) -> Path:
    """Export one of the small models with a tokenizer for its first 290 rows."""
    model: LlamaForCausalLM = pair_of(name).ours
    path = folder / f"{name}-{type_name}.gguf"
    export_gguf(path, model_weights(model), model.config, type_name=type_name, name=name, tokenizer=bpe)
    return path


def test_the_gguf_package_reads_it(bpe: Tokenizer, pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    model = pair_of("llama-3.1-8b").ours
    reader = gguf.GGUFReader(exported("llama-3.1-8b", "Q4_1", bpe, pair_of, tmp_path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(list(model.parameters())) + 1  # and the RoPE factors
    assert {t.tensor_type.name for n, t in tensors.items() if n.endswith("norm.weight")} == {"F32"}
    found = gguf.dequantize(tensors["output.weight"].data, gguf.GGMLQuantizationType.Q6_K)
    assert abs(found - model.lm_head.weight.detach().numpy()).max() < 0.01
    kinds = {name: reader.fields[name].types for name in ("general.file_type", "llama.rope.freq_base")}
    assert kinds == {
        "general.file_type": [gguf.GGUFValueType.UINT32],
        "llama.rope.freq_base": [gguf.GGUFValueType.FLOAT32],
    }
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_1
    assert reader.fields["tokenizer.ggml.token_type"].types[1] == gguf.GGUFValueType.INT32


@pytest.mark.parametrize("name", ["mqa", "llama-2"])  # transformers does not read the factors of scaled RoPE
@torch.no_grad()
def test_transformers_reads_it(name: str, bpe: Tokenizer, pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    path = exported(name, "F32", bpe, pair_of, tmp_path)
    transformers.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = torch.arange(24).view(2, 12) * 17 % 512
    torch.testing.assert_close(theirs.eval()(ids).logits, pair_of(name).ours(ids), rtol=1.3e-6, atol=1e-5)


@torch.no_grad()
def test_transformers_reads_a_mixture(bpe: Tokenizer, pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    path = exported("llama-3.2-1b", "Q4_K_M", bpe, pair_of, tmp_path)
    transformers.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = load_model(GGUFCheckpoint(path), LoadOptions(device="cpu", dtype="float32"))[0]
    for name in ("embed_tokens", "layers.0.mlp.down_proj", "layers.0.self_attn.q_proj"):
        found = ours.model.get_submodule(name).weight
        torch.testing.assert_close(theirs.model.get_submodule(name).weight, found, rtol=0, atol=1e-7)


LLAMA_CPP = """
import json, sys
import xllamacpp
answers = []
for path in json.loads(sys.argv[1]):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    request = {"prompt": sys.argv[2], "max_tokens": 24, "temperature": 0, "logprobs": 1}
    request["logit_bias"] = {str(i): -1000 for i in json.loads(sys.argv[3])}
    answers.append(xllamacpp.Server(params).handle_completions(request)["choices"][0]["logprobs"]["content"])
print(json.dumps(answers))
"""


def llama_cpp(paths: list[Path], prompt: str, banned: list[int]) -> list[list[dict[str, Any]]]:
    """Complete `prompt` greedily in a process of its own: its library writes to stdout and ends as it likes."""
    command = [sys.executable, "-c", LLAMA_CPP, json.dumps([str(path) for path in paths]), prompt, json.dumps(banned)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="no wheel of llama.cpp for this platform")
def test_a_model_of_characters_answers_the_same_in_llama_cpp(tmp_path: Path) -> None:
    path = llamarium.export("shakespeare-char", tmp_path / "letters.gguf", format="gguf", type="F32")
    prompt = "ROMEO:\nBut soft, what light "
    (answer,) = llama_cpp([path], prompt, [])
    ours = llamarium.load("shakespeare-char", dtype="float32", device="cpu")
    expected = ours.generate(prompt, max_tokens=24, temperature=0)
    assert tuple(token["id"] for token in answer) == expected.completions[0].token_ids
    again = llamarium.load(path, dtype="float32", device="cpu")
    assert again.generate(prompt, max_tokens=24, temperature=0).text == expected.text


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="no wheel of llama.cpp for this platform")
@pytest.mark.filterwarnings("ignore:.* matrices, such as .* are written as")  # rows of 896
@torch.no_grad()
def test_llama_cpp_says_the_same(bpe: Tokenizer, pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    """From a text on, so with the same ids for it: scaled RoPE and not, tied and not, grouped heads, float and packed.

    Bytes of half a character are banned, for which llama.cpp waits for the other half and then names one token.
    """
    cases = {  # and how far a log-probability may be off: llama.cpp rounds what it multiplies to the weights' type
        ("llama-3.2-1b", "F32"): 0.01,
        ("llama-3.1-8b", "F32"): 0.01,
        ("mqa", "F32"): 0.01,
        ("yarn", "F32"): 0.01,
        ("linear", "F32"): 0.01,
        ("biases", "F32"): 0.01,
        ("biases", "Q8_0"): 0.15,
        ("llama-3.2-3b", "F16"): 0.01,
        ("llama-3.2-3b", "BF16"): 0.05,
        ("llama-3.2-1b", "Q8_0"): 0.15,
        ("llama-3.1-8b", "Q4_0"): 0.15,
        ("llama-3.1-8b", "Q4_K_M"): 0.15,
    }
    paths = [exported(name, kind, bpe, pair_of, tmp_path) for name, kind in cases]
    banned = [i for i in range(bpe.vocab_size) if not bpe.token_bytes(i).isascii()] + list(bpe.special_tokens.values())
    answers = llama_cpp(paths, PROMPT, banned)
    for (name, kind), path, answer in zip(cases, paths, answers, strict=True):
        llama = llamarium.load(path, dtype="float32")
        prompt, ids = llama.encode(PROMPT), [token["id"] for token in answer]
        assert len(ids) == 24
        logits = llama.model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
        found = torch.tensor([token["logprob"] for token in answer])
        chosen = logits.log_softmax(-1)[torch.arange(24), ids]
        assert (found - chosen).abs().max() < cases[name, kind], f"{name} {kind}"
        logits[:, banned] = -torch.inf
        if kind in ("F32", "F16"):  # the others round enough to choose the second of two that are near
            assert logits.argmax(-1).tolist() == ids, f"{name} {kind}"
