"""n-gram models: Kneser-Ney by arrays is Kneser-Ney by hand, and no count reaches over a document's end."""

import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from llamarium.train.config import ExperimentConfig
from llamarium.train.experiments.ngrams import NGramModel, conduct_ngrams
from llamarium.train.history import Curve, read_history
from llamarium.train.journal import read_journal
from llamarium.train.pretrain import prepare

pytestmark = pytest.mark.torch

Gram = tuple[int, ...]


class ByHand:
    """The definition, with dicts: interpolated Kneser-Ney of some documents."""

    def __init__(self, documents: list[list[int]], order: int, vocab_size: int) -> None:
        self.order, self.vocab_size = order, vocab_size
        self.counts: list[Counter[Gram]] = [Counter() for _ in range(order + 1)]
        before: defaultdict[Gram, set[int]] = defaultdict(set)
        for document in documents:
            for k in range(1, order + 1):
                for i in range(len(document) - k + 1):
                    gram = tuple(document[i : i + k])
                    self.counts[k][gram] += 1
                    before[gram[1:]].add(gram[0])
        for k in range(1, order):
            self.counts[k] = Counter({gram: max(1, len(before[gram])) for gram in self.counts[k]})

    def probability(self, context: Gram, token: int) -> float:
        shorter = self.probability(context[1:], token) if context else 1 / self.vocab_size
        counts = self.counts[len(context) + 1]
        here = {gram: count for gram, count in counts.items() if gram[:-1] == context}
        if not here:
            return shorter
        once, twice = (sum(count == n for count in counts.values()) + 1 for n in (1, 2))
        discount = once / (once + 2 * twice)
        found = here.get((*context, token), 0)
        return (max(found - discount, 0) + discount * len(here) * shorter) / sum(here.values())


def documents(lengths: list[int], vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(sum(lengths))
    return [(draw.integers(0, vocab_size, n) * draw.integers(0, 2, n)).tolist() for n in lengths]


@pytest.mark.parametrize(("lengths", "order"), [([60], 3), ([20, 1, 30, 2, 9], 4), ([40], 1), ([2, 2, 2], 5)])
def test_each_probability_is_the_definitions(lengths: list[int], order: int) -> None:
    vocab_size = 4
    texts = documents(lengths, vocab_size)
    stream, starts = np.array(sum(texts, [])), np.cumsum([0, *lengths[:-1]])  # noqa: RUF017
    model = NGramModel(stream, starts, order, vocab_size)
    by_hand = ByHand(texts, min(order, max(lengths)), vocab_size)
    ids = np.array([[0, 1, 3, 0, 0, 2, 3, 1]])
    contexts = model.contexts(ids, np.array([[0, 1, 2, 0, 1, 2, 3, 4]]))  # two segments
    p_TV = model.probabilities([context[0, :, None] for context in contexts], np.arange(vocab_size))
    for place, begin in enumerate([0, 0, 0, 3, 3, 3, 3, 3]):
        seen = tuple(ids[0, max(begin, place + 2 - by_hand.order) : place + 1]) if by_hand.order > 1 else ()
        while seen and not any(gram[:-1] == seen for gram in by_hand.counts[len(seen) + 1]):
            seen = seen[1:]
        expected = [by_hand.probability(seen, token) for token in range(vocab_size)]
        np.testing.assert_allclose(p_TV[place], expected, rtol=1e-12)
    np.testing.assert_allclose(p_TV.sum(-1), 1)


def test_it_is_measured_on_the_rows_of_the_llama_and_writes_a_runs_journal(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200 + "abcdefgh" * 20)
    sample = {"sample_tokens": 12, "sample_prompt": "the"}
    config = ExperimentConfig(data=str(tmp_path / "text.txt"), context=16, device="cpu", steps=7, **sample)
    setup = prepare(config, tmp_path / "run")
    shown: list[dict[str, object]] = []
    size, loss = conduct_ngrams(setup, config, 3, tmp_path / "run" / "3-gram", lambda event: shown.append(dict(event)))
    events = list(read_journal(tmp_path / "run" / "3-gram" / "metrics.jsonl"))
    assert [event["event"] for event in events] == ["start", "validation", "sample", "end"]
    assert [event["event"] for event in shown] == ["validation", "sample", "end"]
    assert events[0]["parameters"] == size > 20 and events[1]["loss"] == loss and events[1]["best"]
    assert [event["step"] for event in events] == [0] * 4 and len(events[2]["text"]) == 12
    level = Curve("validation", "loss", (0, 7), (loss, loss))
    assert read_history(tmp_path / "run" / "3-gram").curves == (level,)
    assert loss < math.log(setup.tokenizer.vocab_size) / 2
    unigram, _ = conduct_ngrams(setup, config, 1, tmp_path / "run" / "1-gram", lambda event: None)
    assert 1 < unigram <= setup.tokenizer.vocab_size
