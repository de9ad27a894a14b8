"""What a grammar may say: what is refused, by name and place, and what the rest accepts."""

import datetime
import ipaddress
import json
import re
import uuid

import pytest

from llamarium.errors import GrammarError, GrammarLimitError, OptionError, SamplingError
from llamarium.sampling.grammar import description
from llamarium.sampling.grammar.compiler import GrammarCompiler
from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.grammar.json_schema import lowered
from llamarium.sampling.grammar.schema.formats import FORMATS
from llamarium.sampling.grammar.schema.objects import MAX_OPTIONAL
from llamarium.sampling.grammar.schema.patterns import PatternError, translated
from llamarium.sampling.grammar.schema.reading import MAX_SCHEMAS
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.backends.characters import CharacterTokenizer

pytestmark = pytest.mark.quick

ASCII = "".join(map(chr, range(32, 127)))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = CharacterTokenizer.from_text(ASCII + "\n\r\té😀\u2028")
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 3)


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether all of a text is accepted, asked as the sampler asks: token by token."""
    constraint = compiler.compile(grammar).begin([compiler.vocab_size - 1])
    end = compiler.vocab_size - 1
    for token_id in [*(compiler._tokens.index(c.encode()) for c in text), end]:
        if constraint.is_finished and token_id == end:
            return True
        if constraint.is_finished or not constraint.mask()[token_id // 32] >> token_id % 32 & 1:
            return False
        constraint.accept(token_id)
    return constraint.is_finished


# --- JSON Schema ------------------------------------------------------------------------------------------------------


DEEP = {"$defs": {"a": {"required": ["b"], "properties": {"b": {"$ref": "#/$defs/a"}}, "type": "object"}}}


@pytest.mark.parametrize(
    ("schema", "place", "keyword"),
    [
        ({"not": {"minimum": 3}}, "#", "not"),
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a", "uniqueItems"),
        ({"items": {"if": {"minimum": 1}, "then": {}}}, "#/items", "if"),
        ({"anyOf": [{}, {"propertyNames": {"not": {}}}]}, "#/anyOf/1", "propertyNames"),
        ({"type": "array", "contains": {"type": "null"}}, "#", "contains"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "#", "unevaluatedProperties"),
        ({"pattern": "(?<=a)b"}, "#", "pattern"),
        ({"patternProperties": {r"\bq": {}}}, "#", "patternProperties"),
        ({"const": 2**53 + 1}, "#", "const"),
        ({"enum": [1, {"a": [0.12345678901234567]}]}, "#", "enum"),
        ({"maximum": 1e300}, "#", "maximum"),
        ({"type": "integer", "maximum": 2**64 - 1}, "#", "maximum"),
        ({"multipleOf": 0.123456789012}, "#", "multipleOf"),
        ({"minProperties": 2}, "#", "minProperties"),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "#", "maxProperties"),
        ({"$ref": "other.json#/a"}, "#", "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {}}, "#", "$ref"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "#", "oneOf"),
        ({"properties": {"a/b~c": {"uniqueItems": True}}}, "#/properties/a~1b~0c", "uniqueItems"),
    ],
)
def test_what_is_not_held_is_named_by_its_path_and_refused_under_strict(schema: dict, place: str, keyword: str) -> None:
    (found,) = Grammar.json_schema(schema).unenforced
    assert (found.place, found.keyword, found.field) == (place, keyword, "") and found.reason
    assert str(found.inside("tools[0]")) == f"tools[0]{place}/{keyword}"
    with pytest.raises(GrammarError) as caught:
        Grammar.json_schema(schema, strict=True)
    assert f"at {place}: {keyword} {found.reason}" in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "place", "keyword"),
    [
        ({"requierd": ["a"]}, "#", "requierd"),
        ({"items": {"minlength": 3}}, "#/items", "minlength"),
        ({"type": "int"}, "#", "type"),
        ({"type": []}, "#", "type"),
        ({"required": "a"}, "#", "required"),
        ({"minLength": -1}, "#", "minLength"),
        ({"minLength": 1.5}, "#", "minLength"),
        ({"minimum": "0"}, "#", "minimum"),
        ({"multipleOf": 0}, "#", "multipleOf"),
        ({"properties": []}, "#", "properties"),
        ({"anyOf": {}}, "#", "anyOf"),
        ({"items": 3}, "#", "items"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"format": 3}}}, "#/$defs/a", "format"),
    ],
)
def test_a_fault_of_a_schema_is_refused_and_named_where_faults_are_tolerated(schema, place: str, keyword: str) -> None:
    for options in ({}, {"strict": True}, {"strict": True, "tolerant": True}):
        with pytest.raises(GrammarError) as caught:
            Grammar.json_schema(schema, **options)
        assert f"at {place}: {keyword} " in str(caught.value)
    (found,) = Grammar.json_schema(schema, tolerant=True).unenforced
    assert (found.place, found.keyword) == (place, keyword)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"$ref": "#/items"}}, "#/items"),
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/a"} | DEEP, "#"),
        (
            {
                "$ref": "#a",
                "$defs": {"a": {"$anchor": "a", "allOf": [{"$ref": "#b"}]}, "b": {"$anchor": "b", "$ref": "#a"}},
            },
            "#",
        ),
    ],
)
def test_a_circle_that_no_value_fits_is_refused_whatever_is_tolerated(schema: dict, place: str) -> None:
    for tolerant in (False, True):
        with pytest.raises(GrammarError) as caught:
            Grammar.json_schema(schema, tolerant=tolerant)
        assert f"at {place}: $ref " in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [1],
            "$comment": "c",
            "x-order": 1,
            "type": "null",
        },
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/a", "type": "null"},
        {"properties": {"not": {"type": "string"}, "$id": {}, "x-guidance": {}}},  # names, not keywords
        {
            "x-guidance": {"lenient": True},
            "contentEncoding": "base64",
            "errorMessage": "e",
            "example": 1,
            "type": "null",
        },
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "a", "type": "null"},
        {"format": "phone", "type": "string", "discriminator": {"propertyName": "a"}, "writeOnly": True},
        {"type": "array", "uniqueItems": False},
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
    ],
)
def test_annotations_names_and_references_pass(compiler: GrammarCompiler, schema: dict) -> None:
    compiler.compile(Grammar.json_schema(schema))
    assert Grammar.json_schema(json.dumps(schema)) == Grammar.json_schema(schema, strict=True)


def test_two_grammars_are_equal_if_they_say_the_same_in_the_same_order() -> None:
    a, b = (Grammar.json_schema({"properties": {name: {} for name in names}}) for names in ("xy", "yx"))
    assert a == Grammar.json_schema({"title": "t", "properties": {"x": {}, "y": {}}}) and hash(a) != hash(b) and a != b


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "no JSON"),
        ("", "not empty"),
        ('{"type": "null", "type": "string"}', "'type' twice"),
        ('{"const": NaN}', "NaN is not JSON"),
        ('{"const": "\ud800"}', "surrogate"),
        ("3", "expected a schema"),
    ],
)
def test_a_text_that_is_no_schema_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(GrammarError, match=complaint):
        Grammar.json_schema(text)


@pytest.mark.parametrize("schema", [{"const": float("inf")}, {"const": object()}, 3, None, ["a"]])
def test_an_object_that_is_no_json_is_refused(schema: object) -> None:
    with pytest.raises(GrammarError):
        Grammar.json_schema(schema)  # type: ignore[arg-type]


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema(nested(200)),
        lambda: Grammar.json_schema('{"items":' * 20_000 + "{}" + "}" * 20_000),
        lambda: Grammar.json_schema({"const": json.loads("[" * 200 + "]" * 200)}),
        lambda: Grammar.json_schema({"anyOf": [{}] * MAX_SCHEMAS}),
        lambda: Grammar.json_schema({"properties": {f"k{i}": {} for i in range(MAX_OPTIONAL + 1)}}),
        lambda: Grammar.json_schema({"const": "x" * description.MAX_BYTES}),
        lambda: Grammar.regex("é" * (description.MAX_BYTES // 2 + 1)),
        lambda: Grammar.choice(["a"] * (description.MAX_CHOICES + 1)),
        lambda: Grammar.lark("start: r0\n" + "\n".join(f'r{i}: "a"' for i in range(1000))),
        lambda: Grammar.gbnf("\n".join(f'r{i} ::= "a"' for i in range(1001))),
    ],
)
def test_what_is_too_large_is_refused_by_an_error_of_its_own(make) -> None:
    with pytest.raises(GrammarLimitError):
        make()


def test_as_many_optional_properties_as_may_be_can_be_left_out(compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_schema({"properties": {f"k{i}": {} for i in range(MAX_OPTIONAL)}})
    assert accepts(compiler, grammar, '{"k399": {}}') and accepts(compiler, grammar, "{}")


def test_what_takes_too_much_work_is_refused_by_the_same(compiler: GrammarCompiler) -> None:
    schema = {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for j in range(4)]} for i in range(8)]}
    with pytest.raises(GrammarLimitError):
        compiler.compile(Grammar.json_schema(schema))


def test_a_long_chain_of_references_has_room_on_the_stack(compiler: GrammarCompiler) -> None:
    """On a thread with eight MiB the process would end."""
    count = MAX_SCHEMAS // 2 - 2
    chain = {f"a{i}": {"properties": {"p": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)}
    compiler.compile(Grammar.json_schema({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {}}}))
    rules = "\n".join(f'r{i}: "a" (r{i + 1} "c" | "x{i}" r{i + 1})*' for i in range(900))
    compiler.compile(Grammar.lark(f'start: r0\n{rules}\nr900: "z"'))


@pytest.mark.parametrize(
    ("limits", "within", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001"], ["0", "0.0", "0.51"]),  # llguidance alone takes 0
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.01"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 390, "exclusiveMaximum": 390.25}, ["390.20"], ["390", "390.25"]),
        ({"exclusiveMinimum": 3, "type": "integer"}, ["4"], ["3"]),
        ({"exclusiveMaximum": 3, "type": "integer"}, ["2", "-7"], ["3"]),
        ({"exclusiveMinimum": 1, "minimum": 2}, ["2"], ["1.5"]),
        ({"type": ["integer", "number"]}, ["1.5", "1"], []),
    ],
)
def test_excluded_limits_are_excluded(compiler: GrammarCompiler, limits, within, outside) -> None:
    grammar = Grammar.json_schema({"type": "number"} | limits)
    for text in within:
        assert accepts(compiler, grammar, text), text
    for text in outside:
        assert not accepts(compiler, grammar, text), text


A, B, X = '{"a": 1}', '{"a": 1, "b": 1}', '{"a": 1, "x": 1}'
OF_A = {"properties": {"a": {}, "b": {}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "wrap"),
    [
        (OF_A, "%s"),
        ({"items": {"anyOf": [{"type": "null"}, OF_A]}}, "[%s]"),
        ({"$ref": "#/$defs/a", "$defs": {"a": OF_A}}, "%s"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": OF_A}}, "%s"),
        ({"properties": {"p": {"additionalProperties": OF_A}}}, '{"p": {"q": %s}}'),
        ({"patternProperties": {"^[ab]$": {}}}, "%s"),
        ({"properties": {"a": {}, "b": {}, "x": False}}, "%s"),
    ],
)
def test_an_object_has_the_properties_that_its_schema_lists(compiler: GrammarCompiler, schema: dict, wrap: str) -> None:
    closed, opened = Grammar.json_schema(schema), Grammar.json_schema(schema, open_objects=True)
    for inner, is_listed in ((A, True), (B, True), (X, False)):
        assert accepts(compiler, closed, wrap % inner) is is_listed, inner
        assert accepts(compiler, opened, wrap % inner) is (is_listed or schema.get("properties", {}).get("x", True)), (
            inner
        )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},  # a mapping
        OF_A | {"additionalProperties": True},
        OF_A | {"additionalProperties": {"type": "integer"}},
        OF_A | {"required": ["x"]},
        {
            "properties": {"a": {}},
            "allOf": [{"properties": {"b": {}, "x": {}}}],
        },  # closing one would forbid the other's
        {"allOf": [OF_A, {"properties": {"x": {}}}]},
        {"$ref": "#/$defs/a", "properties": {"x": {}}, "$defs": {"a": OF_A}},
        {"anyOf": [{"$ref": "#/$defs/a"}], "properties": {"x": {}}, "$defs": {"a": {"allOf": [OF_A]}}},
        {"properties": {"a": {}}, "enum": [{"a": 1, "x": 1}]},
    ],
)
def test_an_object_stays_open_where_closing_it_would_forbid_what_is_asked_for(
    compiler: GrammarCompiler, schema: dict
) -> None:
    assert accepts(compiler, Grammar.json_schema(schema), X)


def test_blanks_between_signs_come_to_an_end(compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_object()
    assert accepts(compiler, grammar, "{" + " " * 32 + "}")
    assert not accepts(compiler, grammar, "{" + " " * 33 + "}")
    assert not accepts(compiler, grammar, " {}") and not accepts(compiler, grammar, "{} ")


def test_a_format_stands_beside_a_pattern(compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_schema({"type": "string", "format": "date", "pattern": "^2"})
    assert accepts(compiler, grammar, '"2024-02-29"')
    for text in ("1999-01-01", "2023-02-29", "2x"):
        assert not accepts(compiler, grammar, f'"{text}"')


PARSED = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}
EXAMPLES = {
    "date": (["2000-02-29", "1996-02-29", "1999-12-31"], ["1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01"]),
    "time": (["23:59:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "12:00:00", "23:59:60Z", "00:00:00.1234567890Z"]),
    "date-time": (["2024-02-29T00:00:00Z"], ["2024-02-29 00:00:00Z", "2023-02-29T00:00:00Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "P3W", "PT1M"], ["P", "PT", "1Y", "P1H", "P1WT1H"]),
    "email": (["a.b+c@example.org"], ["a@b", ".a@example.org", "a@-b.org", "a b@c.org"]),
    "hostname": (["a.example", "x"], ["-a", "a..b", "a" * 64]),
    "ipv4": (["0.0.0.0", "255.1.20.199"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "1::", "::1", "1:2:3:4:5:6:7:8", "a::b:c", "1:2:3:4:5:6::8"], [":", ":::", "1:2", "1::2::3"]),
    **{
        f"uuid{i}": ([f"12345678-1234-{i}234-9234-123456789aBc"], [f"12345678-1234-{i}234-1234-123456789abc"])
        for i in range(1, 9)
    },
    **dict.fromkeys(("base64", "byte"), (["", "YQ==", "YWI=", "YWJj"], ["YQ", "YQ=", "Y===", "YWJj\n"])),
    "uuid": (["12345678-1234-1234-1234-123456789aBc"], ["12345678123412341234123456789abc"]),
    "uri": (["https://a@b.c:8/d?e#f", "urn:a:b", "http://[::1]/"], ["//a", "a b:c", "http://[1]/", "a:b#c#d"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_accepts_what_its_standard_does(name: str) -> None:
    good, bad = EXAMPLES[name]
    for text in good:
        assert re.fullmatch(FORMATS[name], text), text
        assert name not in PARSED or PARSED[name](text)
    for text in bad:
        assert not re.fullmatch(FORMATS[name], text), text


def test_a_host_name_has_a_greatest_length() -> None:
    assert lowered({"format": "hostname"}).schema["maxLength"] == 253
    assert lowered({"format": "hostname", "maxLength": 300}).schema["allOf"][0]["maxLength"] == 253


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d\w\s$", ["1a ", "0_\n"], ["é1 ", "1é "]),
        (r"^[^\d\s]\W$", ["a-"], ["1-", "ab"]),
        (r"^a.c$", ["abc"], ["a\nc", "a\rc", "a\u2028c"]),
        (r"^\u00e9\x41\/\.$", ["éA/."], ["éA/x"]),
        (r"^[\[\]a-c.]{2}$", ["[]", "a."], ["x]"]),
        (r"^(?:a|b)(?<n>c)?$", ["a", "bc"], ["ac "]),
        (r"b", ["abc"], ["ac"]),
    ],
)
def test_a_pattern_means_what_it_means_in_javascript(compiler: GrammarCompiler, pattern, good, bad) -> None:
    grammar = Grammar.json_schema({"type": "string", "pattern": pattern})
    for text in good:
        assert accepts(compiler, grammar, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not accepts(compiler, grammar, json.dumps(text, ensure_ascii=False)), text


LOOKAHEADS = [
    (r"^(?=.{1,9}\.?$)[a-z.]+$", ["abc", "a.b."], ["abcdefghijkl", ""]),
    (r"^(?!\.)(?!.*\.\.)[a-z.]+@b$", ["a@b", "a.c@b", "a.b.c@b"], [".a@b", "a..b@b", "@b"]),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "+1.5", ".5"], ["", "+", "-."]),
    (r"^(?!xn--)[a-z-]*$", ["", "x", "xn", "xn-", "xm--"], ["xn--", "xn--a"]),
    (r"^(?!null$)\w+$", ["nul", "nulls", "a"], ["null", ""]),
    (r"^(?![0-9])(?!.*-)[\w-]+$", ["a1", "_"], ["1a", "a-b"]),
    (r"^(?=[\s\S]*\d)(?=[^A-Z]*[A-Z])\w{4,}$", ["abC1", "1bcD"], ["abcd", "abC", "abc1"]),
    (r"^(?!a$)b|c$", [], []),
    (r"x(?!a)", [], []),
    (r"^(?!(ab)+)c", [], []),
    (r"^a(?!b)", [], []),
    ("^(?!a", [], []),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), LOOKAHEADS)
def test_lookaheads_at_the_beginning_are_held_and_others_named(compiler: GrammarCompiler, pattern, good, bad) -> None:
    grammar = Grammar.json_schema({"type": "string", "pattern": pattern})
    assert [one.keyword for one in grammar.unenforced] == ([] if good else ["pattern"])
    for text in good:
        assert re.search(pattern, text) and accepts(compiler, grammar, json.dumps(text)), text
    for text in bad:
        assert not re.search(pattern, text) and not accepts(compiler, grammar, json.dumps(text)), text


@pytest.mark.parametrize(
    "pattern", ["[a[b]]", "[a&&b]", "[a--b]", "[]", "[^]", "(?i)a", "(?!a)", r"\bA", r"\1", r"\<a", r"\A", "\\", r"\cA"]
)
def test_a_pattern_that_would_mean_something_else_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        translated(pattern)


# --- the other kinds --------------------------------------------------------------------------------------------------


def test_a_choice_is_one_of_its_texts_to_the_letter(compiler: GrammarCompiler) -> None:
    grammar = Grammar.choice(["yes", "yes.", "a/b", 'q"\n\\é😀', "(x|y)*"])
    for text in ("yes", "yes.", "a/b", 'q"\n\\é😀', "(x|y)*"):
        assert accepts(compiler, grammar, text), text
    for text in ("yesx", "ye", "", "x", "yes,"):
        assert not accepts(compiler, grammar, text), text


def test_a_regex_matches_from_end_to_end(compiler: GrammarCompiler) -> None:
    grammar = Grammar.regex(r"(ab|c/){2}\n?")
    for text in ("abab", "abc/", "c/c/\n"):
        assert accepts(compiler, grammar, text)
    for text in ("ab", "xabab", "ababx"):
        assert not accepts(compiler, grammar, text)


NOTE = 'start: "Dear " NAME ("," NAME){0,2} # who\nNAME: /[A-Z][a-z]*/  // <no token>\n'


@pytest.mark.parametrize(
    "grammar", [Grammar.lark(NOTE), Grammar.gbnf('root ::= "Dear " n ("," n)? ("," n)?\nn ::= [A-Z] [a-z]*')]
)
def test_lark_and_gbnf(compiler: GrammarCompiler, grammar: Grammar) -> None:
    assert accepts(compiler, grammar, "Dear A,Bob,C")
    assert not accepts(compiler, grammar, "Dear a") and not accepts(compiler, grammar, "Dear A,B,C,D")


@pytest.mark.parametrize(
    ("text", "accepted", "refused"),
    [
        ('("a"?){2}', ["a", "aa"], ["aaa"]),
        ('("a"*){1,3} "b"', ["b", "aaaaab"], ["a"]),
        ('("a"{1,2}){1,3}', ["a", "aaaaaa"], ["aaaaaaa"]),
        ('("a"{2}){2}', ["aaaa"], ["aa", "aaa", "aaaaa"]),
        ('((("a"{2})+){2} | "x") "b"', ["aaaab", "aaaaaab", "xb"], ["aab", "aaaaab"]),
        ('(n{2}){2} ("b"?)*\nn ::= "c" ("d"?)?', ["ccccbb", "cdcccd"], ["ccc", "cddccc"]),
    ],
)
def test_a_group_of_what_is_repeated_is_repeated(
    compiler: GrammarCompiler, text: str, accepted: list[str], refused: list[str]
) -> None:
    grammar = Grammar.gbnf(f"root ::= {text}")
    assert [one for one in accepted if not accepts(compiler, grammar, one)] == []
    assert [one for one in refused if accepts(compiler, grammar, one)] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('start: %json {"not": {}}', "%json; .*Grammar.json_schema"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llguidance"),
        ('start: "a" <|eot_id|>', "control tokens"),
        ('start: "a" <[5]>', "control tokens"),
        ("start: @other", "other grammars"),
        ("start: x\nx[temperature=0.5]: /a+/", "temperature="),
        ("start: x\nx[max_tokens=3]: /a+/", "max_tokens="),
        ('start: x "b"\nx[stop="e"]: /a+/', "stop="),
        ("start: A\nA: ~/a/", "negation"),
        ("", "not empty"),
    ],
)
def test_lark_that_is_no_form_of_a_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(GrammarError, match=complaint):
        Grammar.lark(text)


def test_signs_within_quotes_are_text(compiler: GrammarCompiler) -> None:
    grammar = Grammar.lark('start: "<a>" "%json" /[~@<]+/ "temperature=1"')
    assert accepts(compiler, grammar, "<a>%json@<~temperature=1")


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        (Grammar.regex("(a"), r"unclosed group, at \( \(character 1\) of \(a$"),
        (Grammar.regex("a[z-b]"), r"must be <= the end, at z-b \(character 3\) of a\[z-b\]$"),
        (Grammar.lark('start: "b" /a{2/'), r"unclosed counted repetition, at \{2 \(character 2\) of a\{2$"),
        (Grammar.json_schema({"maxLength": 10**10, "type": "string"}), r"literal invalid, at 10000000000 \(character"),
        (Grammar.regex("(?P<a>x)(?P<a>y)"), r"duplicate capture group name, at a \(character 5\)"),
        (Grammar.regex("(" * 999), r"group, at \( \(character 999\) of \(\(\("),
        (Grammar.regex(r"a\b"), "lookarounds not supported"),
        (Grammar.regex("(?:)"), "the empty text alone"),
        (Grammar.regex("ü+"), "no token of this vocabulary"),
        (Grammar.lark("begin: /a/"), "start"),
        (Grammar.gbnf("root ::="), "the empty text alone"),
        (Grammar.gbnf("root := 3"), "GBNF"),
        (Grammar.gbnf("root ::= " + "(" * 3000), "GBNF"),
        (Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
    ],
)
def test_what_cannot_be_compiled_says_why_in_a_line(compiler: GrammarCompiler, grammar, complaint: str) -> None:
    with pytest.raises(GrammarError, match=complaint) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value) and "no_forcing" not in str(caught.value)


def test_a_grammar_that_compiles_for_too_long_is_refused_and_so_are_those_behind_it(monkeypatch) -> None:
    compiler = GrammarCompiler(CharacterTokenizer.from_text("{}"), 2)
    monkeypatch.setattr("llamarium.sampling.grammar.compiler.MAX_COMPILE_S", 0.01)
    monkeypatch.setattr("llamarium.sampling.grammar.workers.start", lambda work, name: None)  # comes to no end
    for complaint in ["longer than 0 s"] * 4 + ["other grammars are being compiled"]:
        with pytest.raises(GrammarLimitError, match=complaint):
            compiler.compile(Grammar.json_object())


def test_without_its_package_the_error_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"structured output needs .* pip install 'llamarium\[serve\]'"):
        GrammarCompiler(CharacterTokenizer.from_text("a"), 1)


# --- options ----------------------------------------------------------------------------------------------------------


def test_each_option_is_a_grammar() -> None:
    def of(**options) -> Grammar | None:
        return SamplingParams.from_options(options, {}).grammar

    assert of() is None and of(json_schema=None, json_object=False) is None
    assert (
        of(json_schema='{"type": "null"}')
        == of(json_schema={"type": "null"})
        == Grammar("json_schema", '{"type": ["null"]}')
    )
    assert of(json_object=True) == Grammar.json_object()
    assert of(regex="a+") == Grammar.regex("a+")
    assert of(choice=["a", "b"]) == Grammar.choice(("a", "b"))
    assert of(grammar=Grammar.lark('start: "a"')) == Grammar.lark('start: "a"')


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"grammar": 'start: "a"'}, "Grammar.lark"),
        ({"json_object": 1}, "json_object is 1"),
        ({"choice": "yes"}, "choice is 'yes'"),
        ({"choice": []}, "choice is"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"regex": 3}, "regular expression is 3"),
        ({"regex": "a", "stop": "b"}, "stop is .* beside a grammar"),
        ({"regexp": "a"}, "did you mean regex"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(options: dict, complaint: str) -> None:
    with pytest.raises(SamplingError, match=complaint):
        SamplingParams.from_options(options, {})


def test_a_publishers_stop_strings_are_for_free_texts() -> None:
    recommended = {"stop_strings": ["\n\n"], "eos_token_id": 7}
    params = SamplingParams.from_options({"regex": "a"}, recommended)
    assert params.stop == () and params.stop_token_ids == (7,)
    assert SamplingParams.from_options({}, recommended).stop == ("\n\n",)
