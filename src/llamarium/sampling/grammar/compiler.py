"""From a `Grammar` to the masks of an answer's tokens, with llguidance.

A vocabulary's tokens are put into a tree of bytes once (`GrammarCompiler`: a second for 128,256 of them). Compiling a
grammar against it takes milliseconds, a mask some tens of microseconds: at each token the tree is walked with the
grammar's lexer and an Earley parser, and a bit is set for each token that goes on with a text that the grammar accepts.
Any token may that does, whatever other tokens would spell the same text: `no_forcing` in llguidance's terms.

One id more than the model has stands for the end of the text: the mask's last bit says whether the answer may end here.
Control tokens have no text, so no grammar allows them; a stop id is allowed where the answer may end.

Limits. What a request can say is bounded before it comes here (`description.py`, `json_schema.py`, `lark.py`), and what
comes of it by llguidance's own counts of work, which are the same on any machine: its defaults, and fewer of the
parser's items at each token for grammars that people write, as those may read the same text in ever more ways
(docs/decisions/0027-structured-output.md has the numbers). A time limit stands behind them: a grammar that compiles for
longer is refused. Compiling cannot be interrupted, so not more than a few are compiled at once.

Source: https://github.com/guidance-ai/llguidance (parser/src/api.rs for the limits, docs/optimizations.md).
"""

import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import GrammarError, GrammarLimitError, escape
from llamarium.extras import optional
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.grammar import workers
from llamarium.sampling.grammar.description import Grammar, Kind
from llamarium.sampling.grammar.json_schema import rule
from llamarium.sampling.grammar.lark import gbnf_to_lark, literal
from llamarium.tokenizer.base import Tokenizer

MAX_COMPILE_S = 10.0
"""How long a request waits for its grammar."""
_MOST_AT_ONCE = 4
_LIMITS: Mapping[Kind, Mapping[str, int]] = {  # an optional property is four items; a schema is not ambiguous
    "lark": {"max_items_in_row": 500, "step_max_items": 10_000},
    "gbnf": {"max_items_in_row": 500, "step_max_items": 10_000},
}
_END_MARK = b"\xff<end>"  # 0xff begins no text: llguidance's mark of special tokens
_TOO_LARGE = ("too many", "too large", "too big", "fuel", "limit", "items; max", "too deeply", "recursion", "Unable to")
_BAD_REGEX = re.compile(  # what is wrong stands after the expression, with carets below the place
    r"regex parse error:\n    (?P<regex>.*)\n    (?P<blanks> *)(?P<carets>\^+)[ ^]*\nerror: (?P<reason>.*)"
)


class GrammarCompiler:
    """Compiles grammars for one vocabulary; ids from the tokenizer's end up to `vocab_size` have no text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._package: Any = optional("llguidance", "serve", "structured output")
        self._tokens = _text_of_tokens(tokenizer, vocab_size)
        self._slots = threading.BoundedSemaphore(_MOST_AT_ONCE)

    @cached_property
    def tree(self) -> Any:
        """The vocabulary as llguidance's tree, made at its first use."""
        return self._package.LLTokenizer(_Vocabulary(self._tokens))

    @cached_property
    def text_bits(self) -> NDArray[np.uint32]:
        """The mask of all tokens with a text."""
        return _bits([i for i, text in enumerate(self._tokens[:-1]) if text], self.vocab_size)

    def compile(self, grammar: Grammar) -> "Compiled":
        """Compile a grammar; safe on any thread."""
        source = '%llguidance {"no_forcing": true}\n' + self._lark(grammar)
        if not self._slots.acquire(timeout=MAX_COMPILE_S):
            raise GrammarLimitError("other grammars are being compiled, and none came to an end; try again later")
        future: Future[Any] = Future()

        def work() -> None:
            try:
                workers.run(lambda: self._matcher(source, _LIMITS.get(grammar.kind, {})), future)
            finally:
                self._slots.release()

        workers.start(work, "llamarium-compile")
        try:
            matcher = future.result(timeout=MAX_COMPILE_S)
        except TimeoutError:
            raise GrammarLimitError(f"the grammar takes longer than {MAX_COMPILE_S:.0f} s to compile") from None
        compiled = Compiled(self, matcher)
        _check_beginning(compiled.begin(()))
        return compiled

    def _matcher(self, source: str, limits_of_kind: Mapping[str, int]) -> Any:
        limits = self._package.LLParserLimits(verbose_errors=False, **limits_of_kind)
        matcher = self._package.LLMatcher(self.tree, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher

    def _lark(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_schema":
                return f"start: {rule(json.loads(grammar.text))}"
            case "choice":
                return f"start: /{'|'.join(map(literal, json.loads(grammar.text)))}/"
            case "regex":
                made = json.loads(self._package.LLMatcher.grammar_from_regex(grammar.text))
                return made["grammars"][0]["lark_grammar"]
            case "lark" | "calls":
                return grammar.text
            case "gbnf":
                return gbnf_to_lark(grammar.text)


class Compiled:
    """A grammar for one vocabulary, with llguidance's matcher at the beginning."""

    def __init__(self, compiler: GrammarCompiler, matcher: Any) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._copying = threading.Lock()

    def begin(self, stop_ids: Collection[int]) -> "GrammarConstraint":
        """Return the form of a new answer; its first mask is computed at once."""
        with self._copying:
            matcher = self._matcher.deep_copy()
        return GrammarConstraint(matcher, self._compiler.text_bits, self._compiler.vocab_size, stop_ids)

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tokens are a complete answer."""
        with self._copying:
            matcher = self._matcher.deep_copy()
        return all(map(matcher.consume_token, token_ids)) and matcher.is_accepting()


class GrammarConstraint:
    """The form of one answer, with a matcher of its own; see `Constraint`.

    Attributes:
        is_finished: The answer is complete, and nothing can follow.
        failure: Why no token is allowed, if none is.
        may_end: The answer can end here, by the last mask.
    """

    def __init__(self, matcher: Any, text_bits: NDArray[np.uint32], vocab_size: int, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(i for i in stop_ids if i < vocab_size)
        self._stop_bits = _bits(self._stop_ids, vocab_size)
        self._text_bits = text_bits & ~self._stop_bits
        self._words = np.zeros(vocab_size // 32 + 1, np.uint32)  # V bits, and one for the end
        self._mask = self._words[: len(text_bits)]
        self.is_finished = False
        self.failure = NoToken.NOTHING_FITS
        self.may_end = False
        self._look_ahead()

    def mask(self) -> NDArray[np.uint32]:
        """Wait for the next token's mask."""
        self._coming.result()
        return self._mask

    def accept(self, token_id: int) -> None:
        """Take the next token, and begin to compute the mask of the one after it."""
        self._coming.result()
        if token_id in self._stop_ids:
            self.is_finished = True
            return
        if not self._matcher.consume_token(token_id):
            self._fail()
        elif self._matcher.is_stopped():
            self._end()
        else:
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._coming = workers.submit(self._compute)
        if not self._stop_ids:  # then no choice is left where the answer can only end
            self._coming.result()

    def _compute(self) -> None:
        """Fill the mask; on a thread of `workers`."""
        words, last = self._words, self._vocab_size
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # the mask is that of the end then, which it is not
            return self._fail()
        self.may_end = bool(words[last // 32] >> np.uint32(last % 32) & np.uint32(1))
        self._mask &= self._text_bits
        if self.may_end:
            self.is_finished = not self._stop_ids and not self._mask.any()
            self._mask |= self._stop_bits
        return None

    def _end(self) -> None:
        if self._matcher.is_error() or not self._matcher.is_accepting():
            self._fail()
        else:
            self.is_finished = True

    def _fail(self) -> None:
        self._words[:] = 0
        self.failure = _failure(self._matcher.get_error())


class _Vocabulary:
    """A vocabulary in llguidance's interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: object) -> list[int]:
        """Refuse: llguidance encodes only forced texts, and none are forced."""
        raise AssertionError("no text is encoded")


def _text_of_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes of each id, empty for hidden tokens and ids without a token, and of the end."""
    control = tokenizer.special.hidden
    known = min(vocab_size, tokenizer.vocab_size)
    texts = [b"" if i in control else _bytes_of(tokenizer, i) for i in range(known)]
    return [*texts, *[b""] * (vocab_size - known), _END_MARK]


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    found = tokenizer.backend.token_bytes(token_id) or b""
    return b"" if found.startswith(_END_MARK[:1]) else found  # no text begins with this byte


def _bits(ids: Collection[int], vocab_size: int) -> NDArray[np.uint32]:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _check_beginning(constraint: GrammarConstraint) -> None:
    """Refuse a grammar without a first token."""
    mask = constraint.mask()
    if constraint.is_finished or (constraint.may_end and not mask.any()):
        raise GrammarError("the grammar accepts the empty text alone")
    if not mask.any():
        if constraint.failure is NoToken.TOO_MUCH_WORK:
            raise GrammarLimitError("the grammar takes more work at the first token than the limits allow")
        raise GrammarError("no token of this vocabulary begins a text that the grammar accepts")


def _failure(message: str) -> NoToken:
    return NoToken.TOO_MUCH_WORK if _is_limit(message) else NoToken.NOTHING_FITS


def _is_limit(message: str) -> bool:
    return any(sign in message for sign in _TOO_LARGE)


def _refusal(message: str) -> GrammarError:
    kind = GrammarLimitError if _is_limit(message) else GrammarError
    if found := _BAD_REGEX.search(message):
        blanks = len(found["blanks"])
        part, reason = found["regex"][blanks : blanks + len(found["carets"])], found["reason"]
        where = f"at {part or 'its end'} (character {blanks + 1}) of {found['regex']}"
        return kind(f"the grammar cannot be compiled: a regular expression: {escape(reason)}, {escape(where)}")
    first, _, _ = message.partition("\n")  # the others show our wrapping of it
    _, _, said = first.rpartition("failed to compile JSON schema: ")
    return kind(f"the grammar cannot be compiled: {escape(said)}")
