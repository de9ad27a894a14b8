"""Every error that a caller can cause.

    LlamariumError
    ├── ConfigError              a config or preset says what we do not support, or contradicts itself
    ├── CheckpointError          a model file or folder is malformed, incomplete or disagrees with its config
    │   └── UnsupportedFormatError   well formed, but a format, version or architecture that is not read
    ├── TokenizerError           tokenizer files that cannot be read, or text that cannot be encoded
    │   ├── UnsupportedTokenizerError   well formed, but a kind that is not read
    │   └── ChatFormatError      a dialog or a chat template that cannot be rendered
    │       └── ToolError        a tool, a call of one or a choice between them that cannot be taken
    ├── SamplingError            a sampling parameter outside its range, or an impossible combination
    │   └── GrammarError             a grammar or schema that cannot be read, or has a rule that cannot be kept
    │       └── GrammarLimitError    larger, or more work, than the limits allow
    ├── ContextLengthError       more tokens than the model's context holds
    ├── InputError               token ids, positions or shapes that the model cannot take
    │   └── QuestionError        a question about a pass, a weight or a run that has no answer
    │       └── UnknownNameError     a name under which there is nothing
    ├── MemoryBudgetError        a request that would exceed the memory it was given
    ├── ModelNotFoundError       no such built-in model, file, folder or hub repository
    │   ├── GatedModelError      the hub requires an accepted licence or a token
    │   └── DownloadError        a failure of the network or the disk, or a wrong hash
    ├── TrainingError            data, a configuration or a run folder that cannot be trained with
    ├── OutputError              a target that exists, equals its input or cannot be written
    ├── ServerError              a server that is unreachable, not ready, or replies unexpectedly
    ├── OptionError              an option that cannot be honoured here
    ├── RequestTimeoutError      a request that was not answered by its deadline
    ├── EngineStoppedError       a request to an engine that was closed or has failed
    ├── AnswerError              an answer for which no token can be sampled: logits not finite, or no token allowed
    │   └── LogitsProcessorError     a caller's logits processor that raised, or returned no logits
    ├── OverloadedError          an answer that was ended because memory ran out
    ├── FunctionError            a learner's function that failed instead of returning a result
    └── SlowReaderError          an answer that was ended because the client read it too slowly

A message names the file and the item, and says what is wrong, what was expected and what to do.
Control characters from files are shown escaped (`escape`), so that no message can drive a terminal.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class LlamariumError(Exception):
    """The root of every error that a caller can cause.

    >>> try:
    ...     llama.generate("To be", temperature=-1)
    ... except llamarium.LlamariumError as error:
    ...     print(error)
    temperature is -1; expected a number, 0 (greedy) or 1e-5 to 1e5
    """


class ConfigError(LlamariumError):
    """A config or preset says what we do not support, or contradicts itself."""


class CheckpointError(LlamariumError):
    """A model file or folder is malformed, incomplete or disagrees with its config."""


class UnsupportedFormatError(CheckpointError):
    """A valid file in a format, version or architecture that is not supported."""


class TokenizerError(LlamariumError):
    """Tokenizer files that cannot be read, or text that cannot be encoded."""


class UnsupportedTokenizerError(TokenizerError):
    """A valid tokenizer of an unsupported kind; the model still loads and computes logits."""


class ChatFormatError(TokenizerError):
    """A dialog or a chat template that cannot be rendered."""


class ToolError(ChatFormatError):
    """A tool, a call of one or a choice between them that cannot be taken.

    Attributes:
        param: The path of what is wrong: `tools[1].function.name`.
    """

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{escape(param)} {problem}")
        self.param = param
        self._problem = problem

    def inside(self, where: str) -> "ToolError":
        """Return the same error of a thing that lies within another."""
        return ToolError(f"{where}.{self.param}", self._problem)


class SamplingError(LlamariumError):
    """A sampling parameter outside its range, or an impossible combination."""


class GrammarError(SamplingError):
    """A grammar or schema that is invalid, or cannot be enforced."""


class GrammarLimitError(GrammarError):
    """A grammar or schema that exceeds the limits of size or work."""


class ContextLengthError(LlamariumError):
    """More tokens than the model's context length."""


class InputError(LlamariumError):
    """Invalid token ids, positions or shapes."""


class QuestionError(InputError):
    """A question about a pass, a weight or a training run that has no answer.

    Attributes:
        code: Short name of the reason, for programs; None where there is none.
        param: Name of the argument at fault.
    """

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class UnknownNameError(QuestionError):
    """A name or id that does not exist, or no longer exists."""


class MemoryBudgetError(LlamariumError):
    """A request that would exceed its memory limit."""


class ModelNotFoundError(LlamariumError):
    """No such built-in model, file, folder or hub repository."""


class GatedModelError(ModelNotFoundError):
    """The hub requires an accepted licence or a token."""


class DownloadError(ModelNotFoundError):
    """A download that failed: network, disk or checksum."""


class TrainingError(LlamariumError):
    """Data, settings or a run folder that cannot be used for training."""


class OutputError(LlamariumError):
    """A target that exists, equals its input or cannot be written."""


class ServerError(LlamariumError):
    """A server that cannot be reached, is not ready, or responds unexpectedly."""


class OptionError(LlamariumError):
    """An option that is invalid or not supported here."""


class MissingPackageError(OptionError):
    """A missing optional package; the message has the command that installs it."""


class NoModulesError(OptionError):
    """A question that needs a model's modules, asked of one that is functions in a process of their own."""


class RequestTimeoutError(LlamariumError):
    """A request that was not answered by its deadline."""


class EngineStoppedError(LlamariumError):
    """A request to an engine that is closed or broken, or that ended with it."""


class AnswerError(LlamariumError):
    """An answer for which no token can be sampled: the logits are not finite, or no token is allowed."""


class LogitsProcessorError(AnswerError):
    """A caller's logits processor that raised (see `__cause__`) or returned something other than logits."""


class OverloadedError(LlamariumError):
    """An answer that was stopped because the running answers ran out of memory."""


class FunctionError(LlamariumError):
    """A learner's function (`llamarium build`) that failed instead of returning a result."""


class SlowReaderError(LlamariumError):
    """An answer that was stopped because the client read it too slowly."""


def escape(text: object, limit: int = 200) -> str:
    """Show `text` from a file safely: control characters escaped, at most `limit` characters."""
    escaped = str(text)[: limit + 1]  # no more than that can be seen
    if not escaped.isprintable():
        escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in escaped)
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


def show_value(value: object, limit: int = 80) -> str:
    """Show what a caller or a file gave, as Python spells it, escaped as `escape` does.

    Some values have no spelling (a whole number of more than 4,300 digits, a list within itself a thousand deep); of
    those the type is named.
    """
    try:
        spelled = repr(value)
    except Exception:  # noqa: BLE001 - repr may run foreign code
        spelled = f"{type(value).__name__} that cannot be spelled out"
    return escape(spelled, limit)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number with what it counts: "1 token", "1,024 tokens"; `plural` where it is not the noun with an s.

    Words that follow the number in the same way may be part of both: `counted(n, "tensor is", "tensors are")`.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Check that an option has one of its values; OptionError naming the option, its value and the choices."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise OptionError(f"{name} is {show_value(value)}; expected {', '.join(map(str, choices))}")


_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def collect_warnings(work: Callable[[], T]) -> tuple[T, list[str]]:
    """Do some work; return its result, and the messages of which `warn_caller` would have warned in this thread."""
    messages = list[str]()
    token = _collected.set(messages)
    try:
        return work(), messages
    finally:
        _collected.reset(token)


def warn_caller(message: str) -> None:
    """Issue a `UserWarning` that points to the line outside of this package that led here."""
    if (messages := _collected.get()) is not None:
        messages.append(message)
        return
    depth, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - `skip_file_prefixes` is Python 3.12's
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "llamarium":
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth + 1)
