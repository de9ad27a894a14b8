"""The first questions are asked once, about the first pass that is fit for them, and nobody waits for that."""

import threading
from pathlib import Path

import pytest

from llamarium.inspect.probes import cost
from llamarium.page.executor import Pass
from llamarium.page.passes import Passes
from llamarium.page.prepare import MOST_TOKENS, Preparation
from llamarium.page.probes.text import llama3_tokenizer
from llamarium.page.schema.passes import ExperimentFields
from serving import small_llama

pytestmark = pytest.mark.torch


def prepared() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "llamarium-prepare"]


@pytest.mark.usefixtures("llama3_tokenizer_path")
def test_the_first_pass_is_asked_about_once(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama3_tokenizer.cache_clear()
    costs: list[tuple[int, ...]] = []
    monkeypatch.setattr(cost, "token_cost", lambda _, ids, **__: costs.append(ids))
    llama, kept = small_llama(smollm2_path), Passes()
    with llama.engine(kv_memory=2**22, max_num_seqs=1) as engine:
        preparation = Preparation(kept, is_wanted=True)
        for other in (Pass.of([1] * (MOST_TOKENS + 1)), Pass.of([1], experiment=ExperimentFields(rotation=False))):
            preparation.begin(llama, engine, other)
            assert prepared() == []
        preparation.begin(llama, engine, Pass.of([1, 2, 3]))
        (thread,) = prepared()
        thread.join(60)
        assert kept.num_bytes > 0
        assert llama3_tokenizer.cache_info().currsize == 1
        assert costs == [(1, 2, 3)]  # the last of the questions: none before it has failed in a way that nobody expects
        preparation.begin(llama, engine, Pass.of([4, 5, 6]))
        assert prepared() == []


def test_nothing_is_done_where_nobody_is_to_be_prepared_for(smollm2_path: Path) -> None:
    llama, kept = small_llama(smollm2_path), Passes()
    with llama.engine(kv_memory=2**22, max_num_seqs=1) as engine:
        Preparation(kept, is_wanted=False).begin(llama, engine, Pass.of([1, 2, 3]))
        assert prepared() == []
    assert kept.num_bytes == 0
