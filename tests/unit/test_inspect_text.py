"""Scores, the auto-regressive loop and embedding neighbours, on a tiny model and small vocabularies."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from llamarium.config import EMBEDDING
from llamarium.errors import AnswerError, ContextLengthError, InputError, TokenizerError
from llamarium.inspect import forward
from llamarium.inspect.lens import lens
from llamarium.inspect.neighbors import neighbors, similarity
from llamarium.inspect.next_tokens import NextStep, follow_next_tokens
from llamarium.inspect.score import Score, TokenScore, score, score_text
from llamarium.inspect.trace import trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.ggml.linear import EmbeddingGGML
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.native.weights import Weight
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.special import SpecialTokens
from native_models import weights_of
from reference_tiles import pack_ggml, quantize

pytestmark = pytest.mark.torch

ALPHABET = "abcdefghij klmnop.\n"
CONFIG = replace(preset("tiny"), vocab_size=len(ALPHABET), initializer_range=0.2, max_position_embeddings=32)


class Words:
    """A backend whose tokens are given strings, the longest match first."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            word = max((w for w in self.words if text.startswith(w)), key=len)
            ids.append(self.words.index(word))
            text = text[len(word) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes | None:
        return self.words[token_id].encode()

    def byte_level_bpe(self) -> Any:
        raise NotImplementedError

    def save(self, folder: Any, tokenizer: Tokenizer) -> None:
        raise NotImplementedError


def word_tokenizer(words: list[str], special: SpecialTokens | None = None) -> Tokenizer:
    return Tokenizer(Words(words), special or SpecialTokens(), vocab_size=len(words), source="words")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return CharacterTokenizer.from_text(ALPHABET)


def next_tokens(*args: Any, **options: Any) -> list[NextStep]:
    return list(follow_next_tokens(*args, **options))


def test_score_is_the_log_softmax_of_what_came_next(model: LlamaForCausalLM) -> None:
    ids = [3, 1, 4, 1, 5]
    found = score(ModuleRunner(model), ids)
    logprobs = model(torch.tensor([ids]))[0].log_softmax(-1)
    assert [t.token_id for t in found.tokens] == ids
    assert found.logprobs[0] is None and found.tokens[0].rank is None
    for i in range(1, 5):
        assert found.logprobs[i] == pytest.approx(float(logprobs[i - 1, ids[i]]), rel=1e-5)
        assert found.tokens[i].rank == logprobs[i - 1].argsort(descending=True).tolist().index(ids[i]) + 1
    total = sum(float(logprobs[i - 1, ids[i]]) for i in range(1, 5))
    assert found.total_logprob == pytest.approx(total, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-total / 4), rel=1e-5)


def test_the_chain_holds_for_every_next_token(model: LlamaForCausalLM) -> None:
    """P(w_n | w_<n) over all w_n is a distribution, so scores of all continuations add up to that of the prefix."""
    prefix = [2, 7, 7]
    every = [score(ModuleRunner(model), [*prefix, last]).total_logprob for last in range(CONFIG.vocab_size)]
    assert math.log(sum(map(math.exp, every))) == pytest.approx(
        score(ModuleRunner(model), prefix).total_logprob, rel=1e-5
    )


def test_a_long_text_never_holds_all_logits(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [i % 19 for i in range(32)]
    whole = score(ModuleRunner(model), ids)
    monkeypatch.setattr(forward, "CHUNK_BYTES", 5 * 4 * CONFIG.vocab_size)
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _, args, out: rows.append(out.shape[0]))
    try:
        parts = score(ModuleRunner(model), ids)
    finally:
        handle.remove()
    assert rows == [5, 5, 5, 5, 5, 5, 1]
    assert [t.rank for t in parts.tokens] == [t.rank for t in whole.tokens]
    assert parts.logprobs[1:] == pytest.approx(whole.logprobs[1:], rel=1e-5)


def test_a_single_token_has_no_probability(model: LlamaForCausalLM) -> None:
    found = score(ModuleRunner(model), [5])
    assert (found.logprobs, found.total_logprob, found.perplexity) == ((None,), 0.0, None)


def test_a_model_whose_logits_are_not_finite_predicts_nothing(tokenizer: Tokenizer) -> None:
    model = init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)
    model.model.layers[1].mlp.down_proj.get_parameter("weight").fill_(math.nan)
    runner = ModuleRunner(model)
    seen = trace(runner, [1, 2], names=["resid"])
    assert len(lens(runner, seen.select(layers=[0])).layers) == 1  # what comes before is as it is
    followed = follow_next_tokens(runner, tokenizer, "ab")
    for ask in (lambda: next(followed), lambda: score(runner, [1, 2]), lambda: lens(runner, seen)):
        with pytest.raises(AnswerError, match="logits are not finite"):
            ask()


def test_a_perplexity_beyond_float64_is_infinite_and_of_nan_is_nan() -> None:
    first = TokenScore(1, None, None)
    assert Score((first, TokenScore(2, -1e5, 3))).perplexity == math.inf
    assert math.isnan(Score((first, TokenScore(2, math.nan, 3))).perplexity or 0)


def test_score_text_names_its_tokens_and_puts_bos_first_once(model: LlamaForCausalLM) -> None:
    special = SpecialTokens(ids={"<s>": 0}, bos=0, add_bos=True)
    found = score_text(ModuleRunner(model), word_tokenizer(["<s>", *ALPHABET.strip()], special), "cab")
    assert [t.text for t in found.tokens] == ["<s>", "c", "a", "b"]
    assert [t.logprob is None for t in found.tokens] == [True, False, False, False]
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["tokens"][0] == {"token_id": 0, "text": "<s>", "logprob": None, "rank": None}
    assert data["perplexity"] == found.perplexity and data["total_logprob"] == found.total_logprob


def test_score_refuses(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="at least one"):
        score_text(ModuleRunner(model), tokenizer, "")
    with pytest.raises(ContextLengthError, match="33 tokens; the model's context holds 32"):
        score(ModuleRunner(model), [0] * 33)
    with pytest.raises(InputError, match="span"):
        score(ModuleRunner(model), [19])


def test_next_tokens_is_the_greedy_loop(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    text = "bad cab"
    shown = next_tokens(ModuleRunner(model), tokenizer, text, k=4, steps=6)
    ids = tokenizer.encode(text)
    assert [s.step for s in shown] == [1, 2, 3, 4, 5, 6]
    for step in shown:
        logprobs = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        assert step.context_ids == tuple(ids) and step.context == tokenizer.decode(ids)
        assert [c.token_id for c in step.candidates] == logprobs.topk(4).indices.tolist()
        for c in step.candidates:
            assert c.logprob == pytest.approx(float(logprobs[c.token_id]), abs=1e-5)
            assert c.probability == pytest.approx(math.exp(c.logprob), rel=1e-6)
            assert c.text == tokenizer.token_text(c.token_id)
        assert step.chosen == step.candidates[0]
        ids.append(step.chosen.token_id)
    assert len({s.chosen.token_id for s in shown}) > 1
    assert json.loads(json.dumps(shown[1].to_dict()))["chosen"]["token_id"] == shown[1].chosen.token_id


def test_next_tokens_ends_with_an_end_of_text_token(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    free = next_tokens(ModuleRunner(model), tokenizer, "bad", steps=4)
    chosen = [s.chosen.token_id for s in free]
    ending = replace(tokenizer.special, eos=(chosen[1],))
    stopping = Tokenizer(tokenizer.backend, ending, vocab_size=tokenizer.vocab_size, source="x")
    expected = chosen[: chosen.index(chosen[1]) + 1]
    assert [s.chosen.token_id for s in next_tokens(ModuleRunner(model), stopping, "bad", steps=4)] == expected
    assert len(expected) < 4


def test_next_tokens_uses_the_context_to_its_end(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    assert len(next_tokens(ModuleRunner(model), tokenizer, "a" * 30, k=1, steps=3)) == 3
    with pytest.raises(
        ContextLengthError, match="31 tokens and 3 steps need 33 positions; the model's context holds 32"
    ):
        next_tokens(ModuleRunner(model), tokenizer, "a" * 31, k=1, steps=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 20}, r"k is 20; expected .* 1\.\.19"),
        ({"steps": 0}, "steps is 0"),
        ({"k": True}, "k is True"),
    ],
)
def test_next_tokens_refuses(
    model: LlamaForCausalLM, tokenizer: Tokenizer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        next_tokens(ModuleRunner(model), tokenizer, "a", **options)


WORDS = [" king", " man", " woman", " queen", "king", " apple", "a", "b", "c", " ", *"egiklmnopquw0123456789"]


def rows_of(table: torch.nn.Module) -> Any:
    """What returns a table's rows, as `neighbors` takes it."""
    return lambda ids: table(torch.from_numpy(ids)).float().numpy()


def embedding() -> torch.nn.Embedding:
    """Royalty is the first axis, sex the second, fruit the third; rows of different lengths."""
    royal, male, female, fruit = torch.eye(4)
    rows = [
        royal + male, male, royal * 0.1 + female, royal + female, royal + male * 0.9, fruit,
        fruit - royal, fruit + male, -royal, torch.zeros(4),
    ]  # fmt: skip
    rows += torch.randn(len(WORDS) - len(rows), 4, generator=torch.Generator().manual_seed(1)) * 0.1 - royal - female
    lengths = torch.linspace(0.5, 3, len(rows)).unsqueeze(1)
    return torch.nn.Embedding.from_pretrained(torch.stack(rows) * lengths)


def test_king_minus_man_plus_woman_is_queen() -> None:
    found = neighbors(rows_of(embedding()), word_tokenizer(WORDS), "king", minus=["man"], plus=["woman"], k=3)
    assert [(w.sign, w.word, w.text) for w in found.query] == [
        ("+", "king", " king"), ("-", "man", " man"), ("+", "woman", " woman")
    ]  # fmt: skip
    assert found.neighbors[0].text == " queen"
    used = {" king", "king", " man", " woman"}
    assert not used & {n.text for n in found.neighbors}
    assert json.loads(json.dumps(found.to_dict()))["neighbors"][0]["text"] == " queen"


def test_the_ranking_is_by_cosine() -> None:
    table = embedding()
    found = neighbors(rows_of(table), word_tokenizer(WORDS), "queen", k=len(WORDS) - 1)
    vector = table.weight[WORDS.index(" queen")]
    cosines = torch.nn.functional.cosine_similarity(table.weight, vector.unsqueeze(0))
    assert [n.cosine for n in found.neighbors] == sorted((n.cosine for n in found.neighbors), reverse=True)
    for n in found.neighbors:
        assert n.cosine == pytest.approx(float(cosines[n.token_id]), abs=1e-6)
    assert {n.token_id for n in found.neighbors} == set(range(len(WORDS))) - {3}


def test_a_row_is_named_by_its_id_too() -> None:
    tokenizer = word_tokenizer(WORDS)
    by_word = neighbors(rows_of(embedding()), tokenizer, " king", minus=[" man"], k=3)
    king, man = (word.token_id for word in by_word.query)
    by_id = neighbors(rows_of(embedding()), tokenizer, king, minus=[man], k=3)
    assert (by_id.query, by_id.neighbors) == (by_word.query, by_word.neighbors)
    with pytest.raises(InputError, match="the word is empty"):
        neighbors(rows_of(embedding()), tokenizer, "")
    for token_id in (-1, tokenizer.vocab_size, True):
        with pytest.raises(InputError, match=f"the token is {token_id}; expected an id within 0"):
            neighbors(rows_of(embedding()), tokenizer, token_id)


def test_rows_are_added_as_they_stand_in_the_table() -> None:
    """ " apple" has more than the length of " king": rows that were scaled first would have another sum."""
    table = embedding()
    expected = torch.nn.functional.cosine_similarity(table.weight, (table.weight[0] - table.weight[5]).unsqueeze(0))
    found = neighbors(rows_of(table), word_tokenizer(WORDS), "king", minus=["apple"], k=3)
    for n in found.neighbors:
        assert n.cosine == pytest.approx(float(expected[n.token_id]), abs=1e-6)


def test_the_nearest_rows_of_a_packed_table_are_ranked_as_their_numbers_are() -> None:
    """They are searched for by another product than of the rounded rows: those that differ less must stand in order."""
    generator = torch.Generator().manual_seed(5)
    near_ties = torch.randn(64, generator=generator) + 0.02 * torch.randn(len(WORDS), 64, generator=generator)
    config = replace(CONFIG, vocab_size=len(WORDS), hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    weights = weights_of(LlamaForCausalLM(config))
    for numbers in (near_ties, near_ties * torch.linspace(-3, 3, len(WORDS)).unsqueeze(1)):
        packed = pack_ggml(quantize(numbers, "Q8_0"), "Q8_0")
        table = Weight(EMBEDDING, "Q8_0", (len(WORDS), 64), packed.weight.numpy())
        runner = NativeRunner(config, {**weights, EMBEDDING: table})
        plain = rows_of(torch.nn.Embedding.from_pretrained(packed.dequantize()))
        for token_id in range(len(WORDS)):
            found, expected = (neighbors(t, word_tokenizer(WORDS), token_id, k=3).neighbors for t in (runner, plain))
            assert [n.token_id for n in found] == [n.token_id for n in expected]
            assert [n.cosine for n in found] == pytest.approx([n.cosine for n in expected], abs=1e-6)


def test_the_cosine_of_two_words() -> None:
    table = embedding()
    found = similarity(rows_of(table), word_tokenizer(WORDS), "king", " queen")
    rows = table.weight[WORDS.index(" king")], table.weight[WORDS.index(" queen")]
    assert found.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(*rows, dim=0)), abs=1e-6)
    assert (found.word.text, found.other.text) == (" king", " queen")
    assert similarity(rows_of(table), word_tokenizer(WORDS), "man", "man").cosine == pytest.approx(1, abs=1e-6)
    with pytest.raises(InputError, match="'abc' is no single token"):
        similarity(rows_of(table), word_tokenizer(WORDS), "king", "abc")


def test_a_word_falls_back_to_its_spelling_without_a_space() -> None:
    assert neighbors(rows_of(embedding()), word_tokenizer(WORDS), "a", k=1).query[0].text == "a"
    assert neighbors(rows_of(embedding()), word_tokenizer(WORDS), " apple", k=1).query[0].text == " apple"


def test_a_word_of_several_tokens_is_refused_with_its_pieces() -> None:
    expected = r"'abc' is no single token of this vocabulary: ' ' \+ 'a' \+ 'b' \+ 'c'"
    with pytest.raises(InputError, match=expected):
        neighbors(rows_of(embedding()), word_tokenizer(WORDS), "king", plus=["abc"])
    with pytest.raises(InputError, match=r"k is 31; expected .* 1\.\.30"):
        neighbors(rows_of(embedding()), word_tokenizer(WORDS), "king", k=31)  # " king" and "king" are left out
    with pytest.raises(TokenizerError, match="surrogate"):
        neighbors(rows_of(embedding()), word_tokenizer(WORDS), "\ud800")


def test_packed_rows_and_a_padded_table_work() -> None:
    words = [*(f" w{i}" for i in range(28)), " ", "w", *"0123456789"]
    table = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))  # eight rows more than the vocabulary
    packed = EmbeddingGGML(quantize(table, "Q8_0"), "Q8_0")
    plain = torch.nn.Embedding.from_pretrained(dequantize(packed.weight, "Q8_0"))
    tokenizer = word_tokenizer(words)
    found = neighbors(rows_of(packed), tokenizer, "w3", plus=["w9"], k=38)
    assert found == neighbors(rows_of(plain), tokenizer, "w3", plus=["w9"], k=38)
    assert {n.token_id for n in found.neighbors} == set(range(40)) - {3, 9}
