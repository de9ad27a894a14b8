"""Llamarium: the Llama 3 system in Python, to read, run and look inside.

    import llamarium
    llama = llamarium.load("smollm2-135m")
    print(llama.generate("I love to drink", max_new_tokens=20, temperature=0.0).text)

Names are imported when they are first used, so that `import llamarium` costs nothing and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarium.api import Llama, load
    from llamarium.completion import Completion, Generation, Piece
    from llamarium.config import ModelConfig, RopeScaling
    from llamarium.conversation import Conversation
    from llamarium.errors import LlamariumError
    from llamarium.model import LlamaForCausalLM
    from llamarium.presets import PRESETS, preset
    from llamarium.quantization import quantize
    from llamarium.sampling_params import SamplingParams
    from llamarium.speculate import PromptLookup
    from llamarium.tokenizer.base import Tokenizer
    from llamarium.tokens import load_tokenizer

__version__ = "0.1.0"

_HOMES = {
    "Completion": "completion",
    "Conversation": "conversation",
    "Generation": "completion",
    "Llama": "api",
    "LlamaForCausalLM": "model",
    "LlamariumError": "errors",
    "ModelConfig": "config",
    "PRESETS": "presets",
    "Piece": "completion",
    "PromptLookup": "speculate",
    "RopeScaling": "config",
    "SamplingParams": "sampling_params",
    "Tokenizer": "tokenizer.base",
    "load": "api",
    "load_tokenizer": "tokens",
    "preset": "presets",
    "quantize": "quantization",
}

__all__ = [
    "PRESETS",
    "Completion",
    "Conversation",
    "Generation",
    "Llama",
    "LlamaForCausalLM",
    "LlamariumError",
    "ModelConfig",
    "Piece",
    "PromptLookup",
    "RopeScaling",
    "SamplingParams",
    "Tokenizer",
    "__version__",
    "load",
    "load_tokenizer",
    "preset",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("llamarium.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'llamarium' has no attribute {name!r}")
    return getattr(import_module(f"llamarium.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
