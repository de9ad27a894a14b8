"""Activation patching: put activations of a second prompt into the pass of the first, at one layer and one token.

Two prompts of the same length differ in something ("The capital of France is", "The capital of Italy is"). Into a pass
of the one goes what a part of the model has computed for the other, at one layer and one position; where the answer
turns, there lay the difference. A grid is such a pass for every layer and position. Both prompts are run once; a cell
is run from the layer that is patched, all positions of a layer side by side.

Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section 2.1; Heimersheim & Nanda 2024,
"How to use and interpret activation patching".
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from llamarium.attention import CausalAttend
from llamarium.errors import InputError, check_choice
from llamarium.inspect.interventions.effect import Measured, PatchCell
from llamarium.inspect.interventions.widened import in_float32
from llamarium.inspect.numbers import largest
from llamarium.inspect.shapes import indices
from llamarium.inspect.tokens import check_ids, check_token
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.module_runner import threads_for
from llamarium.runtime.runner import Runner
from llamarium.runtime.shell import shell_of
from llamarium.runtime.taps import Key

PatchPart = Literal["residual", "attention", "mlp"]
"""The stream after a layer; what its attention, or its MLP, adds."""

_NAMES: dict[PatchPart, tuple[str, ...]] = {
    "residual": ("resid",), "attention": ("embed", "resid", "attn_out"), "mlp": ("embed", "resid", "mlp_out")
}  # fmt: skip
_TOKENS = 256  # of rows that are run side by side; an answer waits for one of their products at most
_PROBABLE = 10  # tokens that rounding is measured on


class PatchGrid:
    """A grid over layers and positions; both prompts are run when it is made, the cells while they are iterated.

    Arguments and errors are those of `Inspector.patch_grid`.

    Attributes:
        base: What the base's own pass predicts.
        source: What the source's does.
        floor: What rounding alone moves the measured logit by: the largest difference, over the probable tokens of both
            prompts, between the pass as the model answers and the same pass in float32.
        base_ids: The prompt that is patched.
        layers: The rows.
        positions: The columns.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        base_ids: Sequence[int],
        source_ids: Sequence[int],
        target_id: int,
        *,
        against_id: int | None = None,
        part: PatchPart = "residual",
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        answering: Runner | None = None,
    ) -> None:
        check_choice("part", part, get_args(PatchPart))
        num_tokens = len(check_ids(model.config, base_ids))
        if len(check_ids(model.config, source_ids)) != num_tokens:
            raise InputError(
                f"the prompts have {num_tokens} and {len(source_ids)} tokens; expected as many, so that each token has "
                "one to take its place"
            )
        for token_id in (target_id, target_id if against_id is None else against_id):
            check_token(token_id, model.config.vocab_size)
        self._model, self._part, self._target, self._against = in_float32(model), part, target_id, against_id
        self.base_ids = tuple(base_ids)
        self.layers = tuple(sorted(indices(layers, model.config.num_hidden_layers, "layers")))
        self.positions = tuple(sorted(indices(positions, num_tokens, "positions")))
        self._base = trace(runner_of(self._model), base_ids, names=[*_NAMES[part], "logits"])
        self._source = trace(runner_of(self._model), source_ids, names=[*_NAMES[part], "logits"])
        logits = [self._tensor(seen, ("logits", None))[-1:] for seen in (self._base, self._source)]
        self.base, self.source = (self._measure(logits_1V)[0] for logits_1V in logits)
        runner = answering or runner_of(model)
        self.floor = max(self._floor(runner, seen) for seen in (self._base, self._source))

    def cells(self) -> Iterator[PatchCell]:
        """Yield the cells, layer by layer; closing the generator ends the work."""
        total, done = len(self.layers) * len(self.positions), 0
        whole = self.source.logit - self.base.logit
        at_once = max(1, _TOKENS // len(self._base.token_ids))
        for layer in self.layers:
            for start in range(0, len(self.positions), at_once):
                positions = self.positions[start : start + at_once]
                for position, found in zip(positions, self._run(layer, positions), strict=True):
                    done += 1
                    recovered = None if whole == 0 else (found.logit - self.base.logit) / whole
                    yield PatchCell(layer, position, found.logit, found.probability, recovered, done, total)

    @torch.inference_mode()
    def _run(self, layer: int, positions: Sequence[int]) -> list[Measured]:
        """Run the base with each of these positions patched, side by side: B rows."""
        shell, ids = shell_of(self._model), self._base.token_ids
        shell.model.layers = nn.ModuleList([*self._start(shell, layer, positions), *shell.model.layers[layer + 1 :]])
        ids_BT = torch.tensor(ids, device=self._model.device).repeat(len(positions), 1)
        positions_1T = torch.arange(len(ids), device=self._model.device).unsqueeze(0)
        with threads_for(self._model):
            return self._measure(self._model.logits(shell.model(ids_BT, positions_1T, CausalAttend())[:, -1]))

    def _start(self, shell: LlamaForCausalLM, layer: int, positions: Sequence[int]) -> list[nn.Module]:
        """Return stand-ins for the layers up to the patched one, whose output is known but for the rest of the last."""
        if self._part == "residual":
            return [_Given(self._put(("resid", layer), positions))]
        before = self._tensor(self._base, ("embed", None) if layer == 0 else ("resid", layer - 1))
        module = shell.model.layers[layer]
        if self._part == "attention":
            module.self_attn = _Given(self._put(("attn_out", layer), positions))
        else:
            module.mlp = _Given(self._put(("mlp_out", layer), positions))
        return [_Given(before.repeat(len(positions), 1, 1)), module]

    def _tensor(self, seen: Trace, key: Key) -> Tensor:
        return torch.from_numpy(seen.arrays[key]).to(self._model.device, self._model.dtype)

    def _put(self, key: Key, positions: Sequence[int]) -> Tensor:
        """Return what the base has computed, a row for each position, which is the source's there: (B, T, D)."""
        rows_BTD = self._tensor(self._base, key).repeat(len(positions), 1, 1)
        rows_BTD[list(range(len(positions))), list(positions)] = self._tensor(self._source, key)[list(positions)]
        return rows_BTD

    def _floor(self, answering: Runner, exact: Trace) -> float:
        """Return the largest difference of a probable token's logit, or of two such tokens' difference."""
        exact_V = exact.arrays["logits", None][-1]
        answering_V = trace(answering, exact.token_ids, names=["logits"], positions=[-1]).arrays["logits", None][0]
        probable = [*largest(exact_V, min(_PROBABLE, len(exact_V))).tolist(), self._target]
        off = (answering_V - exact_V)[probable]
        return float(np.ptp(off) if self._against is not None else np.abs(off).max())

    def _measure(self, logits_BV: Tensor) -> list[Measured]:
        logits_BV = logits_BV.float()
        logits_B = logits_BV[:, self._target]
        if self._against is not None:
            logits_B = logits_B - logits_BV[:, self._against]
        probabilities_B = logits_BV.softmax(dim=-1)[:, self._target]
        return list(map(Measured, logits_B.tolist(), probabilities_B.tolist()))  # sync: to show


class _Given(nn.Module):
    """A module's known output in its place."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: object) -> Tensor:
        return self._output
