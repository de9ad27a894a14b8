"""Activation patching: replace activations of one prompt by those of another, at one layer and one token.

Take two prompts of the same length that differ in one detail ("The capital of France is", "The capital of Italy is").
The base prompt is run with one activation, at one layer and one position, taken from the source prompt. If the answer
changes, that activation carries the difference. A grid holds such a pass for every layer and position.

Both prompts are run once. A cell computes only the patched token and those after it, from the patched layer on, over
the base's KV cache of the tokens before; many cells of a layer are batched. Where both prompts have the same token, the
cell equals the base's pass. A model with hooks, which may use another mask, runs all tokens from that layer on.

Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section 2.1; Heimersheim & Nanda 2024,
"How to use and interpret activation patching".
"""

from collections.abc import Callable, Collection, Iterator, Sequence
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
from llamarium.kernels.step_priority import pause
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.module_runner import threads_for
from llamarium.runtime.runner import Runner
from llamarium.runtime.shell import shell_of
from llamarium.runtime.taps import Key

PatchPart = Literal["residual", "attention", "mlp"]
"""The stream after a layer; what its attention, or its MLP, adds."""

_NAMES: dict[PatchPart, str] = {"residual": "resid", "attention": "attn_out", "mlp": "mlp_out"}
_TOKENS = 256  # of rows that are run side by side; an answer waits for one of their products at most
_PROBABLE = 10  # tokens that rounding is measured on


class PatchGrid:
    """A grid over layers and positions; prompts are run on construction, cells during iteration.

    The arguments and errors are those of `Inspector.patch_grid`.

    Attributes:
        base: The base prompt's prediction, unpatched.
        source: The source prompt's prediction.
        floor: The change of the measured logit caused by rounding alone: the largest difference, over the probable
            tokens of both prompts, between the pass as the model generates and the same pass in float32.
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
        self._part: PatchPart = part
        self._model, self._target, self._against = in_float32(model), target_id, against_id
        self._runs_whole = _is_hooked(self._model)
        self.base_ids = tuple(base_ids)
        self.layers = tuple(sorted(indices(layers, model.config.num_hidden_layers, "layers")))
        self.positions = tuple(sorted(indices(positions, num_tokens, "positions")))
        names = [_NAMES[part], "logits"]
        self._base = trace(runner_of(self._model), base_ids, names=[*names, "embed", "resid", "k_rot", "v"])
        self._source = trace(runner_of(self._model), source_ids, names=names)
        logits = [self._tensor(traced, ("logits", None))[-1:] for traced in (self._base, self._source)]
        self.base, self.source = (self._measure(logits_1V)[0] for logits_1V in logits)
        runner = answering or runner_of(model)
        self.floor = max(self._floor(runner, traced) for traced in (self._base, self._source))

    def cells(self) -> Iterator[PatchCell]:
        """Yield the cells, layer by layer; closing the generator stops the computation."""
        total, done = len(self.layers) * len(self.positions), 0
        total_change = self.source.logit - self.base.logit
        for layer in self.layers:
            for positions, changed in self._groups(layer):
                patched = dict(zip(changed, self._run(layer, changed), strict=True)) if changed else {}
                for position in positions:
                    done, measured = done + 1, patched.get(position, self.base)
                    recovered = None if total_change == 0 else (measured.logit - self.base.logit) / total_change
                    yield PatchCell(layer, position, measured.logit, measured.probability, recovered, done, total)

    def _groups(self, layer: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield positions that are run as one batch, and those of them at which the prompts differ, in order."""
        key, num_tokens = (_NAMES[self._part], layer), len(self.base_ids)
        differs_T = (self._base.arrays[key] != self._source.arrays[key]).any(-1)
        group, room = list[int](), _TOKENS
        for position in self.positions:
            num_tokens_run = (num_tokens - (0 if self._runs_whole else position)) * int(differs_T[position])
            if group and num_tokens_run > room:
                yield group, [place for place in group if differs_T[place]]
                group, room = [], _TOKENS
            group.append(position)
            room -= num_tokens_run
        yield group, [place for place in group if differs_T[place]]

    @torch.inference_mode()
    def _run(self, layer: int, positions: Sequence[int]) -> list[Measured]:
        """Run the base with each of these positions patched, as one batch."""
        shell, device, num_tokens = shell_of(self._model), self._model.device, len(self.base_ids)
        first = [0] * len(positions) if self._runs_whole else positions
        places = [(cell, at) for cell, start in enumerate(first) for at in range(start, num_tokens)]
        cells_M, at_M = torch.tensor(places, device=device).unbind(1)
        is_patched_M = at_M == torch.tensor(positions, device=device)[cells_M]
        shape = (len(positions), num_tokens) if self._runs_whole else (1, len(places))
        start = self._start(shell, layer, at_M.view(shape), is_patched_M.view(shape))
        shell.model.layers = nn.ModuleList([*start, *shell.model.layers[layer + 1 :]])
        inner = CausalAttend(window=self._model.config.sliding_window)
        attend = inner if self._runs_whole else _Rest(cells_M, at_M, self._kept, inner)
        ids_BT = torch.tensor(self.base_ids, device=device)[at_M].view(shape)
        with threads_for(self._model):
            stream_MD = shell.model(ids_BT, at_M.view(shape), attend).flatten(0, 1)
            return self._measure(self._model.logits(stream_MD[at_M == num_tokens - 1]))

    def _start(self, shell: LlamaForCausalLM, layer: int, at_BT: Tensor, is_patched_BT: Tensor) -> list[nn.Module]:
        """Return stand-ins for the layers up to the patched one; only the rest of that layer is computed."""
        key = _NAMES[self._part], layer
        put_BTD = self._tensor(self._base, key)[at_BT]
        put_BTD[is_patched_BT] = self._tensor(self._source, key)[at_BT[is_patched_BT]]
        if self._part == "residual":
            return [_Given(put_BTD)]
        before_TD = self._tensor(self._base, ("embed", None) if layer == 0 else ("resid", layer - 1))
        module = shell.model.layers[layer]
        setattr(module, "self_attn" if self._part == "attention" else "mlp", _Given(put_BTD))
        return [_Given(before_TD[at_BT]), module]

    def _kept(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._tensor(self._base, ("k_rot", layer)), self._tensor(self._base, ("v", layer))

    def _tensor(self, traced: Trace, key: Key) -> Tensor:
        return torch.from_numpy(traced.arrays[key]).to(self._model.device, self._model.dtype)

    def _floor(self, answering: Runner, exact: Trace) -> float:
        """Return the largest rounding error of a probable token's logit, or of the difference of two."""
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
    """A stand-in that returns a module's precomputed output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: object) -> Tensor:
        return self._output


class _Rest:
    """An `Attend` for the last tokens of several cells, packed into one row; earlier tokens are the base's.

    Attention runs in the shape of a batch of whole passes, so that it is bit-identical to them.
    """

    def __init__(
        self, cells_M: Tensor, at_M: Tensor, base: Callable[[int], tuple[Tensor, Tensor]], attend: CausalAttend
    ) -> None:
        self._places, self._base = (cells_M, at_M), base
        self._num_cells = int(cells_M[-1]) + 1  # sync: an experiment
        self._attend = attend

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        pause()
        k_TKH, v_TKH = self._base(layer_idx)
        none_TNH = q_BTNH.new_zeros(len(k_TKH), *q_BTNH.shape[2:])
        full = [x.repeat(self._num_cells, 1, 1, 1) for x in (none_TNH, k_TKH, v_TKH)]
        for x, values in zip(full, (q_BTNH, k_BTKH, v_BTKH), strict=True):
            x[self._places] = values[0]
        return self._attend(layer_idx, *full)[self._places].unsqueeze(0)


def _is_hooked(model: nn.Module) -> bool:
    attributes = map(vars, model.modules())
    return any(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own for own in attributes)
