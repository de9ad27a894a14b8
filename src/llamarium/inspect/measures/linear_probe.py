"""Linear probes: can a property of a token be read from its stream by one linear map, and after which layer?

A probe is fitted on the streams of some examples and tested on others, whose words it has not seen. An accuracy near
chance means that no linear map was found; a high one that the property can be read there, not that the model uses it.

Streams are standardised by the mean and deviation of the training half. The probe is ridge regression onto the classes,
solved in its dual form, whose time grows with the examples and little with the columns.

Source: Alain & Bengio 2016, "Understanding intermediate layers using linear classifier probes".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError, LlamariumError
from llamarium.inspect.forward import Memory
from llamarium.inspect.numbers import Floats, JsonView
from llamarium.inspect.shapes import check_finite
from llamarium.inspect.tokens import check_count, check_ids
from llamarium.runtime.batch import BLOCK_SIZE, Span, blocks_for, pack
from llamarium.runtime.runner import Runner
from llamarium.runtime.taps import Key, Taps

_TOKENS = 256  # of a batch: bounds the streams that are held at once

MAX_EXAMPLES = 1024
"""Of one probe: its time grows with their third power."""


class Example(NamedTuple):
    """A prompt, whose last token's stream is read; what is to be read; and its group.

    A group is trained on or tested on as a whole: give the examples of one word the same.
    """

    prompt_ids: Sequence[int]
    label: str
    group: str


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """The probe of one layer.

    Attributes:
        layer: The stream after this layer; None is the embedding row.
        accuracy: Share of the held-out examples whose label is found, the mean over the splits.
        deviation: The standard deviation of that over the splits.
    """

    layer: int | None
    accuracy: float
    deviation: float


@dataclass(frozen=True, slots=True)
class LinearProbe(JsonView):
    """Probes of all layers.

    Attributes:
        labels: The labels, sorted.
        num_splits: How many different halves were tested on.
        chance: The share of the most frequent label.
    """

    labels: tuple[str, ...]
    num_examples: int
    num_splits: int
    chance: float
    layers: tuple[ProbedLayer, ...]


def linear_probe(
    runner: Runner,
    examples: Sequence[Example],
    *,
    ridge: float = 1.0,
    num_splits: int = 5,
    seed: int = 0,
    check_wanted: Callable[[], object] | None = None,
) -> LinearProbe:
    """Fit and test a probe of each layer; see `Inspector.probe`.

    `check_wanted` is called before each batch of prompts; an exception of it ends the work.

    Raises:
        InputError: If there are fewer than two labels or groups, or too many examples, or a number is out of range.
        ContextLengthError: If a prompt is longer than the context.
        LlamariumError: If the streams are not finite.
    """
    labels, label_E = _numbered([example.label for example in examples], "labels")
    groups, group_E = _numbered([example.group for example in examples], "groups")
    check_count(len(examples), "the number of examples", MAX_EXAMPLES)
    check_count(num_splits, "num_splits", 100)
    check_finite("ridge", ridge, is_positive=True)
    streams_LED = np.concatenate(list(_streams(runner, examples, check_wanted)), axis=1)
    if not np.isfinite(streams_LED).all():
        raise LlamariumError("the model's streams are not finite, so nothing can be read from them")
    tests_SE = [np.isin(group_E, test_groups) for test_groups in _halves(len(groups), num_splits, seed)]
    probed = list[ProbedLayer]()
    for place, x_ED in enumerate(streams_LED):
        accuracies = [_accuracy(x_ED, label_E, test_E, ridge) for test_E in tests_SE]
        layer = None if place == 0 else place - 1
        probed.append(ProbedLayer(layer, float(np.mean(accuracies)), float(np.std(accuracies))))
    chance = float(np.bincount(label_E).max() / len(label_E))
    return LinearProbe(labels, len(examples), len(tests_SE), chance, tuple(probed))


def _numbered(values: Sequence[str], subject: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    names = tuple(sorted(set(values)))
    if len(names) < 2:
        raise InputError(f"the examples have {len(names)} {subject}; expected two or more")
    return names, np.array([names.index(value) for value in values])


def _halves(num_groups: int, num_splits: int, seed: int) -> list[tuple[int, ...]]:
    """Return the groups that are tested on in each split, no two alike; all there are where these are fewer."""
    size = num_groups // 2
    if comb(num_groups, size) <= num_splits:
        return list(combinations(range(num_groups), size))
    rng, halves = np.random.default_rng(seed), dict[tuple[int, ...], None]()  # a set that keeps its order
    while len(halves) < num_splits:
        halves[tuple(sorted(rng.permutation(num_groups)[:size].tolist()))] = None
    return list(halves)


def _streams(
    runner: Runner, examples: Sequence[Example], check_wanted: Callable[[], object] | None
) -> Iterator[Floats]:
    """Yield the streams of some examples' last tokens, side by side: (L + 1, C, D), from the embedding on."""
    c = runner.config
    keys: list[Key] = [("embed", None), *(("resid", layer) for layer in range(c.num_hidden_layers))]
    waiting = _texts([check_ids(c, example.prompt_ids) for example in examples])
    while waiting:
        if check_wanted:
            check_wanted()
        count = max(1, int((np.cumsum([len(ids) for ids, _ in waiting]) <= _TOKENS).sum()))
        texts, waiting = waiting[:count], waiting[count:]
        memory = Memory(runner, sum(blocks_for(len(ids)) for ids, _ in texts) * BLOCK_SIZE)
        spans = [Span(ids, 0, memory.begin(ids, len(ids)).table.blocks, num_logits=0) for ids, _ in texts]
        taps = Taps(keys)
        runner.run(pack(spans), memory.cache, taps)
        starts = np.cumsum([0, *(len(ids) for ids, _ in texts)])
        rows_C = np.concatenate([start + np.array(ends) for start, (_, ends) in zip(starts, texts, strict=False)])
        yield np.stack([np.concatenate(taps.kept[key])[rows_C] for key in keys])


def _texts(prompts: Sequence[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return the texts to run, and which tokens of each are read.

    A prompt that begins with the one before it is that text, gone on.
    """
    texts = list[tuple[list[int], list[int]]]()
    for ids in prompts:
        ends = texts.pop()[1] if texts and ids[: len(texts[-1][0])] == texts[-1][0] else []
        texts.append((ids, [*ends, len(ids) - 1]))
    return texts


def _accuracy(x_ED: Floats, label_E: NDArray[np.int64], test_E: NDArray[np.bool_], ridge: float) -> float:
    """Fit on the examples that are not tested, and return the share of the others whose label is found."""
    train_E = ~test_E
    x_ED = (x_ED - x_ED[train_E].mean(0)) / (x_ED[train_E].std(0) + 1e-6)
    target_EC = np.eye(label_E.max() + 1, dtype=np.float32)[label_E]
    bias_C = target_EC[train_E].mean(0)
    gram_EE = x_ED @ x_ED[train_E].T / x_ED.shape[1]  # the mean over the columns, so that ridge has no scale
    penalty = ridge * np.eye(int(train_E.sum()), dtype=np.float32)
    dual_EC = np.linalg.solve(gram_EE[train_E] + penalty, target_EC[train_E] - bias_C)
    found_E = (gram_EE[test_E] @ dual_EC + bias_C).argmax(1)
    return float((found_E == label_E[test_E]).mean())
