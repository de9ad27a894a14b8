"""The kinds of Llama checkpoints that people have, one small random model of each in the layout of its publishers.

Every builder of KINDS writes a kind's files, names and spellings with the library that writes them elsewhere. It
returns what a test compares with: a model of transformers, and what encodes text and writes a dialog without our code.
"""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import tiktoken
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from kind_parts import (
    CUT,
    LLAMA3,
    Kind,
    byte_level,
    encoder,
    huggingface,
    make_model,
    rendered,
    sentencepiece_bytes,
    sentencepiece_json,
    stored_weights,
    tokenizer_config,
    vocabulary_size,
    write_config,
    write_gguf,
    write_meta,
    write_shards,
)  # fmt: skip
from llamarium.hub.builtin import fetch
from model_files import ModelFiles
from quantized_cases import AWQ, CONFIG, GPTQ, Model, compressed
from quantized_folders import Maker, awq, float8, gptq
from sentencepiece_models import TEXT, library
from template_shapes import SHAPES

DEEPSEEK = [
    "<\uff5cbegin▁of▁sentence\uff5c>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<think>",
    "</think>",
]


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def write_llama_3(folder: Path, shape: str, *, shards: int = 1, parts: bool = False) -> Kind:
    encode = byte_level(folder, [*LLAMA3, "<|eom_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"])
    size, bos, eos = vocabulary_size(folder), encode(LLAMA3[0])[0], encode(LLAMA3[4])[0]
    scaling: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    rope = {"rope_theta": 500000.0, "rope_scaling": scaling}
    model = make_model("llama", size, rope_parameters={"rope_theta": 500000.0, **scaling})
    ends = [encode(LLAMA3[1])[0], encode("<|eom_id|>")[0], eos]
    write_config(folder, size, **rope, bos_token_id=bos, eos_token_id=ends, pretraining_tp=1, mlp_bias=False)
    generation = {"bos_token_id": bos, "eos_token_id": ends, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_shards(folder, stored_weights(model), "model", "safetensors", shards)
    template = SHAPES[shape]
    tokenizer_config(folder, LLAMA3[0], LLAMA3[4], chat_template=template, tokenizer_class="PreTrainedTokenizerFast")
    text = rendered(template, LLAMA3[0], LLAMA3[4], parts=parts)
    return Kind(folder, huggingface(folder), encode, text, LLAMA3[4])


def llama_3_huggingface(folder: Path) -> Kind:
    return write_llama_3(folder, "llama3.1", shards=3)


def llama_guard_3(folder: Path) -> Kind:
    return write_llama_3(folder, "llama-guard-3", parts=True)


def write_sentencepiece_folder(
    folder: Path,
    shape: str,
    kind: str = "llama",
    *,
    metaspace: bool = False,
    pieces: Sequence[str] = (),
    added: Sequence[str] = (),
    control: str = "</s>",
    shards: int = 1,
    drop: Sequence[str] = (),
    model_config: dict[str, Any] | None = None,
    tokenizer_fields: dict[str, Any] | None = None,
    **config: Any,
) -> Kind:
    """Write a folder with a tokenizer.json converted from SentencePiece."""
    encode = sentencepiece_json(folder, metaspace=metaspace, added=added, pieces=pieces)
    (folder / "tokenizer.model").write_bytes(sentencepiece_bytes(*pieces))
    size = vocabulary_size(folder)
    model = make_model(kind, size, **(model_config or {}))
    if kind == "mistral":
        config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **config}
    write_config(folder, size, drop, **config)
    write_shards(folder, stored_weights(model), "model", "safetensors", shards)
    template = SHAPES[shape]
    tokenizer_config(
        folder, "<s>", "</s>", unk_token="<unk>", chat_template=template, add_bos_token=True, add_eos_token=False,
        **(tokenizer_fields or {"legacy": not metaspace, "tokenizer_class": "LlamaTokenizer"}),
    )  # fmt: skip
    return Kind(folder, huggingface(folder), encode, rendered(template, "<s>", "</s>"), control)


def llama_2_huggingface(folder: Path) -> Kind:
    return write_sentencepiece_folder(folder, "llama2", shards=2, pretraining_tp=1, rope_scaling=None)


def tinyllama(folder: Path) -> Kind:
    return write_sentencepiece_folder(
        folder, "zephyr", tokenizer_fields={"legacy": False, "padding_side": "right", "pad_token": "</s>"},
        rope_theta=10000.0, attention_bias=False,
    )  # fmt: skip


def mistral_v01(folder: Path) -> Kind:
    """Windowed attention: six positions, so that the logits differ from a model's without."""
    return write_sentencepiece_folder(
        folder, "mistral1", "mistral", sliding_window=6, rope_theta=10000.0, model_config={"sliding_window": 6}
    )


def mistral_v03(folder: Path) -> Kind:
    pieces = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    kind = write_sentencepiece_folder(
        folder, "mistral3", "mistral", metaspace=True, pieces=[*pieces, "[/TOOL_RESULTS]"], control="[INST]",
        sliding_window=None, rope_theta=1e6, model_config={"sliding_window": None},
    )  # fmt: skip
    return replace(kind, warns=("a space at its beginning is taken for the one that is put there",))


def code_llama(folder: Path) -> Kind:
    return write_sentencepiece_folder(
        folder, "codellama", added=["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"], control="▁<PRE>", rope_theta=1e6,
        tokenizer_fields={
            "prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>",
            "tokenizer_class": "CodeLlamaTokenizer", "legacy": None,
        },
    )  # fmt: skip


def llamafied_yarn(folder: Path) -> Kind:
    """A long-context tune with biases in attention, its weights those of a `llamafied` Qwen."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    ours = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return write_sentencepiece_folder(
        folder, "llama2", rope_scaling=scaling, rope_theta=10000.0, attention_bias=True,
        model_config={"attention_bias": True, "rope_parameters": ours},
    )  # fmt: skip


def vicuna(folder: Path) -> Kind:
    data = sentencepiece_bytes()
    size = len(library(data))
    (folder / "tokenizer.model").write_bytes(data)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    names = {
        "architectures": ["LLaMAForCausalLM"],
        "pad_token_id": -1,
        "torch_dtype": "float16",
        "max_sequence_length": 256,
    }
    names["max_sequence_length"] = 256
    write_config(folder, size, ["num_key_value_heads", "tie_word_embeddings"], **names)
    inverse = 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16)
    model = make_model("llama", size, num_key_value_heads=4)
    weights = {key: value.half() for key, value in stored_weights(model).items()}
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": inverse for i in range(2)}
    write_shards(folder, weights, "pytorch_model", "bin", 2)
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    text = f"{system} USER: the dog ASSISTANT:"
    return Kind(folder, model, library(data).encode, text, "</s>", "vicuna", puts_bos=True)


def deepseek_distill(folder: Path) -> Kind:
    visible = [AddedToken(token, special=False, normalized=False) for token in DEEPSEEK[2:]]
    encode = byte_level(folder, [*DEEPSEEK[:2], *visible])
    size, bos, eos = vocabulary_size(folder), encode(DEEPSEEK[0])[0], encode(DEEPSEEK[1])[0]
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    model = make_model("llama", size, rope_parameters=rope, bos_token_id=bos, eos_token_id=eos)
    model.bfloat16().save_pretrained(folder)
    template = SHAPES["deepseek-r1-text"]
    tokenizer_config(
        folder, DEEPSEEK[0], DEEPSEEK[1], pad_token=DEEPSEEK[1], chat_template=template, legacy=True,
        add_bos_token=True, add_eos_token=False, tokenizer_class="LlamaTokenizerFast",
    )  # fmt: skip
    return Kind(folder, huggingface(folder), encode, rendered(template, *DEEPSEEK[:2]), DEEPSEEK[2])


def smollm2(folder: Path) -> Kind:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(cuts), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=tokens, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines() * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    model = make_model("llama", size, tie_word_embeddings=True)
    unused = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1}
    write_config(folder, size, tie_word_embeddings=True, rope_theta=1e5, **unused)
    write_shards(folder, stored_weights(model), "model", "safetensors")
    template = SHAPES["chatml2"]
    (folder / "vocab.json").write_text("{}")
    tokenizer_config(folder, tokens[1], tokens[2], chat_template=template, tokenizer_class="GPT2Tokenizer")
    return Kind(folder, huggingface(folder), encoder(folder), rendered(template, *tokens[1:]), "<|im_start|>")


# --- Meta's folders ---------------------------------------------------------------------------------------------------


def llama_3_meta(folder: Path) -> Kind:
    """With the published tokenizer: any other number of lines is a file that was cut off."""
    (folder / "tokenizer.model").symlink_to(fetch("llama3"))
    lines = (folder / "tokenizer.model").read_bytes().split(b"\n")
    ranks = {base64.b64decode(data): int(rank) for data, rank in (line.split() for line in lines if line)}
    size = len(ranks) + 256
    names = [*LLAMA3[:2], "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"]
    names += ["<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    special = {name: len(ranks) + i for i, name in enumerate(names)}
    theirs = tiktoken.Encoding("small", pat_str=CUT, mergeable_ranks=ranks, special_tokens=special)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    model = make_model("llama", size, max_position_embeddings=131072, intermediate_size=256, rope_parameters=scaling)
    write_meta(folder, model, 1)
    params = {
        "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": size, "ffn_dim_multiplier": 1.3,
        "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    # Meta's code knows the factor by the model's size, which no published one shares with this.
    fields = {"intermediate_size": 256, "max_position_embeddings": 131072, "rope_theta": scaling.pop("rope_theta")}
    write_config(folder, size, **fields, rope_scaling=scaling)
    text = "".join(LLAMA3[i] for i in (0, 2)) + "user<|end_header_id|>\n\nthe dog<|eot_id|>"
    text += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    return Kind(folder, model, lambda t: theirs.encode(t, allowed_special="all"), text, "<|eot_id|>")


def llama_1_meta(folder: Path) -> Kind:
    data = sentencepiece_bytes()
    (folder / "tokenizer.model").write_bytes(data)
    model = make_model(
        "llama", len(library(data)), num_key_value_heads=4, intermediate_size=256, rms_norm_eps=1e-6,
        max_position_embeddings=2048,
    )  # fmt: skip
    write_meta(folder, model, 2)
    params = {"dim": 64, "multiple_of": 256, "n_heads": 4, "n_layers": 2, "norm_eps": 1e-6, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps(params | {"rope_theta": 10000.0}))
    return Kind(folder, model, library(data).encode, None, "</s>")


# --- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_llama_bpe(folder: Path) -> Kind:
    """Q4_K, and Q6_K for the head, values and down projections, as Q4_K_M mixes them: random blocks."""
    names = [*LLAMA3, "<|eom_id|>", "<|python_tag|>"]
    encode = byte_level(folder, names)
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    vocab = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [3 if token in names else 1 for token in tokens]
    template = SHAPES["llama3"]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens}
    keys |= {"tokenizer.ggml.token_type": types, "tokenizer.chat_template": template}
    keys |= {"tokenizer.ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]]}
    keys |= {"tokenizer.ggml.bos_token_id": vocab[LLAMA3[0]], "tokenizer.ggml.eos_token_id": vocab[LLAMA3[4]]}
    keys |= {"llama.rope.freq_base": 500000.0, "general.file_type": 15}
    wide = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    model = make_model("llama", len(tokens), **wide)
    path = folder / "tiny-Q4_K_M.gguf"
    write_gguf(gguf.GGUFWriter(path, "llama"), model, keys, quantized=True)
    return Kind(path, model, encode, rendered(template, LLAMA3[0], LLAMA3[4]), LLAMA3[4])


def gguf_sentencepiece(folder: Path) -> Kind:
    """In parts, without `llama.rope.freq_base`: as llama-gguf-split writes a model of Llama 2's time."""
    data = sentencepiece_bytes()
    theirs = library(data)
    ids = range(len(theirs))
    kinds = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in ids]
    template = SHAPES["llama2"]
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids]}
    keys |= {"tokenizer.ggml.scores": [theirs.get_score(i) for i in ids], "tokenizer.ggml.token_type": kinds}
    keys |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    keys |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template}
    model = make_model("llama", len(theirs))
    write_gguf(gguf.GGUFWriter(folder / "tiny.gguf", "llama", split_max_tensors=9), model, keys, quantized=False)
    text = rendered(template, "<s>", "</s>").removeprefix("<s>")  # the library reads no control tokens in text
    return Kind(folder, model, theirs.encode, text, "</s>", puts_bos=True)


# --- quantized folders ------------------------------------------------------------------------------------------------


def write_quantized(folder: Path, maker: Maker, quantization: dict[str, Any]) -> Kind:
    """Write a folder of quantized Linears and Llama 2's tokenizer; the reference has the formula's weights."""
    encode = sentencepiece_json(folder)
    files = Model(maker, quantization, replace(CONFIG, vocab_size=vocabulary_size(folder)))
    files.write(folder)
    floats = files.write_floats(folder / "floats")
    reference = huggingface(floats)
    template = SHAPES["llama2"]
    tokenizer_config(folder, "<s>", "</s>", unk_token="<unk>", chat_template=template, legacy=True)
    text = rendered(template, "<s>", "</s>")
    return Kind(folder, reference, encode, text, "</s>", load={"dequantize": "load"})


def awq_folder(folder: Path) -> Kind:
    return write_quantized(folder, awq(), AWQ)


def gptq_folder(folder: Path) -> Kind:
    """With act-order, whose blocks no packed type holds."""
    kind = write_quantized(folder, gptq(act_order=True), GPTQ | {"desc_act": True})
    return replace(kind, warns_as_stored=("14 weights in GPTQ4 are dequantized once",))


def float8_folder(folder: Path) -> Kind:
    scheme = compressed(8, "channel", None, kind="float")
    kind = write_quantized(folder, float8("channel", scale_dtype="BF16"), scheme)
    return replace(kind, warns_as_stored=("14 weights in FP8 are dequantized once",))


def nf4_folder(folder: Path) -> Kind:
    """As bitsandbytes saves it, its codes stored as bfloat16 for FSDP."""
    encode = sentencepiece_json(folder)
    size = vocabulary_size(folder)
    model = make_model("llama", size, num_key_value_heads=4)
    config = replace(
        CONFIG, vocab_size=size, hidden_size=64, intermediate_size=128, num_key_value_heads=4, head_dim=16,
        max_position_embeddings=256,
    )  # fmt: skip
    written, decoded = ModelFiles(folder, config, dict(model.state_dict())).nf4(storage=torch.bfloat16)
    model.load_state_dict({key: value.float() for key, value in decoded.items()})
    template = SHAPES["llama2"]
    (folder / "tokenizer.json").rename(written / "tokenizer.json")
    tokenizer_config(written, "<s>", "</s>", unk_token="<unk>", chat_template=template, legacy=True)
    return Kind(written, model, encode, rendered(template, "<s>", "</s>"), "</s>", load={"dequantize": "load"})


KINDS: dict[str, Callable[[Path], Kind]] = {
    "Llama 3, Hugging Face": llama_3_huggingface,
    "Llama 3, Meta": llama_3_meta,
    "Llama 1, Meta": llama_1_meta,
    "Llama 2, Hugging Face": llama_2_huggingface,
    "Vicuna": vicuna,
    "TinyLlama": tinyllama,
    "Mistral v0.1": mistral_v01,
    "Mistral v0.3": mistral_v03,
    "CodeLlama": code_llama,
    "DeepSeek distill": deepseek_distill,
    "Llama Guard 3": llama_guard_3,
    "SmolLM2": smollm2,
    "GGUF of Llama 3": gguf_llama_bpe,
    "GGUF of Llama 2": gguf_sentencepiece,
    "AWQ": awq_folder,
    "GPTQ": gptq_folder,
    "compressed-tensors FP8": float8_folder,
    "NF4": nf4_folder,
    "llamafied, YaRN": llamafied_yarn,
}
