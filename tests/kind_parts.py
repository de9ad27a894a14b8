"""What tests/checkpoint_kinds.py builds checkpoints of: tokenizers and random models, and what is right for them."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

from model_files import ModelFiles, _meta_name
from quantized_cases import CONFIG
from sentencepiece_models import TEXT, library, trained

CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ASK = [{"role": "user", "content": "the dog"}]
Encode = Callable[[str], list[int]]
State = dict[str, torch.Tensor]


@dataclass
class Kind:
    """A checkpoint, and what is right: logits, ids without BOS, the text of ASK, a spelling that is no turn."""

    path: Path
    reference: Any
    encode: Encode
    dialog: str | None
    control: str
    chat_template: str | None = None
    warns: tuple[str, ...] = ()
    puts_bos: bool = False  # before `dialog`, which has none
    warns_as_stored: tuple[str, ...] = ()
    load: dict[str, Any] = field(default_factory=dict)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def byte_level(folder: Path, added: Sequence[str | AddedToken], *, cut: str = CUT, first: bool = False) -> Encode:
    """Write a byte-level tokenizer.json; `first` puts the added tokens before all others."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(cut), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = [token if isinstance(token, str) else token.content for token in added]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=names if first else [], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines() * 4, trainer)
    for token in added:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token])
    bos = names[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return encoder(folder)


def encoder(folder: Path) -> Encode:
    """Return what `tokenizers` makes of text with a folder's tokenizer.json."""
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def sentencepiece_bytes(*control: str) -> bytes:
    """Return a `tokenizer.model` as Llama's: BPE, byte fallback, no normalization."""
    return trained(
        byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        control_symbols=",".join(control),
    )  # fmt: skip


def sentencepiece_json(folder: Path, *, metaspace: bool = False, added: Sequence[str] = (), pieces: Any = ()) -> Encode:
    """Write a tokenizer.json as transformers converted it from SentencePiece."""
    theirs = library(sentencepiece_bytes(*pieces))
    vocab = {theirs.id_to_piece(i): i for i in range(len(theirs))}
    score = {piece: theirs.get_score(i) for piece, i in vocab.items()}
    pairs = [
        (p[:i], p[i:]) for p in vocab if p[0] != "<" for i in range(1, len(p)) if p[:i] in vocab and p[i:] in vocab
    ]
    pairs.sort(key=lambda pair: (-score["".join(pair)], vocab[pair[0]], vocab[pair[1]]))
    model = models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *pieces, *added]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return encoder(folder)


def tokenizer_config(folder: Path, bos: str, eos: str, **fields: Any) -> None:
    raw = {"bos_token": bos, "eos_token": eos, "clean_up_tokenization_spaces": False, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))


def rendered(template: str, bos: str, eos: str, *, parts: bool = False) -> str:
    """Return what transformers writes of ASK."""
    dialog = [{"role": "user", "content": [{"type": "text", "text": "the dog"}]}] if parts else ASK
    texts, _ = render_jinja_template(
        [dialog], chat_template=template, add_generation_prompt=True, bos_token=bos, eos_token=eos
    )
    return texts[0]


# --- models -----------------------------------------------------------------------------------------------------------


def vocabulary_size(folder: Path) -> int:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


def make_model(kind: str, vocab_size: int, **config: Any) -> Any:
    """Return a random model of transformers, its numbers those of bfloat16."""
    torch.manual_seed(3)
    classes = {"llama": transformers.LlamaForCausalLM, "mistral": transformers.MistralForCausalLM}
    configs = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}
    model = classes[kind](configs[kind](**{**SMALL, "vocab_size": vocab_size, **config})).eval()
    for name, parameter in model.named_parameters():
        values = torch.randn_like(parameter) * 0.2 if name.endswith(".bias") else parameter
        parameter.data = values.detach().bfloat16().float()
    return model


def write_config(folder: Path, vocab_size: int, drop: Sequence[str] = (), **fields: Any) -> None:
    """Write config.json by hand, in the spelling of transformers 4."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "use_cache": True,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
        "vocab_size": vocab_size, **SMALL, **fields,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))


def stored_weights(model: Any) -> State:
    tied = model.config.tie_word_embeddings
    return {k: v.bfloat16() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def write_shards(folder: Path, weights: State, stem: str, ending: str, shards: int = 1) -> None:
    """Write safetensors or .bin shards and their index."""
    names = [
        f"{stem}-{i + 1:05d}-of-{shards:05d}.{ending}" if shards > 1 else f"{stem}.{ending}" for i in range(shards)
    ]
    where = {key: names[i * shards // len(weights)] for i, key in enumerate(weights)}
    for name in names:
        part = {key: weights[key].clone() for key in weights if where[key] == name}
        torch.save(part, folder / name) if ending == "bin" else save_file(part, folder / name, {"format": "pt"})
    if shards > 1:
        size = sum(value.nbytes for value in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))


def huggingface(folder: Path) -> Any:
    """Return what transformers loads from the same folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):  # transformers does not wait for those that load weights
            thread.join(2)
    return model


def write_meta(folder: Path, model: Any, shards: int) -> None:
    """Write consolidated.NN.pth as Meta's model parallelism cuts them."""
    files = ModelFiles(folder, replace(CONFIG, num_key_value_heads=model.config.num_key_value_heads), {})
    parts: list[State] = [{} for _ in range(shards)]
    for key, weight in stored_weights(model).items():
        name, axis = _meta_name(key, cut_vocab=False)
        rows = files._interleave(key, weight)
        for i, part in enumerate(parts):
            part[name] = (rows if axis is None else rows.chunk(shards, axis)[i]).clone()
    for i, part in enumerate(parts):
        part["rope.freqs"] = torch.ones(8)
        torch.save(part, folder / f"consolidated.{i:02d}.pth")


def write_gguf(writer: gguf.GGUFWriter, model: Any, keys: dict[str, Any], *, quantized: bool) -> None:
    """Write a model; where it is quantized, its weights become those that `gguf` decodes."""
    config = model.config
    heads = {"num_attention_heads": 4, "num_key_value_heads": config.num_key_value_heads}
    files = ModelFiles(Path(), replace(CONFIG, **heads, head_dim=config.head_dim), {})
    numbers = {
        "context_length": 256, "embedding_length": config.hidden_size, "block_count": 2,
        "vocab_size": config.vocab_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": 4, "attention.head_count_kv": 2,
        "rope.dimension_count": config.head_dim,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, value in keys.items():
        kind = gguf.GGUFValueType.get_type(value)
        of_items = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(name, value, kind, of_items)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    random = np.random.default_rng(5)
    state = model.state_dict()
    for key, weight in state.items():
        name = names.get_name(key, try_suffixes=(".weight",))
        assert name is not None
        values, kind = files._interleave(key, weight).numpy(), gguf.GGMLQuantizationType.F32
        if quantized and weight.ndim == 2:
            six = any(part in key for part in ("lm_head", "v_proj", "down_proj"))
            kind = gguf.GGMLQuantizationType.Q6_K if six else gguf.GGMLQuantizationType.Q4_K
            values = random_blocks(random, weight.shape[0], weight.shape[1], six=six)
            weight.copy_(uninterleave(key, torch.from_numpy(gguf.dequantize(values, kind)), config))
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(random: np.random.Generator, rows: int, columns: int, *, six: bool) -> np.ndarray[Any, Any]:
    """Return random Q6_K or Q4_K blocks, (rows, bytes), whose weights have a mean near 0."""
    size = 210 if six else 144
    blocks = random.integers(0, 256, (rows, columns // 256, size)).astype(np.uint8)
    scales = [1e-4] if six else [4e-4, 3e-3]
    place = 208 if six else 0
    blocks[..., place : place + 2 * len(scales)] = np.array(scales, np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def uninterleave(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Put q's and k's rows back in Hugging Face's order."""
    if "q_proj" not in key and "k_proj" not in key:
        return weight
    heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
    return weight.reshape(heads, len(weight) // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
