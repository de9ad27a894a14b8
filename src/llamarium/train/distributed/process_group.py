"""What a run asks of the processes that share its work; and the answers where there is one process, which are simple.

`step.py` and `run.py` speak to a `Solo` and nothing else. Its other kind, `parallel.Team`, spreads weights and rows
over several processes; whoever trains on one device can stop reading here.
"""

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from llamarium.checkpoints.save import Weight, model_weights
from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.train.config import RunConfig

T = TypeVar("T")


class Solo:
    """One process that has everything.

    Attributes:
        is_first: Whether this process speaks for all: writes files, shows what happens.
        size: How many processes there are.
        part: Which part of the rows is this process's.
        parts: Into how many parts rows are divided.
    """

    is_first = True
    size = 1
    part = 0
    parts = 1

    def prepare(self, work: Callable[[], T]) -> T:
        """Let every process do the same work, the first one alone at the beginning: it may write what others read."""
        return work()

    def agree(self, what: str, value: str) -> None:
        """Make sure that all processes have the same value."""

    def divide(self, model: LlamaForCausalLM) -> None:
        """Leave each process its share of the model's weights, in place."""

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` where the weights can be computed with."""
        return work()

    def add(self, *numbers: float) -> list[float]:
        """Add each number up over the parts of the rows."""
        return list(numbers)

    def settle(self, parameters: Sequence[Tensor], clip: float) -> float:
        """Scale all gradients together down to the norm `clip`, and return their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, clip))  # sync: decides whether to update

    def stopping(self, signals: list[int]) -> Sequence[int]:
        """Return the signals that came to any process, the same for all of them."""
        return signals

    def lead(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        """Let the first process work, which may ask for any of `tensors` by `whole`."""
        work()

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor with all of its values."""
        return tensor

    def weights(self, model: LlamaForCausalLM) -> list[Weight]:
        """Return what of the model is saved; it is read in `lead`."""
        return model_weights(model)

    def place(self, values: Tensor, like: Tensor) -> Tensor:
        """Return this process's share of `values`, on the device of `like`, as `like` is divided."""
        return values.to(like.device)


SOLO = Solo()


@contextmanager
def gathered(config: RunConfig) -> Generator[Solo]:
    """Yield the processes that share a run: those that `torchrun` has started, or this one alone.

    Raises:
        TrainingError: If they cannot be arranged as the settings say, or one of them is lost on the way.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        from llamarium.train.distributed.parallel import joined

        with joined(config, size) as team:
            yield team
    elif config.tensor_parallel > 1:
        raise TrainingError(
            f"tensor_parallel is {config.tensor_parallel}, and there is one process; start several: "
            f"torchrun --nproc-per-node {config.tensor_parallel} -m llamarium pretrain ..., "
            "or give --tensor-parallel 1"
        )
    else:
        yield SOLO
