"""JSON schemas of every kind that is held, for property tests; and a model that writes characters at random."""

import dataclasses
from typing import Any

import hypothesis.strategies as st

import llamarium
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.tokenizer.backends.characters import CharacterTokenizer

NAMES = ["a", "b", "ab", "", "a\n", 'a"', "a\\", "é", "\u0001", "x/y", "\x7f"]
CLOSING = '"]}'
BLANKS = " \n\r\t"


def random_llama() -> llamarium.Llama:
    """A model of random weights, whose tokens are characters."""
    tokenizer = CharacterTokenizer.from_text("".join(map(chr, range(32, 127))) + BLANKS + "é😀\u2028\x7f")
    config = dataclasses.replace(preset("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    config = dataclasses.replace(config, bos_token_id=None, eos_token_id=(), initializer_range=0.15)
    model = init_weights(LlamaForCausalLM(config), seed=1).eval().requires_grad_(False)
    return llamarium.Llama("random", model, tokenizer)


NUMBERS = st.one_of(
    st.integers(-1000, 1000), st.integers(-9999, 9999).map(lambda n: n / 100), st.sampled_from([0, 1e-7, 2**53, 1e12])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text('ab"\\é\n', max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)),
    max_leaves=4,
)
PATTERNS = ["a", "^[ab]+$", "[0-9]{2,3}$", r"^\d\w", "^.{2,4}$", r"^\S+$", "[^a-z]", "^(?:ab|c)*$", r"\.", r"[\]\[]"]


@st.composite
def strings(draw) -> dict[str, Any]:
    low = draw(st.integers(0, 3))
    said = {"minLength": low, "maxLength": low + draw(st.integers(0, 4)), "pattern": draw(st.sampled_from(PATTERNS))}
    kept = {key: value for key, value in said.items() if draw(st.booleans())}
    return {"type": "string"} | (kept or {"format": draw(st.sampled_from(["date", "ipv4", "uuid", "email"]))})


@st.composite
def numbers(draw) -> dict[str, Any]:
    low, high = sorted((draw(NUMBERS), draw(NUMBERS)))
    said = {draw(st.sampled_from(["minimum", "exclusiveMinimum"])): low}
    said[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high
    said["multipleOf"] = draw(st.sampled_from([2, 7]))
    kept = {key: value for key, value in said.items() if draw(st.booleans())}
    return {"type": draw(st.sampled_from(["number", "integer"]))} | kept


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    said = {
        "type": st.just("object"),
        "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "additionalProperties": st.one_of(st.just(False), st.just(False), inner),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", r"^\d+$", r"[é\n]"]), inner, max_size=1),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 3),
        "allOf": st.lists(inner, min_size=1, max_size=2),
    }
    return st.fixed_dictionaries({}, optional=said).flatmap(
        lambda found: st.permutations(list(found.items())).map(dict)  # llguidance reads keywords in their order
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    said = {"prefixItems": st.lists(inner, min_size=1, max_size=2), "items": st.one_of(st.just(False), inner)}
    return st.fixed_dictionaries(
        {"type": st.just("array"), "minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)}, optional=said
    )


LEAVES = st.one_of(
    st.sampled_from([True, {}, {"type": "null"}, {"type": ["boolean", "null"]}, {"$ref": "#/$defs/d"}]),
    strings(),
    numbers(),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": VALUES}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        *[st.fixed_dictionaries({key: st.lists(inner, min_size=1, max_size=3)}) for key in ("anyOf", "oneOf", "allOf")],
    ),
    max_leaves=6,
)


def bias(llama: llamarium.Llama) -> dict[int, float]:
    """Let strings, lists and objects end before long; the mask is what decides what may come."""
    ids = llama.tokenizer.encode
    return {ids(c)[0]: 3.0 for c in CLOSING} | {ids(c)[0]: -3.0 for c in BLANKS}
