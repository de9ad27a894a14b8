"""`Grammar`, a constraint on the answer of a request, validated as far as possible without a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

from llamarium.errors import GrammarError, GrammarLimitError, SamplingError, escape, show_value, warn_caller
from llamarium.options.declare import declared, option
from llamarium.sampling.grammar import lark
from llamarium.sampling.grammar.schema.unenforced import UnenforcedKeyword

Kind = Literal["json_schema", "regex", "choice", "lark", "gbnf", "calls"]

MAX_BYTES = 256 * 1024
"""Maximum size of a grammar's text; the slowest known grammar of this size compiles within half a second."""
MAX_CHOICES = 10_000
"""Maximum number of texts of a choice."""


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """Short forms of a `Grammar`; at most one of them, or a `Grammar`, may be given."""

    json_schema: Mapping[str, Any] | str | None = option(None, "JSON Schema of the answer", metavar="FILE")
    json_object: bool = option(False, "require a JSON object")
    regex: str | None = option(None, "regular expression for the whole answer (Rust's syntax)", metavar="REGEX")
    choice: Sequence[str] | None = option(None, "allowed answer", metavar="TEXT", repeats=True)


OPTIONS = ("grammar", *declared(FormOptions))
"""The options of a request that `Grammar.from_options` reads."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer, created by `json_schema`, `json_object`, `regex`, `choice`, `lark` or `gbnf`.

    >>> llama.generate("To be", grammar=llamarium.Grammar.choice(["yes", "no"]), temperature=0).text
    'no'

    Attributes:
        kind: Notation of `text`.
        text: The grammar; for a choice, the JSON list of texts; for a schema, the lowered schema.
        openings: Possible beginnings of an answer with calls, if the answer may also have another format.
        has_free_text: True if the answer may be or begin with unconstrained text, to which stop strings apply.
        unenforced: Keywords of its schemas that are not enforced.
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

        Properties are generated in the schema's order. Up to 32 blanks are allowed between JSON tokens. Keywords that
        restrict values but cannot be enforced are listed in `unenforced`.

        Args:
            schema: JSON Schema 2020-12, as an object or its JSON text; keywords of older drafts and OpenAPI are
                supported too.
            open_objects: Allow objects to have properties that are not listed if the schema does not have
                `additionalProperties`.
            strict: Raise GrammarError for a restriction that cannot be enforced.
            tolerant: List keywords with invalid values (`"type": "int"`) in `unenforced` instead of raising an error.

        Raises:
            GrammarError: If the schema is invalid, naming the keyword and its place, or no value satisfies it.
            GrammarLimitError: If the schema exceeds a limit.
        """
        from llamarium.sampling.grammar import json_schema  # fifteen modules that most processes do not need
        from llamarium.sampling.grammar.schema.reading import MAX_LOWERED

        text = _checked("the JSON schema", schema if isinstance(schema, str) else _as_json(schema))
        parsed = json_schema.parsed(text)
        lowered = json_schema.lowered(parsed, open_objects=open_objects, strict=strict, tolerant=tolerant)
        lowered_text = json.dumps(lowered.schema, ensure_ascii=False)
        if len(lowered_text) > MAX_LOWERED:
            raise GrammarLimitError(
                f"the JSON schema has {len(lowered_text):,} characters when it is written out; expected at most "
                f"{MAX_LOWERED:,}; make it smaller"
            )
        return cls("json_schema", lowered_text, unenforced=lowered.unenforced)

    @classmethod
    def json_object(cls) -> Self:
        """Accept any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, expression: str) -> Self:
        r"""Accept the texts that a regular expression matches completely.

        The syntax is that of Rust's regex crate, without lookaround and word boundaries:
        https://docs.rs/regex/latest/regex/#syntax. `\d` matches digits of all scripts.

        Raises:
            GrammarError: If it is not a non-empty string. Its syntax is checked when it is compiled.
            GrammarLimitError: If it exceeds a limit.
        """
        return cls("regex", _checked("the regular expression", expression))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Accept exactly one of the given texts.

        Raises:
            GrammarError: If there are none, or one is not a non-empty string.
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
        """Accept the texts of a Lark grammar, with the start rule `start`.

        The syntax is that of llguidance without control tokens, schemas and sampling options:
        https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.

        Raises:
            GrammarError: If it uses an unsupported feature. Its syntax is checked when it is compiled.
            GrammarLimitError: If it exceeds a limit.
        """
        lark.check_lark(_checked("the Lark grammar", text))
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Self:
        """Accept the texts of a GBNF grammar (llama.cpp), with the start rule `root`.

        Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.

        Raises:
            GrammarError: If it is not a non-empty string. Its syntax is checked when it is compiled.
            GrammarLimitError: If it exceeds a limit.
        """
        lark.check_num_rules(_checked("the GBNF grammar", text).count("::="))
        return cls("gbnf", text)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Grammar | None":
        """Create a grammar from one of the options in `OPTIONS`; None if all are missing or None.

        Raises:
            SamplingError: If more than one is given, or a value has the wrong type.
            GrammarError: As the constructors.
        """
        names = [name for name in OPTIONS if options.get(name) is not None]
        if len(names) > 1:
            raise SamplingError(f"{' and '.join(names)}: an answer has one form; give one of them")
        if not names or options.get("json_object") is False:
            return None
        (name,) = names
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
    """Issue a UserWarning about keywords that a grammar does not enforce, listing up to ten."""
    if grammar is None or not grammar.unenforced:
        return
    first_ten = "; ".join(f"{keyword} {keyword.reason}" for keyword in grammar.unenforced[:10])
    num_others = len(grammar.unenforced) - 10
    warn_caller(
        f"not enforced of the JSON schema: {escape(first_ten, 2000)}"
        + (f"; and {num_others} more" if num_others > 0 else "")
    )


def checked_grammar(value: object) -> Grammar | None:
    """Return a value that is a grammar or None; SamplingError for anything else."""
    if value is None or isinstance(value, Grammar):
        return value
    raise SamplingError(
        f"grammar is {show_value(value)}; expected a Grammar, as Grammar.lark(text) and Grammar.gbnf(text) are"
    )


def _checked(subject: str, text: object) -> str:
    if not isinstance(text, str) or not text:
        raise GrammarError(f"{subject} is {show_value(text)}; expected a text that is not empty")
    try:
        size = len(text.encode("utf-8")) if len(text) <= MAX_BYTES else len(text)
    except UnicodeEncodeError:
        raise GrammarError(f"{subject} is no valid Unicode: it holds a lone surrogate") from None
    if size > MAX_BYTES:
        raise GrammarLimitError(f"{subject} has {size:,} bytes; expected at most {MAX_BYTES:,}")
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
