"""The processes that train together; and, where there is one process, answers that are simple.

`step.py` and `run.py` speak to a `ProcessGroup` and nothing else. This one is a single process. Its subclass,
`parallel.DistributedGroup`, shards weights and rows over several; whoever trains on one device can stop reading here.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from llamarium.checkpoints.huggingface.writer import Weight
from llamarium.checkpoints.save import model_weights
from llamarium.model import LlamaForCausalLM

T = TypeVar("T")


class ProcessGroup:
    """One process that has everything.

    Attributes:
        is_rank_zero: Whether this is rank zero, which writes files and shows what happens.
        world_size: How many processes there are.
        shard_idx: Which shard of the rows is this process's.
        num_shards: Into how many shards the rows are divided.
    """

    is_rank_zero = True
    world_size = 1
    shard_idx = 0
    num_shards = 1

    def rank_zero_first(self, work: Callable[[], T]) -> T:
        """Let every process do the same work, rank zero alone at the beginning: it may write what others read."""
        return work()

    def check_equal(self, what: str, value: str) -> None:
        """Make sure that all processes have the same value."""

    def shard_model(self, model: LlamaForCausalLM) -> None:
        """Leave each process its shard of the model's weights, in place."""

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` where the weights can be computed with."""
        return work()

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """Add each number up over the shards of the rows."""
        return list(numbers)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Scale all gradients together down to `max_norm`, and return their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))  # sync: decides whether to update

    def any_signal(self, signals: list[int]) -> Sequence[int]:
        """Return the signals that came to any process, the same for all of them."""
        return signals

    def on_rank_zero(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        """Let rank zero work, which may ask for any of `tensors` by `full_tensor`."""
        work()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor with all of its values."""
        return tensor

    def weights(self, model: LlamaForCausalLM) -> list[Weight]:
        """Return what of the model is saved; it is read in `on_rank_zero`."""
        return model_weights(model)

    def distribute(self, values: Tensor, like: Tensor) -> Tensor:
        """Return this process's shard of `values`, on the device of `like`, as `like` is sharded."""
        return values.to(like.device)


SINGLE_PROCESS = ProcessGroup()
