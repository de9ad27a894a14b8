"""Warm up imports, tokenizers and kernels before the page's first requests need them.

The first lens, neighbors or sample of a process take half a second each, later ones a tenth of that; loading Llama 3's
tokenizer takes as long. As soon as the first pass is created, each of them is therefore computed once for this pass, in
a background thread, in the order of the page's stages. No torch at import.
"""

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from llamarium.errors import LlamariumError
from llamarium.generation.text_engine import TextEngine
from llamarium.hub.builtin import is_cached
from llamarium.page.executor import Executor, Pass
from llamarium.page.passes import Passes
from llamarium.page.probes.text import llama3_tokenizer
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow

if TYPE_CHECKING:
    from llamarium.api import Llama

MOST_TOKENS = 64
"""Maximum tokens of a pass that is used for warm-up."""


class Preparation:
    """Computes the page's first views once, if `is_wanted`."""

    def __init__(self, kept: Passes, is_wanted: bool) -> None:
        self._kept, self._is_due = kept, is_wanted
        self._lock = threading.Lock()

    def begin(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        """Start the warm-up for a pass in a thread, unless it has been done or the pass is not plain and short."""
        is_plain = (
            forward_pass.adapter is None and forward_pass.experiment is None and len(forward_pass.ids) <= MOST_TOKENS
        )
        with self._lock:
            is_due, self._is_due = self._is_due, self._is_due and not is_plain
        if is_due and is_plain:
            name = "llamarium-prepare"
            threading.Thread(target=self._ask, args=(llama, engine, forward_pass), name=name, daemon=True).start()

    def _ask(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        for question in (self._tokens, self._neighbors, self._depth, self._draw, self._cost):
            with engine.step_priority.working(), suppress(LlamariumError):
                question(llama, engine, forward_pass)

    def _tokens(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        text = llama.decode(forward_pass.ids)
        for tokenizer in (llama.tokenizer, *([llama3_tokenizer()] if is_cached("llama3") else ())):
            tokenizer.explain(text)

    def _depth(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        from llamarium.inspect.lens import lens
        from llamarium.inspect.probes.attribution import NAMES, attribute

        names, last = {*NAMES, "resid_mid"}, len(forward_pass.ids) - 1
        layers = range(llama.config.num_hidden_layers)
        traced = self._kept.trace(Executor.of(llama, engine), forward_pass, names, layers, range(last, last + 1))
        lens(llama.runner, traced, 1, llama.tokenizer)
        attribute(llama.runner, traced, forward_pass.ids[-1], position=last)

    def _neighbors(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        llama.neighbors(forward_pass.ids[-1], k=1)

    def _draw(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        from llamarium.inspect.probes.sampling import explain_choice

        last = len(forward_pass.ids) - 1
        logits = self._kept.numbers(Executor.of(llama, engine), forward_pass, "logits", None, range(last, last + 1))
        numbers = logits.values[0].copy()  # the sampler works in place
        row = SamplingRow(
            SamplingParams(temperature=1.0, top_p=0.9), forward_pass.ids, llama.config.vocab_size, (), None
        )
        explain_choice(row, numbers, 1, llama.tokenizer)

    def _cost(self, llama: "Llama", engine: TextEngine, forward_pass: Pass) -> None:
        from llamarium.inspect.probes.cost import token_cost

        token_cost(engine.runner, forward_pass.ids)
