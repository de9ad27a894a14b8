"""Compilation of a `Grammar` to token masks, with llguidance.

The tokens of a vocabulary are put into a trie of bytes once (`GrammarCompiler`: one second for 128,256 tokens).
Compiling a grammar takes milliseconds, and a mask some tens of microseconds: for each token the trie is walked with the
grammar's lexer and an Earley parser, and a bit is set for each token that continues a text that the grammar accepts.
All such tokens are allowed, even if other tokens would spell the same text: `no_forcing` in llguidance's terms.

One additional id represents the end of the text: the mask's last bit is set if the answer may end here. Control tokens
have no text, so no grammar allows them; stop ids are allowed where the answer may end.

Limits: The size of a grammar is checked before (`description.py`, `json_schema.py`, `lark.py`). The work is bounded by
llguidance's counters, which are the same on any machine, with lower limits on parser items per token for hand-written
grammars, which may be ambiguous (see docs/decisions/0027-structured-output.md for the numbers). In addition, compiling
has a time limit. It cannot be interrupted, so only a few grammars are compiled at once.

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
"""Maximum time that a request waits for its grammar."""
_MOST_AT_ONCE = 4
_LIMITS: Mapping[Kind, Mapping[str, int]] = {  # schemas: four items per optional property, but unambiguous
    "lark": {"max_items_in_row": 500, "step_max_items": 10_000},
    "gbnf": {"max_items_in_row": 500, "step_max_items": 10_000},
}
_END_MARK = b"\xff<end>"  # 0xff never begins UTF-8; llguidance marks special tokens with it
_TOO_LARGE = ("too many", "too large", "too big", "fuel", "limit", "items; max", "too deeply", "recursion", "Unable to")
_BAD_REGEX = re.compile(  # the reason follows the expression, with carets below the place
    r"regex parse error:\n    (?P<regex>.*)\n    (?P<blanks> *)(?P<carets>\^+)[ ^]*\nerror: (?P<reason>.*)"
)


class GrammarCompiler:
    """A compiler of grammars for one vocabulary; ids beyond the tokenizer's, up to `vocab_size`, have no text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._package: Any = optional("llguidance", "serve", "structured output")
        self._tokens = _text_of_tokens(tokenizer, vocab_size)
        self._slots = threading.BoundedSemaphore(_MOST_AT_ONCE)

    @cached_property
    def tree(self) -> Any:
        """The vocabulary as llguidance's trie, built at first use."""
        return self._package.LLTokenizer(_Vocabulary(self._tokens))

    @cached_property
    def text_bits(self) -> NDArray[np.uint32]:
        """Mask of all tokens that have a text."""
        return _bits([i for i, text in enumerate(self._tokens[:-1]) if text], self.vocab_size)

    def compile(self, grammar: Grammar) -> "Compiled":
        """Compile a grammar; thread-safe.

        Raises:
            GrammarError: If the grammar is invalid, or accepts no text or only the empty one.
            GrammarLimitError: If it exceeds a limit of work or time.
        """
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
                compiled = json.loads(self._package.LLMatcher.grammar_from_regex(grammar.text))
                return compiled["grammars"][0]["lark_grammar"]
            case "lark" | "calls":
                return grammar.text
            case "gbnf":
                return gbnf_to_lark(grammar.text)


class Compiled:
    """A grammar compiled for one vocabulary, with llguidance's matcher in its initial state."""

    def __init__(self, compiler: GrammarCompiler, matcher: Any) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._copying = threading.Lock()

    def begin(self, stop_ids: Collection[int]) -> "GrammarConstraint":
        """Return the constraint of a new answer, and start to compute its first mask."""
        with self._copying:
            matcher = self._matcher.deep_copy()
        return GrammarConstraint(matcher, self._compiler.text_bits, self._compiler.vocab_size, stop_ids)

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Return whether the grammar accepts the tokens as a complete answer."""
        with self._copying:
            matcher = self._matcher.deep_copy()
        return all(map(matcher.consume_token, token_ids)) and matcher.is_accepting()


class GrammarConstraint:
    """The constraint of one answer, with its own matcher; see `Constraint`.

    Attributes:
        is_finished: True if the answer is complete and nothing can follow.
        failure: Reason why no token is allowed, if that is the case.
        may_end: True if the answer may end here, by the last mask.
    """

    def __init__(self, matcher: Any, text_bits: NDArray[np.uint32], vocab_size: int, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(i for i in stop_ids if i < vocab_size)
        self._stop_bits = _bits(self._stop_ids, vocab_size)
        self._text_bits = text_bits & ~self._stop_bits
        self._words = np.zeros(vocab_size // 32 + 1, np.uint32)  # V bits, and one for the end of the text
        self._mask = self._words[: len(text_bits)]
        self.is_finished = False
        self.failure = NoToken.NOTHING_FITS
        self.may_end = False
        self._look_ahead()

    def mask(self) -> NDArray[np.uint32]:
        """Wait for the mask of the next token and return it."""
        self._coming.result()
        return self._mask

    def accept(self, token_id: int) -> None:
        """Append a token, and start to compute the mask of the next one."""
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
        if not self._stop_ids:  # without stop ids the mask decides whether the answer is finished
            self._coming.result()

    def _compute(self) -> None:
        """Compute the mask; runs in a thread of `workers`."""
        words, last = self._words, self._vocab_size
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # llguidance then returns a mask with only the end, which would be wrong
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
    """A vocabulary with the interface that llguidance expects of tokenizers."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: object) -> list[int]:
        """Raise AssertionError: llguidance encodes only forced texts, which `no_forcing` disables."""
        raise AssertionError("no text is encoded")


def _text_of_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes of each id, empty for hidden tokens and unused ids, followed by the mark of the end."""
    control = tokenizer.special.hidden
    num_texts = min(vocab_size, tokenizer.vocab_size)
    texts = [b"" if i in control else _bytes_of(tokenizer, i) for i in range(num_texts)]
    return [*texts, *[b""] * (vocab_size - num_texts), _END_MARK]


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    text = tokenizer.backend.token_bytes(token_id) or b""
    return b"" if text.startswith(_END_MARK[:1]) else text  # the byte marks special tokens


def _bits(ids: Collection[int], vocab_size: int) -> NDArray[np.uint32]:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _check_beginning(constraint: GrammarConstraint) -> None:
    """Raise GrammarError if a grammar allows no first token."""
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
    if match := _BAD_REGEX.search(message):
        blanks = len(match["blanks"])
        part, reason = match["regex"][blanks : blanks + len(match["carets"])], match["reason"]
        where = f"at {part or 'its end'} (character {blanks + 1}) of {match['regex']}"
        return kind(f"the grammar cannot be compiled: a regular expression: {escape(reason)}, {escape(where)}")
    first, _, _ = message.partition("\n")  # the other lines show generated rules
    _, _, reason = first.rpartition("failed to compile JSON schema: ")
    return kind(f"the grammar cannot be compiled: {escape(reason)}")
