"""Llamarium: the Llama 3 system in Python, to read, run and look inside.

    import llamarium
    llama = llamarium.load("smollm2-135m")
    print(llama.generate("I love to drink", max_new_tokens=20, temperature=0.0).text)

Names are imported when they are first used, so that `import llamarium` costs nothing and needs no torch. Where PyTorch
is missing, names that need it are there, too, and say so when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarium.api import Llama, load
    from llamarium.calibration.quantize import quantize
    from llamarium.checkpoints.export import export
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.config import ModelConfig, RopeScaling
    from llamarium.engine.proposers.lookup import PromptLookup
    from llamarium.engine.tiers.disk_cache import DiskCache
    from llamarium.errors import LlamariumError
    from llamarium.generation.completion import Completion, Generation, Piece
    from llamarium.generation.conversation import Conversation
    from llamarium.model import LlamaForCausalLM
    from llamarium.presets import PRESETS, preset
    from llamarium.sampling.grammar.description import Grammar
    from llamarium.sampling.params import SamplingParams
    from llamarium.tokenizer.base import Tokenizer
    from llamarium.train.functions import dpo, finetune, grpo, pretrain
    from llamarium.train.merge import merge

__version__ = "0.1.0"

_HOMES = {
    "Completion": "generation.completion",
    "Conversation": "generation.conversation",
    "DiskCache": "engine.tiers.disk_cache",
    "Generation": "generation.completion",
    "Grammar": "sampling.grammar.description",
    "Llama": "api",
    "LlamaForCausalLM": "model",
    "LlamariumError": "errors",
    "ModelConfig": "config",
    "PRESETS": "presets",
    "Piece": "generation.completion",
    "PromptLookup": "engine.proposers.lookup",
    "RopeScaling": "config",
    "SamplingParams": "sampling.params",
    "Tokenizer": "tokenizer.base",
    "dpo": "train.functions",
    "export": "checkpoints.export",
    "finetune": "train.functions",
    "grpo": "train.functions",
    "load": "api",
    "load_tokenizer": "checkpoints.tokenizers",
    "merge": "train.merge",
    "preset": "presets",
    "pretrain": "train.functions",
    "quantize": "calibration.quantize",
}

__all__ = [
    "PRESETS",
    "Completion",
    "Conversation",
    "DiskCache",
    "Generation",
    "Grammar",
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
    "dpo",
    "export",
    "finetune",
    "grpo",
    "load",
    "load_tokenizer",
    "merge",
    "preset",
    "pretrain",
    "quantize",
]


_NEED_TORCH = {"LlamaForCausalLM": "The Llama as a PyTorch module. It needs PyTorch: pip install 'llamarium[torch]'."}
"""Names that are imported as stand-ins where PyTorch is missing, so that `help`, `dir` and Tab work."""


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("llamarium.errors")
    if name not in _HOMES:
        raise AttributeError(_no_attribute(name))
    if name in _NEED_TORCH:
        extras = import_module("llamarium.extras")
        if not extras.has_torch():
            return extras.stand_in(name, _NEED_TORCH[name])
    return getattr(import_module(f"llamarium.{_HOMES[name]}"), name)


def _no_attribute(name: str) -> str:
    from difflib import get_close_matches

    similar = get_close_matches(name, __all__, n=1)
    return f"module 'llamarium' has no attribute {name!r}{f'; did you mean {similar[0]}?' if similar else ''}"


def __dir__() -> list[str]:
    return [*__all__, "errors"]
