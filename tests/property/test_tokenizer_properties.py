"""Any text survives, in one go and as a stream; explanations and stop strings hold for any input."""

from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.tokenizer.streaming import StopStringFilter

settings.register_profile(
    "tokenizer",
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PROFILE = settings.get_profile("tokenizer")

# Text that finds the borders of the rules: blanks, line ends, contractions, digits, signs, marks, control tokens.
_BITS = st.sampled_from(
    [
        *(" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x85", "\x1c", "\u2028", "\u0301", "\ufffd"),
        *("'s", "'LL", "'\u017f", "12345", "½", "٣", "!?", "ǅ", "ß", "a", "the", " The", "naïve", "日本語", "👩‍👩‍👧"),
        *("<|eot_id|>", "<|im_end|>", "<|"),
    ]
)
_TEXT = st.one_of(st.text(max_size=60), st.lists(st.one_of(_BITS, st.text(max_size=3)), max_size=25).map("".join))


@pytest.fixture(scope="module", params=["llama3", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, smollm2_path: Path, llama3_tokenizer_path: Path) -> Tokenizer:
    if request.param == "llama3":
        return load_tokenizer_file(llama3_tokenizer_path)
    return from_gguf_metadata(read_gguf(smollm2_path).metadata, smollm2_path.name)


def writable(tokenizer: Tokenizer, text: str) -> str:
    """Leave out the few bytes that SmolLM2's vocabulary lacks."""
    missing = set(getattr(tokenizer.backend, "_missing_bytes", b""))
    return "".join(c for c in text if missing.isdisjoint(c.encode()))


@PROFILE
@given(text=_TEXT)
def test_any_text_survives(tokenizer: Tokenizer, text: str):
    text = writable(tokenizer, text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert set(ids).isdisjoint(tokenizer.special_tokens.values())
    parsed = tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(parsed, skip_special_tokens=False).endswith(text)


@PROFILE
@given(text=_TEXT)
def test_the_readable_bpe_is_the_backend(tokenizer: Tokenizer, text: str):
    text = writable(tokenizer, text)
    twin = tokenizer.backend.byte_level_bpe()
    explanation = twin.explain(text)
    assert explanation.ids == tokenizer.backend.encode(text)
    assert "".join(piece.text for piece in explanation.pieces) == text
    assert b"".join(token.bytes for token in explanation.tokens) == text.encode()
    assert all(left.end == right.start for left, right in pairwise(explanation.tokens))
    for piece in explanation.pieces:
        assert len(piece.merges) in (0, len(piece.text.encode()) - len(piece.ids))


@PROFILE
@given(data=st.data())
def test_a_stream_is_the_text(tokenizer: Tokenizer, data: st.DataObject):
    """Any ids: valid text, cut characters, stray bytes, control tokens."""
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    stray = st.sampled_from([i for i in range(300) if len(tokenizer.token_bytes(i)) == 1])
    text_ids = _TEXT.map(lambda text: tokenizer.encode(writable(tokenizer, text)))
    control = st.sampled_from(sorted(tokenizer.special_tokens.values()))
    parts = st.lists(
        st.one_of(any_id.map(lambda i: [i]), stray.map(lambda i: [i]), control.map(lambda i: [i]), text_ids)
    )
    ids = list(chain.from_iterable(data.draw(parts)))
    for skip in (True, False):
        stream = tokenizer.stream(skip_special_tokens=skip)
        pieces = [stream.push(i) for i in ids]
        text = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join([*pieces, stream.finish()]) == text
        shown = ""
        for piece in pieces:
            shown += piece
            assert text.startswith(shown)


@PROFILE
@given(text=st.text(min_size=1))
def test_characters_survive(text: str):
    tokenizer = CharacterTokenizer.from_text(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(set(text))


@PROFILE
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_the_first_begins(pieces: list[str], stops: list[str]):
    found = StopStringFilter(stops)
    shown = "".join([*(found.push(piece) for piece in pieces), found.finish()])
    text = "".join(pieces)
    starts = [text.find(stop) for stop in stops if stop in text]
    assert shown == (text[: min(starts)] if starts else text)
    assert found.stopped == bool(starts)


@PROFILE
@given(st.lists(st.text(alphabet="ab", max_size=3), max_size=20), st.text(alphabet="ab", min_size=1, max_size=4))
def test_text_is_held_back_no_longer_than_it_must_be(pieces: list[str], stop: str):
    found = StopStringFilter([stop])
    shown = seen = ""
    for piece in pieces:
        shown += found.push(piece)
        seen += piece
        if found.stopped:
            break
        held = seen[len(shown) :]
        assert stop.startswith(held) and held != stop
