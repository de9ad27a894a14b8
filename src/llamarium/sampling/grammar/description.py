"""`Grammar`, a constraint on the answer of a request, validated as far as possible without a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

from llamarium.errors import GrammarError, GrammarLimitError, SamplingError, escape, show_value, warn_caller
from llamarium.sampling.grammar import lark
from llamarium.sampling.grammar.schema.unenforced import UnenforcedKeyword

Kind = Literal["json_schema", "regex", "choice", "lark", "gbnf", "calls"]

MAX_BYTES = 256 * 1024
"""The largest text of a grammar; the slowest one found compiles within half a second."""
MAX_CHOICES = 10_000
"""The most texts of a choice."""
OPTIONS = ("grammar", "json_schema", "json_object", "regex", "choice")
"""The options of an answer that `from_options` reads."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer, created by `json_schema`, `json_object`, `regex`, `choice`, `lark` or `gbnf`.

    >>> llama.generate("To be", grammar=llamarium.Grammar.choice(["yes", "no"]), temperature=0).text
    'no'

    Attributes:
        kind: The notation of `text`.
        text: The grammar; for a choice the JSON list, for a schema the lowered schema.
        openings: How an answer with calls begins, if it may also have another format.
        has_free_text: Whether the answer may be or begin with unconstrained text, to which stop strings apply.
        unenforced: Keywords of its schemas that it does not enforce.
    """

    kind: Kind
    text: str
    openings: tuple[str, ...] = ()
    has_free_text: bool = False
    unenforced: tuple[UnenforcedKeyword, ...] = field(default=(), compare=False)

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | str,
        *,
        open_objects: bool = False,
        strict: bool = False,
        tolerant: bool = False,
    ) -> Self:
        """Accept the JSON values that a schema allows.

        Properties come in the schema's order. Blanks are allowed between JSON's signs, 32 at a place. Keywords that
        restrict values and cannot be held are in `unenforced`.

        Args:
            schema: JSON Schema 2020-12, as an object or its JSON text; older drafts' and OpenAPI's words are read, too.
            open_objects: An object may have other properties than those listed where its schema says nothing of
                `additionalProperties`.
            strict: A restriction that cannot be held is a GrammarError.
            tolerant: Keywords whose values are none of theirs (`"type": "int"`) are in `unenforced`, too.

        Raises:
            GrammarError: For what is no schema, naming the keyword and its place, and for one that no value follows.
            GrammarLimitError: If it is larger than the limits.
        """
        from llamarium.sampling.grammar import json_schema  # fifteen modules that most processes never need
        from llamarium.sampling.grammar.schema.reading import MAX_LOWERED

        text = _checked("the JSON schema", schema if isinstance(schema, str) else _as_json(schema))
        parsed = json_schema.parsed(text)
        lowered = json_schema.lowered(parsed, open_objects=open_objects, strict=strict, tolerant=tolerant)
        held = json.dumps(lowered.schema, ensure_ascii=False)
        if len(held) > MAX_LOWERED:
            raise GrammarLimitError(
                f"the JSON schema has {len(held):,} characters when it is written out; expected at most "
                f"{MAX_LOWERED:,}; make it smaller"
            )
        return cls("json_schema", held, unenforced=lowered.unenforced)

    @classmethod
    def json_object(cls) -> Self:
        """Accept any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, expression: str) -> Self:
        r"""Accept what a regular expression matches from end to end.

        It is Rust's, without lookarounds and word borders: https://docs.rs/regex/latest/regex/#syntax. So `\d` is any
        script's digit.

        Raises:
            GrammarError: If it is no text, or empty. Whether it can be read is known when it is compiled.
            GrammarLimitError: If it is larger than the limits.
        """
        return cls("regex", _checked("the regular expression", expression))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Accept one of some texts.

        Raises:
            GrammarError: If there is none, or one is empty or no text.
            GrammarLimitError: If there are too many.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GrammarError(f"choice is {show_value(texts)}; expected a list of at least one text")
        if len(texts) > MAX_CHOICES:
            raise GrammarLimitError(f"choice has {len(texts):,} texts; expected at most {MAX_CHOICES:,}")
        for text in texts:
            _checked("a text of choice", text)
        return cls("choice", _checked("choice", json.dumps(list(texts), ensure_ascii=False)))

    @classmethod
    def lark(cls, text: str) -> Self:
        """Accept what a Lark grammar accepts, from its rule `start` on.

        It is llguidance's Lark without control tokens, schemas and options of sampling:
        https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.

        Raises:
            GrammarError: For what is not a text's form. Whether it can be read is known when it is compiled.
            GrammarLimitError: If it is larger than the limits.
        """
        lark.check_lark(_checked("the Lark grammar", text))
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Self:
        """Accept what a grammar of llama.cpp accepts, from its rule `root` on.

        Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.

        Raises:
            GrammarError: If it is no text, or empty. Whether it can be read is known when it is compiled.
            GrammarLimitError: If it is larger than the limits.
        """
        lark.check_num_rules(_checked("the GBNF grammar", text).count("::="))
        return cls("gbnf", text)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Grammar | None":
        """Return the grammar of one of the options `OPTIONS`, or None without any; None counts as not given.

        Raises:
            SamplingError: For more than one of them, or a value of another type.
            GrammarError: As the constructors.
        """
        given = [name for name in OPTIONS if options.get(name) is not None]
        if len(given) > 1:
            raise SamplingError(f"{' and '.join(given)}: an answer has one form; give one of them")
        if not given or options.get("json_object") is False:
            return None
        (name,) = given
        value = options[name]
        if name == "grammar":
            return checked_grammar(value)
        if name == "json_object":
            if value is not True:
                raise SamplingError(f"json_object is {show_value(value)}; expected True or False")
            return cls.json_object()
        grammar = getattr(cls, name)(value)
        warn_unenforced(grammar)
        return grammar


def warn_unenforced(grammar: Grammar | None) -> None:
    """Warn about the keywords of its schemas that a grammar does not hold, up to ten."""
    if grammar is None or not grammar.unenforced:
        return
    named = "; ".join(f"{keyword} {keyword.reason}" for keyword in grammar.unenforced[:10])
    more = len(grammar.unenforced) - 10
    warn_caller(f"not held of the JSON schema: {escape(named, 2000)}" + (f"; and {more} more" if more > 0 else ""))


def checked_grammar(value: object) -> Grammar | None:
    """Return a grammar or None, and raise a SamplingError for anything else."""
    if value is None or isinstance(value, Grammar):
        return value
    raise SamplingError(
        f"grammar is {show_value(value)}; expected a Grammar, as Grammar.lark(text) and Grammar.gbnf(text) are"
    )


def _checked(what: str, text: object) -> str:
    if not isinstance(text, str) or not text:
        raise GrammarError(f"{what} is {show_value(text)}; expected a text that is not empty")
    try:
        size = len(text.encode("utf-8")) if len(text) <= MAX_BYTES else len(text)
    except UnicodeEncodeError:
        raise GrammarError(f"{what} is no valid Unicode: it holds a lone surrogate") from None
    if size > MAX_BYTES:
        raise GrammarLimitError(f"{what} has {size:,} bytes; expected at most {MAX_BYTES:,}")
    return text


def _as_json(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise GrammarError(f"the JSON schema is {show_value(schema)}; expected an object, or its JSON text")
    try:
        return json.dumps(dict(cast("Mapping[str, Any]", schema)), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from None
    except RecursionError:
        raise GrammarLimitError("the JSON schema is nested too deep; make it flatter") from None
