"""Random answers of a grammar, without a model: at each step any allowed character may come, closing ones oftener."""

import random
from collections.abc import Iterator

import numpy as np

from llamarium.sampling.grammar.compiler import Compiled, GrammarCompiler
from llamarium.tokenizer.backends.characters import CharacterTokenizer

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n\r\té😀\u2028"
CLOSING = '"]}'
BLANKS = " \n\r\t"


def character_compiler() -> GrammarCompiler:
    """Return a compiler whose tokens are characters, and one id more that ends an answer."""
    tokenizer = CharacterTokenizer.from_text(CHARACTERS)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 1)


def finished_answers(compiler: GrammarCompiler, compiled: Compiled, count: int, seed: int = 0) -> Iterator[str]:
    """Yield what `count` random walks of up to 2,000 characters end with; those that do not end are left out."""
    for i in range(count):
        if (text := _walk(compiler, compiled, random.Random(seed * 100_003 + i))) is not None:
            yield text


def _walk(compiler: GrammarCompiler, compiled: Compiled, choices: random.Random) -> str | None:
    end = compiler.vocab_size - 1
    constraint = compiled.begin([end])
    text = b""
    closing = choices.choice((1.0, 6.0, 60.0))
    for length in range(2000):
        mask = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        assert allowed, "a grammar that was begun can go on"
        weights = [_weight(compiler, token_id, closing * (1 + length / 100)) for token_id in allowed]
        token_id = choices.choices(allowed, weights)[0]
        constraint.accept(token_id)
        text += b"" if token_id == end else compiler._tokens[token_id]
        if constraint.is_finished:
            return text.decode()
    return None


def _weight(compiler: GrammarCompiler, token_id: int, closing: float) -> float:
    character = compiler._tokens[token_id].decode() if token_id < compiler.vocab_size - 1 else CLOSING[0]
    return closing if character in CLOSING else 0.05 if character in BLANKS else 1.0
