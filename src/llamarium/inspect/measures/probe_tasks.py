"""Properties that a linear probe can be asked about, with small lists of English words to try it on.

    part of speech   noun or verb: each word is both ("the walk", "they walk"), so the table cannot tell them apart
    number           one or more: of the subject, read at the end of the clause ("The cats that the dog chased")
    position         the place in a text of random words, in quarters: of 12 tokens, after a first one

Words and contexts of a group occur in no other one, so a probe is tested on words that it was not fitted on.
"""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np

from llamarium.errors import check_choice
from llamarium.inspect.measures.linear_probe import Example
from llamarium.tokenizer.base import Tokenizer

ProbeTask = Literal["part of speech", "number", "position"]

_BOTH = (
    "walk run play sleep work dance fight visit call help talk cook drive ride swim drink laugh cry smile look "
    "guess answer plan change start stop cut break fall jump rest search test use claim cost dream hope love wish"
).split()
_BEFORE_NOUNS = "the a my this his every one your".split()
_BEFORE_VERBS = "to they we will can must you could".split()
_NOUNS = (
    "cat car house tree book river teacher king friend apple window garden student doctor engine family boy girl horse "
    "bird table chair door bottle school lake hill farm song game cup plate flower letter road lamp"
).split()
_WORDS = (
    "island happy machine small forget picture strange choose village angry explain heavy country clever describe "
    "honest river wooden remember bottle huge decide kitchen tiny arrive mountain famous include brave garden avoid "
    "careful admire planet useful invite hungry behave gentle deny doctor learn anxious grow polite engine destroy "
    "lazy create forest persuade ugly animal discuss curious believe teacher wealthy bring person quick"
).split()
_SETS = 4  # of words that occur together in a text
_TEXTS = 5  # of each set
_LONG = 12  # tokens after the first


def examples_of(task: ProbeTask, tokenizer: Tokenizer) -> list[Example]:
    """Return a task's examples in a model's tokens; OptionError for another task.

    TokenizerError if its words cannot be written in the vocabulary.
    """
    check_choice("task", task, get_args(ProbeTask))
    return list(_TASKS[task](tokenizer))


def _part_of_speech(tokenizer: Tokenizer) -> Iterator[Example]:
    for place, word in enumerate(_BOTH):
        context = place % len(_BEFORE_NOUNS)
        for label, before in (("noun", _BEFORE_NOUNS[context]), ("verb", _BEFORE_VERBS[context])):
            yield Example(tokenizer.encode(f"I said {before} {word}"), label, str(context))


def _number(tokenizer: Tokenizer) -> Iterator[Example]:
    for noun in _NOUNS:
        plural = f"{noun[:-1]}ies" if noun.endswith("ly") else f"{noun}s"
        for label, subject in (("one", noun), ("more", plural)):
            for between in ("dog", "dogs"):
                yield Example(tokenizer.encode(f"The {subject} that the {between} chased"), label, noun)


def _position(tokenizer: Tokenizer) -> Iterator[Example]:
    rng = np.random.default_rng(0)
    for group in range(_SETS):
        for _ in range(_TEXTS):
            ids = tokenizer.encode(" ".join(rng.permutation(_WORDS[group::_SETS])))[: _LONG + 1]
            for at in range(1, len(ids)):
                yield Example(ids[: at + 1], f"quarter {(at - 1) * 4 // _LONG + 1}", str(group))


_TASKS: dict[ProbeTask, Callable[[Tokenizer], Iterator[Example]]] = {
    "part of speech": _part_of_speech, "number": _number, "position": _position
}  # fmt: skip
