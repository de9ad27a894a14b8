"""What a machine can do for a model, and what holds it back: memory's rate and a model's speed by number of threads."""

import os
from dataclasses import dataclass
from pathlib import Path

from llamarium.inspect.measures.speed import Work, measure, memory_speed, some_memory
from llamarium.kernels.threads import allowed_cpus, computing_with, num_threads
from llamarium.runtime.runner import Runner

_WRITING = Work(num_cached=64, num_new=24)
_READING = Work(num_prompt=192)
_ROUNDS = 3
_FASTER = 1.05  # another number of threads is worth saying from here on


@dataclass(frozen=True, slots=True)
class ThreadsSpeed:
    """What so many threads reach.

    Attributes:
        num_threads: How many.
        memory_bytes_per_s: What they read from memory together.
        decode_tokens_per_s: Of one answer.
        decode_memory_share: The bytes a second that decoding reads, of `memory_bytes_per_s`.
        prefill_tokens_per_s: Of a prompt of 192 tokens.
    """

    num_threads: int
    memory_bytes_per_s: float
    decode_tokens_per_s: float
    decode_memory_share: float
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """A model's speed on this machine.

    Attributes:
        used: With the number of threads that commands use.
        others: With one thread, half of them, and all processors that this process may keep busy.
        busy_cores: Cores that other programs, or other virtual machines, took meanwhile; 0 where it is not known.
    """

    used: ThreadsSpeed
    others: tuple[ThreadsSpeed, ...]
    busy_cores: float

    @property
    def better(self) -> ThreadsSpeed | None:
        """Another number of threads that decodes faster by more than noise, or None."""
        best = max(self.others, key=lambda speed: speed.decode_tokens_per_s, default=self.used)
        return best if best.decode_tokens_per_s > _FASTER * self.used.decode_tokens_per_s else None


def measure_machine(runner: Runner) -> MachineSpeed:
    """Measure a model that the C kernels run, in less than a minute for one of 135M parameters.

    Args:
        runner: A runner with `is_native`, and a context of at least 193 positions.
    """
    before = _Times.now()
    usual = num_threads()
    counts = dict.fromkeys((usual, 1, (usual + 1) // 2, allowed_cpus()))
    current, *others = (_with_threads(runner, count) for count in counts)
    return MachineSpeed(current, tuple(others), _Times.now().busy_cores_since(before))


def _with_threads(runner: Runner, count: int) -> ThreadsSpeed:
    with computing_with(count):
        writing = measure(runner, _WRITING, num_rounds=_ROUNDS)
        reading = measure(runner, _READING, num_rounds=_ROUNDS)
        share = 0.0 if writing.memory_share is None else writing.memory_share
        return ThreadsSpeed(count, memory_speed(some_memory()), writing.tokens_per_s, share, reading.tokens_per_s)


@dataclass(frozen=True, slots=True)
class _Times:
    """Processor seconds since the machine, and this process, began. Source: proc(5), /proc/stat."""

    machine: float | None
    own: float
    wall: float

    @classmethod
    def now(cls) -> "_Times":
        times = os.times()
        try:
            with Path("/proc/stat").open(encoding="ascii") as file:
                ticks = [int(field) for field in file.readline().split()[1:9]]
            user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
        except (OSError, ValueError):
            return cls(None, times.user + times.system, times.elapsed)
        if allowed_cpus() < (os.cpu_count() or 1):  # a container's share: the rest of the host is none of its business
            return cls(None, times.user + times.system, times.elapsed)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return cls(busy, times.user + times.system, times.elapsed)

    def busy_cores_since(self, before: "_Times") -> float:
        if self.machine is None or before.machine is None or self.wall <= before.wall:
            return 0.0
        other_seconds = (self.machine - before.machine) - (self.own - before.own)
        return max(0.0, other_seconds / (self.wall - before.wall))
