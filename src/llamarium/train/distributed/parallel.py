"""Distributed training: weights, gradients and optimizer state are sharded over the processes of `torchrun`.

The processes form a mesh: `world_size / tensor_parallel` along "data", `tensor_parallel` along "tensor".

- Along "data" weights are sharded (FSDP2): each process keeps a shard of every weight, gradient and optimizer state.
  A layer's weights are all-gathered before it computes and freed afterwards; in the backward pass gradients are summed
  and each process keeps its shard (reduce-scatter). Each process has different rows.
- Along "tensor" the matrices of a layer are split (tensor parallelism): each process computes some of the heads and
  some of the SwiGLU's features, and the outputs of o_proj and down_proj are summed. All processes have the same rows.

Both are applied to the model from outside, with `DTensor`s. The weights outside of the layers (embedding, final norm,
head) are one FSDP unit, so a tied head remains the same Parameter as the embedding.

A step uses the same rows as on one device, and its gradient is the same sum divided by the same number of learned
tokens; only the order of additions differs.

Checkpoints do not depend on the number of processes. Rank zero writes them like a single process, tensor by tensor: it
broadcasts the index of the next tensor, and all processes gather it. Each process reads its shard.

Source: PyTorch, `torch.distributed.fsdp.fully_shard`, `torch.distributed.tensor.parallel`; Shoeybi et al. 2019,
"Megatron-LM", for which matrix is divided by rows and which by columns.
"""

# ruff: noqa: D102 - `ProcessGroup` documents its methods

import logging
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from llamarium.adapters.lora import adapted_modules
from llamarium.checkpoints.huggingface.writer import OutputTensor
from llamarium.checkpoints.save import tensor_weight
from llamarium.errors import TrainingError, escape
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.adapter import LAYER_LINEARS
from llamarium.train.config import RunConfig
from llamarium.train.distributed.process_group import ProcessGroup

T = TypeVar("T")

_STEP_TIMEOUT = timedelta(minutes=10)  # steps are short: a process that does not respond is considered lost
_WORK_TIMEOUT = timedelta(days=1)  # rank zero may read data or write a checkpoint; a dead process is noticed at once
_DONE, _FAILED = -1, -2


@contextmanager
def init_distributed(config: RunConfig, world_size: int) -> Generator["DistributedGroup"]:
    """Initialize the process group for the settings `device` and `tensor_parallel`, and destroy it at the end.

    TrainingError if `world_size` or the settings do not fit, or if a process is lost.
    """
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise TrainingError(f"device is {escape(kind)}; expected auto, cpu or cuda: each process takes its own device")
    if config.compile:
        raise TrainingError(
            "compile is for one device: the shards of several are gathered where it cannot see; leave it out"
        )
    if world_size % config.tensor_parallel:
        raise TrainingError(f"{world_size} processes cannot form groups of tensor_parallel {config.tensor_parallel}")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # what "cuda" means from here on
    # PyTorch logs that a tensor is gathered along one mesh dimension at a time, which is of no interest to users.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=_STEP_TIMEOUT)
    try:
        sizes = world_size // config.tensor_parallel, config.tensor_parallel
        yield DistributedGroup(init_device_mesh(kind, sizes, mesh_dim_names=("data", "tensor")))
    except RuntimeError as error:  # a lost connection; Gloo raises no more specific class
        gloos = any(word in str(error) for word in ("gloo", "Connection closed", "Timed out"))
        if not gloos and not isinstance(error, dist.DistError):
            raise
        raise TrainingError(
            f"another process of this run has ended, or does not answer; its own message says why "
            f"({escape(str(error).splitlines()[0], 200)})"
        ) from error
    finally:
        dist.destroy_process_group()


class DistributedGroup(ProcessGroup):
    """One of several processes; `mesh` is the device mesh ("data", "tensor")."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.world_size, self.is_rank_zero = mesh.size(), dist.get_rank() == 0
        self.num_shards, self.shard_idx = mesh["data"].size(), mesh["data"].get_local_rank()
        self._mesh = mesh
        slow_group = dist.new_group(backend="gloo", timeout=_WORK_TIMEOUT)
        assert isinstance(slow_group, dist.ProcessGroup)
        self._slow_group = slow_group
        self._offered: list[Tensor] = []
        self._root: nn.Module | None = None

    def rank_zero_first(self, work: Callable[[], T]) -> T:
        if not self.is_rank_zero and self._receive() == _FAILED:
            raise _others_failed()
        try:
            result = work()
        except BaseException:
            if self.is_rank_zero:
                self._broadcast(_FAILED)
            else:
                self._count_failed(1)
            raise
        if self.is_rank_zero:
            self._broadcast(_DONE)
        if self._count_failed(0):
            raise _others_failed()
        return result

    def check_equal(self, what: str, value: str) -> None:
        mine = torch.tensor([*value.encode()[-1024:]], dtype=torch.int64)
        length = torch.tensor([len(mine), -len(mine)])
        dist.all_reduce(length, dist.ReduceOp.MAX)
        same = length[0] == -length[1]
        if same:
            extremes = torch.stack((mine, -mine))
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
            same = torch.equal(extremes[0], -extremes[1])
        if not same:
            raise TrainingError(
                f"the processes see different {what}; here it is {escape(value, 100)}. The data and the run's folder "
                "must be the same for all of them, on a file system that all nodes share"
            )

    def shard_model(self, model: LlamaForCausalLM) -> None:
        tensor, data = self._mesh["tensor"], self._mesh["data"]
        if tensor.size() > 1:
            _check_divisible(model, tensor.size())
            for layer in model.model.layers:
                parallelize_module(layer, tensor, _plan())
        for layer in model.model.layers:
            _shard(layer, data)
        self._root = _shard(_Root(model), data)

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        assert self._root is not None, "shard_model comes first"
        loss: Tensor = self._root(work)
        if not torch.is_grad_enabled():  # without a backward pass FSDP does not free the gathered embedding and head
            _as_sharded(self._root).reshard()
        return loss

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / self._mesh["tensor"].size()).tolist()

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        tensor = self._mesh["tensor"]
        local: list[Tensor] = []
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device_type)
        for parameter in parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            local.append(gradient.to_local())
            if gradient.device_mesh.ndim == 1 and tensor.size() > 1:
                # Processes along "tensor" compute the same gradient; on a GPU the last bits may differ, so average them
                # to keep the copies identical.
                dist.all_reduce(local[-1], group=tensor.get_group())
                local[-1] /= tensor.size()
            length = torch.linalg.vector_norm(local[-1], dtype=torch.float64)
            squares += length.square() * (_num_shards(gradient) / self.world_size)
        total = squares.cpu()  # sync: the norm decides whether to update
        dist.all_reduce(total)
        norm = float(total.sqrt())
        if norm > max_norm:
            torch._foreach_mul_(local, max_norm / (norm + 1e-6))  # pyright: ignore - as clip_grad_norm_ does
        return norm

    def any_signal(self, signals: list[int]) -> Sequence[int]:
        received = torch.tensor(signals[0] if signals else 0)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        return [int(received)] if received else []

    def on_rank_zero(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        self._offered = list(tensors)
        if self.is_rank_zero:
            try:
                work()
            except BaseException:
                self._broadcast(_FAILED)
                raise
            self._broadcast(_DONE)
        else:
            while (request := self._receive()) >= 0:
                _gather(self._offered[request])
            if request == _FAILED:
                raise _others_failed()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            self._broadcast(next(i for i, offered in enumerate(self._offered) if offered is tensor))
        return _gather(tensor)

    def weights(self, model: LlamaForCausalLM) -> list[OutputTensor]:
        return [tensor_weight(key, p, partial(self.full_tensor, p)) for key, p in model.named_parameters()]

    def distribute(self, values: Tensor, like: Tensor) -> Tensor:
        values = values.to(like.device)
        if not isinstance(like, DTensor):
            return values
        mesh = like.device_mesh
        copies = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return copies.redistribute(mesh, like.placements)

    def _broadcast(self, number: int) -> None:
        dist.broadcast(torch.tensor(number), 0, self._slow_group)

    def _receive(self) -> int:
        number = torch.tensor(0)
        dist.broadcast(number, 0, self._slow_group)
        return int(number)

    def _count_failed(self, mine: int) -> int:
        count = torch.tensor(mine)
        dist.all_reduce(count, group=self._slow_group)
        return int(count)


class _Root(nn.Module):
    """FSDP root module: calling it gathers the weights outside of the layers."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        return work()


def _shard(module: nn.Module, data: DeviceMesh) -> nn.Module:
    """Shard the weights of a module except those of inner FSDP units; gradients are summed, not averaged."""
    unit = _as_sharded(fully_shard(module, mesh=data))
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)
    return module


def _as_sharded(module: object) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _plan() -> dict[str, ParallelStyle]:
    """Split the last matrix of each block (o, down) by rows, and the others by columns (heads, features)."""
    return {
        path: RowwiseParallel() if name in ("o", "down") else ColwiseParallel() for name, path in LAYER_LINEARS.items()
    }


def _check_divisible(model: LlamaForCausalLM, parts: int) -> None:
    if any(adapted_modules(model)):
        raise TrainingError("adapters are not divided: tensor_parallel must be 1; all processes then share the data")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(model.config, name)) % parts:
            raise TrainingError(f"tensor_parallel is {parts}, and {name} {size} is no multiple of it")


def _num_shards(tensor: DTensor) -> int:
    """Return the number of processes with different shards of a tensor."""
    sizes = [tensor.device_mesh.size(i) for i, where in enumerate(tensor.placements) if not where.is_replicate()]
    return torch.Size(sizes).numel()


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def _others_failed() -> TrainingError:
    return TrainingError("another process of this run has failed; its own message says why")
