"""Every error that a caller can cause.

    LlamariumError
    ├── ConfigError              a config or preset says what we do not support, or contradicts itself
    ├── CheckpointError          a model file or folder is malformed, incomplete or disagrees with its config
    │   └── UnsupportedFormatError   well formed, but a format, version or architecture that is not read
    ├── TokenizerError           tokenizer files that cannot be read, or text that cannot be encoded
    │   ├── UnsupportedTokenizerError   well formed, but a kind that is not read
    │   └── ChatFormatError      a dialog or a chat template that cannot be rendered
    ├── SamplingError            a sampling parameter outside its range, or an impossible combination
    ├── ContextLengthError       more tokens than the model's context holds
    ├── InputError               token ids, positions or shapes that the model cannot take
    ├── MemoryBudgetError        a request that would exceed the memory it was given
    ├── ModelNotFoundError       no such built-in model, file, folder or hub repository
    │   ├── GatedModelError      the hub wants a licence accepted or a token
    │   └── DownloadError        the network, the disk or a hash said no
    ├── TrainingError            data, a configuration or a run folder that cannot be trained with
    ├── OutputError              a target that exists, equals its input or cannot be written
    └── OptionError              an option that cannot be honoured here

A message says what was found, what was expected and what to do, and names the file and the item.
Control characters from files are shown escaped (`escape`), so that no message can drive a terminal.
"""

from collections.abc import Sequence


class LlamariumError(Exception):
    """The root of every error that a caller can cause."""


class ConfigError(LlamariumError):
    """A config or preset says what we do not support, or contradicts itself."""


class CheckpointError(LlamariumError):
    """A model file or folder is malformed, incomplete or disagrees with its config."""


class UnsupportedFormatError(CheckpointError):
    """Well formed, but a format, version or architecture that is not read."""


class TokenizerError(LlamariumError):
    """Tokenizer files that cannot be read, or text that cannot be encoded."""


class UnsupportedTokenizerError(TokenizerError):
    """Well formed, but a kind that is not read; the model beside it still computes logits."""


class ChatFormatError(TokenizerError):
    """A dialog or a chat template that cannot be rendered."""


class SamplingError(LlamariumError):
    """A sampling parameter outside its range, or an impossible combination."""


class ContextLengthError(LlamariumError):
    """More tokens than the model's context holds."""


class InputError(LlamariumError):
    """Token ids, positions or shapes that the model cannot take."""


class MemoryBudgetError(LlamariumError):
    """A request that would exceed the memory it was given."""


class ModelNotFoundError(LlamariumError):
    """No such built-in model, file, folder or hub repository."""


class GatedModelError(ModelNotFoundError):
    """The hub wants a licence accepted or a token."""


class DownloadError(ModelNotFoundError):
    """The network, the disk or a hash said no."""


class TrainingError(LlamariumError):
    """Data, a configuration or a run folder that cannot be trained with."""


class OutputError(LlamariumError):
    """A target that exists, equals its input or cannot be written."""


class OptionError(LlamariumError):
    """An option that cannot be honoured here."""


def escape(text: object, limit: int = 200) -> str:
    """Show `text` from a file safely: control characters escaped, at most `limit` characters."""
    shown = str(text)[: limit + 1]  # no more than that can be seen
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def show_value(value: object, limit: int = 80) -> str:
    """Show what a caller or a file gave, as Python spells it, escaped as `escape` does.

    Some values have no spelling (a whole number of more than 4,300 digits, a list within itself a thousand deep); of
    those the type is named.
    """
    try:
        spelled = repr(value)
    except Exception:  # noqa: BLE001 - repr may run anyone's code
        spelled = f"{type(value).__name__} that cannot be spelled out"
    return escape(spelled, limit)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Check that an option has one of the values that there are.

    Raises:
        OptionError: Naming the option, its value and the choices.
    """
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise OptionError(f"{name} is {show_value(value)}; expected {', '.join(map(str, choices))}")
