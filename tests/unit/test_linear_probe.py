"""Linear probes of the stream, and surprise behind a wrong token: against other ways to the same numbers."""

import numpy as np
import pytest

import llamarium
from llamarium.errors import InputError, OptionError
from llamarium.inspect.measures import after_error
from llamarium.inspect.measures.linear_probe import Example, _accuracy, _halves, _streams, linear_probe
from llamarium.inspect.measures.probe_tasks import examples_of
from llamarium.inspect.score import score


@pytest.fixture(scope="module")
def letters() -> llamarium.Llama:
    return llamarium.load("shakespeare-char", dtype="float32")


def test_streams_are_those_of_a_trace(letters: llamarium.Llama) -> None:
    """Whatever company a prompt has in its batch."""
    prompts = [
        letters.encode(text)
        for text in ("O Romeo", "To be", "To be, or not to be", "To be, or not to be", "a", "ab", "b")
    ]
    streams_LED = np.concatenate(
        list(_streams(letters.runner, [Example(ids, "", "") for ids in prompts], None)), axis=1
    )
    for at, ids in enumerate(prompts):
        seen = letters.trace(ids, names=["embed", "resid"], positions=[-1]).arrays
        np.testing.assert_array_equal(streams_LED[0, at], seen["embed", None][0])
        for layer in range(6):
            np.testing.assert_array_equal(streams_LED[layer + 1, at], seen["resid", layer][0])


@pytest.mark.parametrize("ridge", [0.1, 1.0])
def test_a_probe_is_ridge_regression(ridge: float) -> None:
    """The primal form, with the bias as the training labels' mean, finds the same labels."""
    rng = np.random.default_rng(0)
    x_ED, label_E, test_E = rng.normal(size=(90, 40)), rng.integers(3, size=90), rng.random(90) < 0.5
    x_ED[:, 7:14] += 1.2 * label_E[:, None] * np.sign(rng.normal(size=7))
    train_E = ~test_E
    scaled_ED = (x_ED - x_ED[train_E].mean(0)) / x_ED[train_E].std(0)
    target_EC = np.eye(3)[label_E]
    mean_C = target_EC[train_E].mean(0)
    a = np.concatenate([scaled_ED[train_E], np.sqrt(ridge * 40) * np.eye(40)])
    map_DC = np.linalg.lstsq(a, np.concatenate([target_EC[train_E] - mean_C, np.zeros((40, 3))]), rcond=None)[0]
    right = ((scaled_ED[test_E] @ map_DC + mean_C).argmax(1) == label_E[test_E]).mean()
    assert _accuracy(x_ED.astype(np.float32), label_E, test_E, ridge) == pytest.approx(right)
    assert 0.4 < right < 1


def test_a_group_is_not_tested_on_what_it_was_fitted_on(letters: llamarium.Llama) -> None:
    """Letters with labels at random: known by heart they would all be right, and unseen ones are not."""
    rng = np.random.default_rng(1)
    words = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    label_of = dict(zip(words, rng.permutation(["x", "y"] * 20), strict=True))
    examples = [(word, label_of[word], word) for word in words for _ in range(3)]
    together = letters.inspect.probe(examples).layers[0]
    apart = letters.inspect.probe([(*one[:2], str(at)) for at, one in enumerate(examples)]).layers[0]
    assert together.accuracy < 0.7 and apart.accuracy > 0.85


def test_what_the_row_says_is_read_from_it(letters: llamarium.Llama) -> None:
    examples = [(f"{a}{b}", "vowel" if b in "aeiou" else "other", a + b) for a in "hlst" for b in "aeioubcdfg"]
    found = letters.inspect.probe(examples, num_splits=8)
    assert found.chance == 0.5 and found.labels == ("other", "vowel") and found.num_examples == 40
    assert found.layers[0].layer is None and [one.layer for one in found.layers[1:]] == list(range(6))
    assert found.layers[0].accuracy > 0.8


def test_the_table_alone_says_none_of_the_bundled_properties(letters: llamarium.Llama) -> None:
    """So what a later layer has of them, it has from the tokens before."""
    for task, least in (("part of speech", 0.9), ("number", 0.7), ("position", 0.45)):
        found = letters.inspect.probe(task)  # pyright: ignore[reportArgumentType]
        assert abs(found.layers[0].accuracy - found.chance) < 0.12 and found.layers[-2].accuracy > least
        groups = {one.group for one in examples_of(task, letters.tokenizer)}  # pyright: ignore[reportArgumentType]
        assert len(groups) == {"part of speech": 8, "number": 36, "position": 4}[task]


@pytest.mark.parametrize(("groups", "wanted", "found"), [(2, 5, 2), (3, 5, 3), (4, 5, 5), (4, 9, 6), (36, 100, 100)])
def test_no_split_is_tested_twice(groups: int, wanted: int, found: int) -> None:
    halves = _halves(groups, wanted, seed=0)
    assert len(set(halves)) == len(halves) == found
    assert all(len(set(half)) == groups // 2 and set(half) <= set(range(groups)) for half in halves)


@pytest.mark.parametrize(
    ("examples", "options", "said"),
    [
        ([], {}, "have 0 labels"),
        ([("a", "x", "1"), ("b", "x", "2")], {}, "have 1 labels"),
        ([("a", "x", "1"), ("b", "y", "1")], {}, "have 1 groups"),
        ([("a", "x", "1"), ("b", "y", "2")], {"ridge": 0.0}, "ridge is 0.0"),
        ([("a", "x", "1"), ("b", "y", "2")], {"ridge": float("nan")}, "ridge is nan"),
        ([("a", "x", "1"), ("b", "y", "2")], {"num_splits": 0}, "num_splits is 0"),
        ([("a", "x", str(i)) for i in range(1024)] + [("a", "y", "y")], {}, "number of examples is 1025"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    letters: llamarium.Llama, examples: list[tuple[str, str, str]], options: dict[str, float], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        letters.inspect.probe(examples, **options)  # pyright: ignore[reportArgumentType]


def test_an_unknown_task_or_kind_is_refused_by_name(letters: llamarium.Llama) -> None:
    with pytest.raises(OptionError, match=r"task is 'tense'.*number"):
        letters.inspect.probe("tense")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=r"kind is 'typo'.*random"):
        letters.inspect.surprise_after_error(kind="typo")  # pyright: ignore[reportArgumentType]


def test_streams_that_are_not_finite_are_refused(letters: llamarium.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = iter([np.full((7, 2, 4), np.nan, np.float32)])
    monkeypatch.setattr("llamarium.inspect.measures.linear_probe._streams", lambda *_: bad)
    with pytest.raises(llamarium.errors.LlamariumError, match="not finite"):
        linear_probe(letters.runner, [Example([1], "x", "1"), Example([2], "y", "2")])


@pytest.mark.parametrize("kind", ["likely", "random"])
def test_surprise_after_an_error_is_that_of_the_text_with_the_error(
    letters: llamarium.Llama, kind: after_error.ErrorKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against `score` of each changed text as a whole."""
    texts = ["To be, or not to be: that is it", "O Romeo, Romeo!", "Ay"]
    wrong: list[int] = []
    choose = after_error._wrong

    def noted(logits_V: np.ndarray, right: int, *rest: object) -> int:
        wrong.append(choose(logits_V, right, *rest))  # pyright: ignore[reportArgumentType]
        assert wrong[-1] != right
        if kind == "likely":
            assert wrong[-1] in np.argsort(-logits_V)[:2]
        return wrong[-1]

    monkeypatch.setattr(after_error, "_wrong", noted)
    found = letters.inspect.surprise_after_error(texts, kind=kind, num_tokens=5, stride=3)
    expected: list[list[list[float]]] = []
    for ids in map(letters.encode, texts):
        for at in range(4, len(ids) - 5, 3):
            rows = ids, [*ids[:at], wrong[len(expected)], *ids[at + 1 :]]
            scores = [score(letters.runner, row).logprobs[at + 1 : at + 6] for row in rows]
            expected.append([[-(one or 0) for one in row] for row in scores])
    plain_PD, after_PD = np.array(expected).transpose(1, 0, 2)
    assert found.num_places == len(expected) == len(wrong) == 10
    np.testing.assert_allclose(found.plain, plain_PD.mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.after, after_PD.mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.error, (after_PD - plain_PD).std(0) / 10**0.5, rtol=1e-3)


def test_texts_without_room_for_an_error_are_refused(letters: llamarium.Llama) -> None:
    with pytest.raises(InputError, match="no text has 21 tokens"):
        letters.inspect.surprise_after_error(["Twenty letters, all."])
    with pytest.raises(InputError, match="stride is 0"):
        letters.inspect.surprise_after_error(["To be"], stride=0)


def test_work_that_nobody_wants_any_more_ends(letters: llamarium.Llama) -> None:
    """The page's routes ask before each part."""
    calls = list[int]()

    def leave() -> None:
        calls.append(0)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        linear_probe(letters.runner, examples_of("number", letters.tokenizer), check_wanted=leave)
    calls.clear()
    with pytest.raises(InterruptedError):
        after_error.surprise_after_error(letters.runner, [[1] * 30] * 3, check_wanted=leave)
    assert len(calls) == 2
