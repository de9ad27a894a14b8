"""The process group interface, implemented for a single process.

`step.py` and `run.py` depend only on `ProcessGroup`. Its subclass `parallel.DistributedGroup` shards weights and rows
over several processes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from llamarium.checkpoints.huggingface.writer import OutputTensor
from llamarium.checkpoints.save import model_weights
from llamarium.kernels import cpu_training
from llamarium.model import LlamaForCausalLM

T = TypeVar("T")


class ProcessGroup:
    """A process group of one process.

    Rank zero writes files and shows events; the rows are divided into `num_shards` shards.
    """

    is_rank_zero = True
    world_size = 1
    shard_idx = 0
    num_shards = 1

    def rank_zero_first(self, work: Callable[[], T]) -> T:
        """Run `work` in every process, first on rank zero; TrainingError if it fails in another process."""
        return work()

    def check_equal(self, what: str, value: str) -> None:
        """Raise TrainingError if the processes have different values."""

    def shard_model(self, model: LlamaForCausalLM) -> None:
        """Shard the weights in place; TrainingError if heads or features cannot be divided evenly."""

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` with the weights gathered."""
        return work()

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """Return the sum of each number over the shards."""
        return list(numbers)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Clip the total gradient norm to `max_norm`, and return the norm before clipping."""
        return cpu_training.clip_grad_norm(parameters, max_norm)

    def any_signal(self, signals: list[int]) -> Sequence[int]:
        """Return the signals that any process received; the result is the same in all processes."""
        return signals

    def on_rank_zero(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        """Call `work` on rank zero; it may gather any of `tensors` by `full_tensor`. TrainingError if it fails."""
        work()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; only within `on_rank_zero`."""
        return tensor

    def weights(self, model: LlamaForCausalLM) -> list[OutputTensor]:
        """Return the model's weights for saving; they are gathered within `on_rank_zero`."""
        return model_weights(model)

    def distribute(self, values: Tensor, like: Tensor) -> Tensor:
        """Return this process's shard of `values`, on the device and with the sharding of `like`."""
        return values.to(like.device)


SINGLE_PROCESS = ProcessGroup()
