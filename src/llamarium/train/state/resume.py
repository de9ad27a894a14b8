"""Save and resume a run: position, optimizer state, and a comparison with the current settings and data.

Tensors are stored as safetensors, all else as JSON. The manifest proves that a file is as written, but any program can
write a manifest, so every value is checked.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from llamarium.checkpoints.decode import tensor_in
from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.checkpoints.huggingface.writer import write_safetensors
from llamarium.checkpoints.save import SAFETENSORS_DTYPES, tensor_weight
from llamarium.checkpoints.storage import TensorFile
from llamarium.config import read_json_object
from llamarium.errors import CheckpointError, LlamariumError, TrainingError, escape, show_value, warn_caller
from llamarium.io import sync, unwritable, write_json
from llamarium.train.alarms import AlarmState
from llamarium.train.data.order import Cursor
from llamarium.train.optim import restore_optimizers
from llamarium.train.setup import Setup
from llamarium.train.state.checkpoint import checkpoint_step

T = TypeVar("T")

_RESUME = "resume"
_MAX_STATE_BYTES = 64 * 2**20
_MAX_THREADS = 1024  # maximum of the setting `threads`


@dataclass(slots=True)
class Position:
    """Position and counters of a run.

    Attributes:
        step: Completed training steps.
        cursor: Position in the data.
        num_tokens: Input tokens so far, including prompts and padding.
        seconds: Time spent in training steps.
        best_loss: Lowest validation loss so far, or the negative of the highest reward; infinite if none was measured
            with the current rows and reward.
        best_step: Step of the best checkpoint; None if there is none.
        num_since_best: Validations after the best one.
        num_without_signal: Steps without an update, as the gradient was zero.
        is_validated: False if the validation of this step was interrupted.
        alarms: State of the run's alarms.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    num_tokens: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int | None = None
    num_since_best: int = 0
    num_without_signal: int = 0
    is_validated: bool = True
    alarms: AlarmState = field(default_factory=AlarmState)

    def to_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        best = None if math.isinf(self.best_loss) else self.best_loss
        return dataclasses.asdict(self) | {"best_loss": best}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Position":
        """Read the result of `to_dict`; TrainingError for invalid values."""
        cursor = entry(raw, "cursor", dict)
        best_step, best_loss = raw.get("best_step"), raw.get("best_loss")
        return cls(
            step=_count(raw, "step"),
            cursor=Cursor(_count(cursor, "epoch"), _count(cursor, "index")),
            num_tokens=_count(raw, "num_tokens"),
            seconds=_count(raw, "seconds", float),
            best_loss=math.inf if best_loss is None else _count(raw, "best_loss", float, -(2**63)),
            best_step=None if best_step is None else _count(raw, "best_step"),
            num_since_best=_count({"num_since_best": 0, **raw}, "num_since_best"),
            num_without_signal=_count({"num_without_signal": 0, **raw}, "num_without_signal"),
            is_validated=raw.get("is_validated") is not False,
            alarms=AlarmState.from_dict(entry({"alarms": {}, **raw}, "alarms", dict)),
        )


def entry(raw: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return an entry of a JSON object; TrainingError if it is missing or of another type."""
    value = raw.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TrainingError(f"{name} is {show_value(value)}; expected {kind.__name__}")
    return value


def _count(raw: Mapping[str, Any], name: str, kind: type[Any] = int, low: int = 0) -> Any:
    """Return a number of a JSON object; TrainingError if it is not a number from `low` to 2**63."""
    value = entry(raw, name, kind)
    if not low <= value < 2**63:  # NaN is not, either
        raise TrainingError(f"{name} is {show_value(value)}; expected a number from {low} to 2^63")
    return value


def save_resume(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    full_tensor: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Write `resume/optimizer.safetensors` and `resume/state.json` into a checkpoint's folder.

    `state` must be plain JSON: dicts with str keys, lists, finite numbers, str, bool and None; otherwise TrainingError.
    `full_tensor` gathers a tensor that is sharded over processes.
    """
    try:
        plain = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise TrainingError(f"{escape(folder)}: the run's state cannot be saved as JSON: {escape(error)}") from None
    if not plain:
        raise TrainingError(f"{escape(folder)}: the run's state changes in JSON; expected lists and str keys")
    try:
        (folder / _RESUME).mkdir(parents=True, exist_ok=True)
        gather = Tensor.detach if full_tensor is None else full_tensor
        weights = [tensor_weight(k, t, partial(gather, t)) for k, t in tensors.items()]
        write_safetensors(folder / _RESUME / "optimizer.safetensors", weights)
        write_json(folder / _RESUME / "state.json", state)
        sync(folder / _RESUME)
    except OSError as error:
        raise unwritable(folder / _RESUME, error) from error


def load_resume(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the files of `save_resume`; TrainingError if they are missing or malformed."""
    if not (folder / _RESUME).is_dir():
        raise TrainingError(
            f"{escape(folder)}: has no folder {_RESUME}, so no run can go on from it; it can be the model that a new "
            "run begins with"
        )
    path = folder / _RESUME / "optimizer.safetensors"
    try:
        state = read_json_object(folder / _RESUME / "state.json", _MAX_STATE_BYTES)
        table, file = read_safetensors(path), TensorFile(path)
        unknown = [t.dtype for t in table.values() if t.dtype not in SAFETENSORS_DTYPES]
        if unknown:
            raise TrainingError(f"{escape(path)}: dtype {unknown[0]}; expected {', '.join(SAFETENSORS_DTYPES)}")
        tensors = {
            name: tensor_in(file, t.offset, t.shape, SAFETENSORS_DTYPES[t.dtype], copy=True)
            for name, t in table.items()
        }
    except OSError as error:
        raise TrainingError(f"{escape(path)}: cannot be read: {escape(error)}") from None
    except LlamariumError as error:
        raise TrainingError(str(error)) from None
    return tensors, state


def saved_threads(folder: Path) -> int | None:
    """Return the number of threads in a checkpoint, or None; CheckpointError if the file is malformed."""
    count = read_json_object(folder / _RESUME / "state.json", _MAX_STATE_BYTES).get("threads")
    if count is None or (type(count) is int and 0 < count <= _MAX_THREADS):
        return count
    raise CheckpointError(f"{escape(folder)}: threads is {show_value(count)}; expected 1 to {_MAX_THREADS}")


def restore_run(setup: Setup, folder: Path, optimizers: list[Optimizer], allow_changes: bool) -> Position:
    """Load a checkpoint into the model and the optimizers, and return its position.

    TrainingError if it is invalid, or if settings or data have changed and `allow_changes` is false.
    """
    tensors, state = load_resume(folder)
    try:
        settings, about = entry(state, "settings", dict), entry(state, "about", dict)
        position, kind = Position.from_dict(entry(state, "position", dict)), entry(state, "kind", str)
        if position.step != checkpoint_step(folder):
            raise TrainingError(f"step is {position.step}; expected that of the folder's name")
    except TrainingError as error:
        raise TrainingError(f"{folder}/resume/state.json: {error}; the file was changed") from None
    if kind != type(setup.config).__name__:
        now = type(setup.config).__name__
        raise TrainingError(f"{folder}: is of a run of another kind ({escape(kind)}); this one is a {now}")
    changed = setup.config.differences(settings)
    if method := next((change for change in changed if change.startswith("method:")), None):
        raise TrainingError(f"{folder}: {method}, which learns other weights; begin a run in another folder")
    same_rows = state.get("data") == setup.train.fingerprint
    if not same_rows:
        changed += _data_differences(about, setup.train.about) or ([] if changed else ["the data is another"])
    reward = setup.rollouts.rewards.digest if setup.rollouts else ""
    same_reward = not any(change.startswith("reward:") for change in changed)
    if state.get("reward", reward) != reward:
        same_reward = False
        changed.append("the file of the reward holds something else")
    if changed and not allow_changes:
        raise TrainingError(
            f"{folder}: the run was started with other settings ({'; '.join(changed)}); give those again, or allow the "
            "changes (--allow-changes)"
        )
    setup.restore(folder)
    if settings.get("optimizer") != setup.config.optimizer:
        warn_caller(f"the optimizer is now {setup.config.optimizer}, and begins anew")
    elif position.step > position.num_without_signal and not tensors:  # without any update there is no state
        warn_caller(f"{folder}: the optimizer remembers nothing, and begins anew")
    elif tensors:
        try:
            restore_optimizers(setup.model, optimizers, tensors, setup.process_group)
        except TrainingError as error:
            raise TrainingError(f"{folder}/resume/optimizer.safetensors: {error}") from None
    if not (same_rows and same_reward) or settings.get("eval_rows") != setup.config.eval_rows:
        position.best_loss, position.num_since_best = math.inf, 0  # losses of other rows or rewards are not comparable
        position.alarms = AlarmState()
    return position


def _data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between a checkpoint's data and the current data; counts as "name: before -> now"."""
    mixed = ["the sources, or their weights, are others"] * (before.get("sources") != now.get("sources"))
    before = {name: value for name, value in before.items() if type(value) is type(now.get(name))}
    if not before or before == now:
        return mixed
    counts = [name for name, value in now.items() if isinstance(value, int) and before.get(name) != value]
    return [*mixed, *(f"{name}: {before.get(name, 0):,} -> {now[name]:,}" for name in counts)] + [
        f"the {name} is {'the same' if before.get(name) == value else 'another'}"
        for name, value in now.items()
        if isinstance(value, str)
    ]
