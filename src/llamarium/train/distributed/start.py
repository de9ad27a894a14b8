"""The process group of a run: the processes of `torchrun`, or this one alone."""

import os
from collections.abc import Generator
from contextlib import contextmanager

from llamarium.errors import TrainingError
from llamarium.train.config import RunConfig
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup


@contextmanager
def init_process_group(config: RunConfig) -> Generator[ProcessGroup]:
    """Yield the processes that `torchrun` has started, or this one alone.

    Raises:
        TrainingError: If they do not fit the settings, or one of them is lost.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        from llamarium.train.distributed.parallel import init_distributed

        with init_distributed(config, world_size) as process_group:
            yield process_group
    elif config.tensor_parallel > 1:
        raise TrainingError(
            f"tensor_parallel is {config.tensor_parallel}, and there is one process; start several: "
            f"torchrun --nproc-per-node {config.tensor_parallel} -m llamarium pretrain ..., "
            "or give --tensor-parallel 1"
        )
    else:
        yield SINGLE_PROCESS
