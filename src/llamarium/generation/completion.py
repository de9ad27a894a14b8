"""From tokens to text: what an answer looks like, and how it grows.

The loop in `generation/loop.py` knows ids only. Here each row's ids become text that never splits a character, stops at
stop strings even where they cross tokens, and leaves out the tokens that only mean "stop".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llamarium.config import ModelConfig
from llamarium.errors import LlamariumError
from llamarium.generation.loop import FinishReason, TokenEvent
from llamarium.generation.params import SamplingParams
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.stops import StopStringFilter

NOT_FINITE = (
    "the model's logits are NaN or infinite, so no token can be chosen; the weights may be damaged (NaN), or the dtype "
    "too narrow for this model (try float32)"
)
"""Why an answer ends with "error"."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token that might have come.

    Attributes:
        token_id: Its id.
        token: Its text, as tables show it.
        logprob: Its natural log-probability under the model, before sampling parameters.
    """

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """The token that came, and the most probable ones at that place.

    Attributes:
        top: The most probable tokens, best first; as many as `logprobs` asked for.
    """

    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to an answer.

    Attributes:
        text: Complete characters that can be shown now; often empty while a character or a stop string may go on.
        token_ids: The ids it comes from.
        logprobs: One entry for each id if `logprobs` was asked for, else empty.
        finish_reason: "stop", "length" or "error" with the last piece, else None.
        index: Which of the `n` answers it belongs to.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    Attributes:
        text: Its text, without stop string or stop token.
        token_ids: All ids that were generated, a stop id included.
        logprobs: One entry for each id if `logprobs` was asked for, else None.
        finish_reason: "stop" at a stop id or stop string, "length" at `max_tokens` or the end of the context, "error"
            where the model's logits were NaN or infinite.
        seed: With this seed the same request gives this answer again.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    seed: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """What one prompt gave.

    Attributes:
        prompt_ids: The prompt as the model saw it.
        completions: The `n` answers.
    """

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    def __str__(self) -> str:
        """Return the first answer's text."""
        return self.text

    def __repr__(self) -> str:
        """Show each answer's text, length and end; ids and log-probabilities are in the attributes."""
        shown = ", ".join(f"{c.text!r} ({len(c.token_ids)} tokens, {c.finish_reason})" for c in self.completions)
        return f"Generation({len(self.prompt_ids)} prompt tokens: {shown})"

    def or_raise(self) -> "Generation":
        """Return this, if its answers have come to an end.

        Raises:
            LlamariumError: If the model's logits were NaN or infinite.
        """
        if any(completion.finish_reason == "error" for completion in self.completions):
            raise LlamariumError(NOT_FINITE)
        return self


@dataclass
class RowText:
    """One row's text in the making.

    Attributes:
        tokenizer: Decodes.
        params: The row's own; its stop strings and `logprobs` are read.
        index: Which of the prompt's `n` answers this is.
        stop_ids: Ids that end the row and have no text.
        begins: The row begins a text of its own, rather than continuing the prompt's: some vocabularies put a space
            before a text, which is then not part of it.
    """

    tokenizer: Tokenizer
    params: SamplingParams
    index: int
    stop_ids: frozenset[int]
    begins: bool
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        """Begin decoding."""
        self._decoder = self.tokenizer.stream(continuation=not self.begins)
        self._stops = StopStringFilter(self.params.stop)

    def push(self, event: TokenEvent) -> Piece:
        """Take the row's next token and return what it adds."""
        is_text = event.token_id not in self.stop_ids and event.finish_reason != "error"
        text = self._decoder.push(event.token_id) if is_text else ""
        if event.finish_reason is not None:
            text += self._decoder.finish()
        text = self._stops.push(text)
        self.finish_reason = "stop" if self._stops.stopped else event.finish_reason
        if self.finish_reason is not None:
            text += self._stops.finish()
        self.texts.append(text)
        if event.finish_reason == "error":
            return Piece(text, (), (), "error", self.index)
        self.token_ids.append(event.token_id)
        logprobs = () if self.params.logprobs is None else (self._logprob(event),)
        self.logprobs.extend(logprobs)
        return Piece(text, (event.token_id,), logprobs, self.finish_reason, self.index)

    def completion(self) -> Completion:
        """Return the finished answer."""
        assert self.finish_reason is not None
        logprobs = None if self.params.logprobs is None else tuple(self.logprobs)
        return Completion("".join(self.texts), tuple(self.token_ids), logprobs, self.finish_reason, self.params.seed)

    def _logprob(self, event: TokenEvent) -> TokenLogprob:
        top = tuple(Alternative(i, self.tokenizer.token_text(i), logprob) for i, logprob in event.top)
        return TokenLogprob(event.token_id, self.tokenizer.token_text(event.token_id), event.logprob, top)


def row_texts(
    tokenizer: Tokenizer, params: Sequence[SamplingParams], stop_ids: frozenset[int], begins: Sequence[bool]
) -> tuple[list[RowText], list[int]]:
    """Return a `RowText` for every row of `generate_tokens`, and the prompt that each row answers."""
    rows: list[RowText] = []
    prompt_of: list[int] = []
    for prompt_idx, wanted in enumerate(params):
        for index, single in enumerate(wanted.rows()):
            rows.append(
                RowText(tokenizer, single, index, stop_ids | frozenset(wanted.stop_token_ids), begins[prompt_idx])
            )
            prompt_of.append(prompt_idx)
    return rows, prompt_of


def stop_ids_of(config: ModelConfig, tokenizer: Tokenizer | None, recommended: Sequence[int]) -> frozenset[int]:
    """Return every id that one of the model's own files calls an end, and the dialog format's end of turn."""
    ids = {*config.eos_token_id, *recommended}
    if tokenizer is not None:
        ids.update(tokenizer.eos_token_ids)
        if tokenizer.chat_format is not None:
            ids.update(tokenizer.chat_format.stop_ids)
    return frozenset(ids)
