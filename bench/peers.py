"""Both sides of a comparison, loaded from the same files in the same dtype."""

import warnings
from typing import Any

import torch

import llamarium
from llamarium.hub.builtin import fetch
from make_weights import make


def load_ours(name: str, dtype: str = "bfloat16") -> llamarium.Llama:
    """Return our model: the built-in GGUF, unpacked as `transformers` does, or random weights in a preset's shape."""
    if name == "smollm2-135m":
        return llamarium.load(name, dtype=dtype, device="cpu", dequantize="load")
    return llamarium.load(make(name), dtype=dtype, device="cpu")


def load_theirs(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return `transformers`' model from the same files."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "smollm2-135m":
            path = fetch(name)
            model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(make(name), dtype=dtype)
    return model.eval()


def token_ids(vocab_size: int, length: int) -> list[int]:
    """Return the same arbitrary prompt every time."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
