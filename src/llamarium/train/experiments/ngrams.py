"""n-gram models: predict the next token from the n - 1 tokens before it, by counting.

They preceded neural language models, and are the baseline for a Llama. The probability of a token is its discounted
count after the n - 1 previous tokens; the discounted mass is distributed according to the model of order n - 1, and so
on down to the uniform distribution. Models of lower order count not how often a token occurs, but after how many
different tokens: "Francisco" is frequent, but nearly always follows the same word. This is interpolated Kneser-Ney
smoothing with one discount per order.

Source: Kneser and Ney 1995; Chen and Goodman 1999, "An empirical study of smoothing techniques", section 2.7.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import LlamariumError
from llamarium.train.conduct import save_settings
from llamarium.train.config import ExperimentConfig
from llamarium.train.data.batch import IGNORED
from llamarium.train.data.packing import PackedRows
from llamarium.train.journal import Emit, Event, Journal
from llamarium.train.setup import Setup
from llamarium.train.step import measured_rows

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """The k-grams of a text: each is a context, which is a (k-1)-gram, and a token.

    Attributes:
        keys: context * V + token, ascending. The index of a k-gram is its id, which is a context of the next level.
        counts: Count of each k-gram; below order n, the number of different tokens before it.
        totals: Sum of the counts of each context's k-grams.
        num_continuations: Number of different tokens after each context.
        discount: Discount of each count, above 0 and below 1.
    """

    keys: _Ints
    counts: _Ints
    totals: _Ints
    num_continuations: _Ints
    discount: float

    def find(self, keys: _Ints) -> _Ints:
        """Return the ids of k-grams, -1 for those that do not occur."""
        places = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[places] == keys, places, -1)


class NGramModel:
    """An n-gram model of a stream of token ids; n-grams do not cross documents."""

    def __init__(self, ids_S: _Ints, starts: _Ints, order: int, vocab_size: int) -> None:
        """Count the n-grams of a stream; `starts` are the starts of its documents, `order` is n."""
        self.order, self.vocab_size = order, vocab_size
        places = np.arange(len(ids_S))
        within_S = places - starts[np.searchsorted(starts, places, side="right") - 1]
        firsts: list[_Ints] = []
        grams: list[_Ints] = [np.zeros(len(ids_S), np.int64)]  # the id of the gram that ends at each place
        tables: list[tuple[_Ints, _Ints]] = []
        for k in range(1, order + 1):
            here = np.flatnonzero(within_S >= k - 1)
            if not len(here):
                break  # no document is that long
            contexts = grams[-1][here - 1] if k > 1 else grams[0][here]
            keys, first, ids, counts = np.unique(contexts * vocab_size + ids_S[here], True, True, True)
            grams.append(np.full(len(ids_S), -1))
            grams[-1][here] = ids
            firsts.append(here[first])
            tables.append((keys, counts))
        for k in range(len(tables) - 1):  # different tokens before each gram; at least 1, as it may begin a document
            before = np.bincount(grams[k + 1][firsts[k + 1]], minlength=len(tables[k][0]))
            tables[k] = tables[k][0], before.clip(min=1)
        sizes = [1, *(len(keys) for keys, _ in tables)]
        self.levels = [self._level(*pair, size) for pair, size in zip(tables, sizes, strict=False)]

    def _level(self, keys: _Ints, counts: _Ints, num_contexts: int) -> _Level:
        contexts = keys // self.vocab_size
        num_continuations = np.bincount(contexts, minlength=num_contexts)
        totals = np.bincount(contexts, counts, num_contexts).astype(np.int64)
        once, twice = ((counts == n).sum() + 1 for n in (1, 2))  # + 1 keeps the discount within 0 and 1
        return _Level(keys, counts, totals, num_continuations, float(once / (once + 2 * twice)))

    @property
    def num_counts(self) -> int:
        """Number of counts, the model's parameters."""
        return sum(len(level.keys) for level in self.levels)

    def contexts(self, ids_BT: _Ints, positions_BT: _Ints) -> list[_Ints]:
        """Return, for k = 0 to n - 1, the id of the k-gram that ends at each position, -1 if it is unknown."""
        hashes = [np.zeros_like(ids_BT)]
        for k, level in enumerate(self.levels[:-1], start=1):
            before = hashes[-1] if k == 1 else np.pad(hashes[-1], ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
            has_context = (before >= 0) & (positions_BT >= k - 1)
            hashes.append(np.where(has_context, level.find(before * self.vocab_size + ids_BT), -1))
        return hashes

    def probabilities(self, contexts: Sequence[_Ints], next_ids: _Ints) -> _Floats:
        """Return the probability of each next token; the arrays have the same shape or broadcast."""
        p = np.full(np.broadcast(contexts[0], next_ids).shape, 1 / self.vocab_size)
        for context, level in zip(contexts, self.levels, strict=True):
            totals = np.where(context >= 0, level.totals[context], 0)  # 0: nothing ever followed this context
            gram = level.find(context * self.vocab_size + next_ids)
            counts = np.where(gram >= 0, level.counts[gram] - level.discount, 0.0)
            spread = level.discount * level.num_continuations[context] * p
            p = np.where(totals > 0, (counts + spread) / totals.clip(min=1), p)
        return p

    def loss(self, rows: PackedRows, max_rows: int) -> float:
        """Return the mean of -log P in nats over the rows on which the Llamas are validated."""
        nats, count = 0.0, 0
        for row in measured_rows(rows, max_rows):
            batch = rows.batch(0, [row])
            labels = batch.labels_BT.numpy()
            learned = labels != IGNORED
            contexts = self.contexts(batch.ids_BT.numpy(), batch.positions_BT.numpy())
            nats -= float(np.log(self.probabilities(contexts, np.where(learned, labels, 0)))[learned].sum())
            count += int(learned.sum())
        return nats / max(count, 1)

    def continue_text(self, ids: Sequence[int], num_tokens: int, seed: int) -> Iterator[int]:
        """Sample `num_tokens` tokens, and yield each."""
        generator, written = np.random.default_rng(seed), list(ids)
        for _ in range(num_tokens):
            last = np.array([written[-self.order :] or [0]])
            positions = np.arange(last.shape[1])[None]
            ends = [context[0, -1:] for context in self.contexts(last, positions)]
            p_V = self.probabilities(ends, np.arange(self.vocab_size))
            written.append(int(generator.choice(self.vocab_size, p=p_V / p_V.sum())))
            yield written[-1]


def conduct_ngrams(setup: Setup, config: ExperimentConfig, order: int, out: Path, show: Emit) -> tuple[int, float]:
    """Count an n-gram model, write the journal of its run, and return its number of counts and its validation loss.

    The run ends at step 0 and is marked by `is_counted` in the journal; the page plots its loss as a horizontal line.
    The rows of `setup` must be `PackedRows`, with validation.
    """
    train, validation = setup.train, setup.validation
    assert isinstance(train, PackedRows) and isinstance(validation, PackedRows)
    ids, starts = train.corpus.ids.numpy().astype(np.int64), train.corpus.starts.numpy()
    model = NGramModel(ids, starts, order, setup.tokenizer.vocab_size)
    loss = model.loss(validation, config.eval_rows)
    out.mkdir(parents=True, exist_ok=True)
    save_settings(config, out / "train.toml")
    about = {"settings": asdict(config), "parameters": model.num_counts, "trainable": model.num_counts}
    journal = Journal(out)
    journal({"event": "start", "step": 0, **about, "device": "cpu", "is_counted": True})
    events: list[Event] = [{"event": "validation", "step": 0, "loss": loss, "best": True}]
    if config.sample_steps:
        sample = _sample(model, setup, config)
        events.append({"event": "sample", "step": 0, "prompt": config.sample_prompt, **sample})
    for event in (*events, {"event": "end", "step": 0, "signal": None}):
        journal(event)
        show(event)
    return model.num_counts, loss


def _sample(model: NGramModel, setup: Setup, config: ExperimentConfig) -> Mapping[str, Any]:
    try:
        prompt = setup.tokenizer.encode(config.sample_prompt)
    except LlamariumError as error:  # e.g. a prompt that the tokenizer cannot encode
        return {"error": str(error)}
    decoder = setup.tokenizer.stream(continuation=True)
    written = model.continue_text(prompt, config.sample_tokens, config.seed)
    return {"text": "".join([decoder.push(i) for i in written]) + decoder.finish()}
