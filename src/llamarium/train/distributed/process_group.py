"""The processes that train together, as one process without communication.

`step.py` and `run.py` use a `ProcessGroup` only. Its subclass `parallel.DistributedGroup` shards weights and rows over
several processes.
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
    """A single process; rank zero writes files and shows events, and the rows are divided into shards."""

    is_rank_zero = True
    world_size = 1
    shard_idx = 0
    num_shards = 1

    def rank_zero_first(self, work: Callable[[], T]) -> T:
        """Do the same work in every process, first in rank zero; TrainingError if it fails in another one."""
        return work()

    def check_equal(self, what: str, value: str) -> None:
        """Check that all processes have the same value; TrainingError if not."""

    def shard_model(self, model: LlamaForCausalLM) -> None:
        """Leave each process its shard of the weights, in place; TrainingError if heads or features do not divide."""

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` with the weights gathered."""
        return work()

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """Sum each number over the shards of the rows."""
        return list(numbers)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Scale all gradients together down to `max_norm`, and return their norm before."""
        return cpu_training.clip_grad_norm(parameters, max_norm)

    def any_signal(self, signals: list[int]) -> Sequence[int]:
        """Return the signals of any process, the same in all of them."""
        return signals

    def on_rank_zero(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        """Call `work` on rank zero, which may gather any of `tensors` by `full_tensor`; TrainingError if it fails."""
        work()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a tensor, within `on_rank_zero`."""
        return tensor

    def weights(self, model: LlamaForCausalLM) -> list[OutputTensor]:
        """Return the model's weights to save; they are read in `on_rank_zero`."""
        return model_weights(model)

    def distribute(self, values: Tensor, like: Tensor) -> Tensor:
        """Return this process's shard of `values`, placed like `like`."""
        return values.to(like.device)


SINGLE_PROCESS = ProcessGroup()
