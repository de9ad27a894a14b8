"""One small random model in every format that is read, each written with that format's own library.

So no reader is tested against our own writer alone.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.config import ModelConfig, RopeScaling

SMALL_LLAMA = ModelConfig(  # Llama 3.2's proportions: four query heads a group, tied, scaling by 32
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,  # bitsandbytes on the CPU decodes rows that are no multiple of 64 wrongly
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=(2, 3),
)


@dataclass
class ModelFiles:
    """One random model, `weights` by Hugging Face key, and functions that write it."""

    folder: Path
    config: ModelConfig
    weights: dict[str, Tensor]

    def huggingface(self, *, shards: int = 1, **config: Any) -> Path:
        """Write safetensors and config.json; `config` overrides fields of the latter."""
        folder = self._folder("huggingface")
        (folder / "config.json").write_text(json.dumps({**self.config.to_hf(), **config}))
        if shards == 1:
            save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
            return folder
        names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        weight_map = {key: names[i * shards // len(self.weights)] for i, key in enumerate(self.weights)}
        for name in names:
            save_file({k: self.weights[k] for k in self.weights if weight_map[k] == name}, folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def pytorch_bin(self, *, shards: int = 1, **config: Any) -> Path:
        """Write pytorch_model.bin, or shards and their index, and config.json, as older transformers did."""
        folder = self._folder("pytorch")
        (folder / "config.json").write_text(json.dumps({**self.config.to_hf(), **config}))
        if shards == 1:
            torch.save(self.weights, folder / "pytorch_model.bin")
            return folder
        names = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
        weight_map = {key: names[i * shards // len(self.weights)] for i, key in enumerate(self.weights)}
        for name in names:
            torch.save({k: self.weights[k] for k in self.weights if weight_map[k] == name}, folder / name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def nf4(self, *, double_quant: bool = True, storage: torch.dtype = torch.uint8) -> tuple[Path, dict[str, Tensor]]:
        """Write a folder that bitsandbytes quantized; return it and the weights as bitsandbytes decodes them.

        `storage` is the dtype whose bytes hold the codes.
        """
        import bitsandbytes.functional as bnb  # takes a second, which only its own tests should pay

        files, decoded = replace(self, weights={}), {}
        for key, weight in self.weights.items():
            if "_proj" not in key:
                files.weights[key] = decoded[key] = weight
                continue
            codes, state = bnb.quantize_4bit(
                weight, quant_type="nf4", compress_statistics=double_quant, quant_storage=storage
            )
            files.weights |= {key: codes} | {f"{key}.{k}": v for k, v in state.as_dict(packed=True).items()}
            decoded[key] = bnb.dequantize_4bit(codes, state).float()
        how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        how["bnb_4bit_quant_storage"] = str(storage).removeprefix("torch.")
        return files.huggingface(quantization_config={**how, "bnb_4bit_use_double_quant": double_quant}), decoded

    def meta(self, *, shards: int = 1, cut_vocab: bool = True, config_json: bool = True) -> Path:
        """Write consolidated.NN.pth and params.json, cut for model parallelism; the config must have H = D / N."""
        folder = self._folder("meta")
        params = {
            "dim": self.config.hidden_size,
            "n_layers": self.config.num_hidden_layers,
            "n_heads": self.config.num_attention_heads,
            "n_kv_heads": self.config.num_key_value_heads,
            "vocab_size": self.config.vocab_size,
            "multiple_of": 128,
            "norm_eps": self.config.rms_norm_eps,
            "rope_theta": self.config.rope_theta,
            "use_scaled_rope": self.config.rope_scaling is not None,
        }
        (folder / "params.json").write_text(json.dumps(params))
        if config_json:
            (folder / "config.json").write_text(json.dumps(self.config.to_hf()))
        for i in range(shards):
            tensors = {}
            for key, weight in self.weights.items():
                name, dim = _meta_name(key, cut_vocab)
                rows = self._interleave(key, weight)
                tensors[name] = rows if dim is None else rows.chunk(shards, dim)[i].clone()
            torch.save(tensors, folder / f"consolidated.{i:02d}.pth")
        return folder

    def gguf_file(self, type_name: str = "F32", **metadata: Any) -> Path:
        """Write a GGUF file, Linears and embedding in `type_name`, the rest in F32."""
        path = self.folder / f"{type_name}.gguf"
        self._write_gguf(gguf.GGUFWriter(path, "llama"), type_name, metadata)
        return path

    def gguf_parts(self, type_name: str = "F32", *, first_is_small: bool = False, **metadata: Any) -> Path:
        """Write a split GGUF file of three or four parts into a folder; the first may hold no tensors."""
        folder = self._folder("gguf-split")
        most = -(-(len(self.weights) + 1) // 3)
        writer = gguf.GGUFWriter(
            folder / "model.gguf", "llama", split_max_tensors=most, small_first_shard=first_is_small
        )
        self._write_gguf(writer, type_name, metadata)
        return folder

    def _write_gguf(self, writer: gguf.GGUFWriter, type_name: str, metadata: dict[str, Any]) -> None:
        self._write_metadata(writer)
        for key, value in metadata.items():
            writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.rope_type == "llama3":
            writer.add_tensor("rope_freqs.weight", _llama_cpp_factors(self.config).numpy())
        ggml_type = gguf.GGMLQuantizationType[type_name]
        for key, weight in self.weights.items():
            values = self._interleave(key, weight).float().numpy()
            kind = ggml_type if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(_gguf_name(key), gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _write_metadata(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_id[0])
        writer.add_eot_token_id(config.eos_token_id[1])

    def _interleave(self, key: str, weight: Tensor) -> Tensor:
        """Put q's and k's rows in Meta's order, as llama.cpp's `LlamaModel.permute` does."""
        if "q_proj" not in key and "k_proj" not in key:
            return weight
        heads = self.config.num_attention_heads if "q_proj" in key else self.config.num_key_value_heads
        return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    def _folder(self, name: str) -> Path:
        folder = self.folder / f"{name}{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return folder


def _meta_name(key: str, cut_vocab: bool) -> tuple[str, int | None]:
    """Meta's name for a key, and along which dimension its shards cut it."""
    names = {
        "model.embed_tokens.weight": ("tok_embeddings.weight", 0 if cut_vocab else 1),
        "model.norm.weight": ("norm.weight", None),
        "lm_head.weight": ("output.weight", 0),
        "input_layernorm.weight": ("attention_norm.weight", None),
        "post_attention_layernorm.weight": ("ffn_norm.weight", None),
        "self_attn.q_proj.weight": ("attention.wq.weight", 0),
        "self_attn.k_proj.weight": ("attention.wk.weight", 0),
        "self_attn.v_proj.weight": ("attention.wv.weight", 0),
        "self_attn.o_proj.weight": ("attention.wo.weight", 1),
        "mlp.gate_proj.weight": ("feed_forward.w1.weight", 0),
        "mlp.up_proj.weight": ("feed_forward.w3.weight", 0),
        "mlp.down_proj.weight": ("feed_forward.w2.weight", 1),
    }
    if key in names:
        return names[key]
    _, _, layer, rest = key.split(".", 3)
    return f"layers.{layer}.{names[rest][0]}", names[rest][1]


@functools.cache
def _gguf_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)


def _gguf_name(key: str) -> str:
    name = _gguf_names().get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None
    return name


def _llama_cpp_factors(config: ModelConfig) -> Tensor:
    """Return rope_freqs as llama.cpp's converter writes it, `LlamaModel.generate_extra_tensors`."""
    scaling, factors = config.rope_scaling, []
    assert scaling is not None and scaling.original_max_position_embeddings is not None
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    old = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    for frequency in 1.0 / (config.rope_theta**exponents):
        wavelength = 2 * math.pi / frequency
        smooth = (old / wavelength - low) / (high - low)
        blend = 1 / ((1 - smooth) / scaling.factor + smooth)
        factors.append(1 if wavelength < old / high else scaling.factor if wavelength > old / low else blend)
    return torch.tensor(factors, dtype=torch.float32)


@pytest.fixture(name="model_files")
def _model_files(tmp_path: Path) -> Callable[..., ModelFiles]:
    """`model_files(dtype=torch.bfloat16, hidden_size=...)`: a new model, SMALL_LLAMA with these fields changed."""

    def make(*, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> ModelFiles:
        config = replace(SMALL_LLAMA, **changes)
        random = torch.Generator().manual_seed(seed)
        shapes = expected_shapes(config)
        weights = {k: (torch.randn(s, generator=random) * 0.05).to(dtype) for k, s in shapes.items()}
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return ModelFiles(folder, config, weights)

    return make
