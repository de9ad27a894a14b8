"""Serves a learner's model to a runner: `python -m llamarium.course.serve FOLDER MODEL CONNECTION PLACE`.

`runtime/process/runner.py` starts this process and sends requests over the connection, each with the descriptor of the
KV cache's file. The learner's functions run only here. Their failures are returned as error messages.
"""

import mmap
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarium.checkpoints.open import open_model
from llamarium.checkpoints.weights import native_weights
from llamarium.config import HEAD
from llamarium.course.arguments import STEPS_OF_A_PASS
from llamarium.course.compare import as_results, shape_problem
from llamarium.course.folder.source import is_empty
from llamarium.course.guard import LearnerError
from llamarium.course.learner import Learner
from llamarium.course.outline import file_of
from llamarium.course.passes import KeysAndValues, Pass, Weights
from llamarium.course.step import Function, Step
from llamarium.course.steps.types import Floats, Ints
from llamarium.course.worker import bound_memory, serve
from llamarium.errors import OptionError, escape
from llamarium.options.loading import LoadOptions
from llamarium.runtime.process.cache import block_bytes, mapped, read_past
from llamarium.runtime.process.frames import read_arrays, send
from llamarium.runtime.taps import Key, Taps, axis_sizes, sizes_of


class PlacedError(LearnerError):
    """A failure of a learner's function, with its step and layer."""

    def __init__(self, step: str, layer: int | None, words: str) -> None:
        place = step if layer is None else f"{step}, layer {layer}"
        super().__init__("raised", f"{place}: {words}")


def main(folder: str, model: str, connection: str, place: str) -> int:
    """Load the model and the functions, and answer requests until the connection is closed."""
    return serve(connection, lambda channel: Answering(read_weights(model), Path(folder), channel, int(place)).answer)


def read_weights(model: str) -> Weights:
    """Read all weights of a model as float32; LlamariumError if they cannot be read or are not finite."""
    checkpoint = open_model(model, with_tokenizer=False).checkpoint
    read: dict[str, Floats] = {}
    weights = Weights(checkpoint.config, read.__getitem__)  # rejects unsupported models before their weights are read
    found = native_weights(checkpoint, LoadOptions(dtype="float32", device="cpu", strict=True))
    if found is None:
        raise OptionError(f"the weights of {escape(model)} are NF4, or the C kernels are missing; use another model")
    read.update({key: weight.data for key, weight in found.items()})
    return weights


class Answering:
    """Answers requests with a learner's model.

    Args:
        weights: The model's weights.
        folder: The learner's folder.
        channel: The connection.
        place: Descriptor of a file that receives the index of the running layer.

    Raises:
        LearnerError: If a function of the forward pass is missing, empty or cannot be imported.
    """

    def __init__(self, weights: Weights, folder: Path, channel: socket.socket, place: int) -> None:
        if empty := [step.name for step in STEPS_OF_A_PASS if is_empty(step, folder / file_of(step))]:
            words = f"these steps are missing or still empty: {', '.join(empty)}; `llamarium build check` leads to them"
            raise LearnerError("empty", words)
        self._weights, self._channel, self._config = weights, channel, weights.config
        self._sizes = axis_sizes(self._config)
        self._mapped: tuple[tuple[int, ...], Floats] = (), np.empty(0, np.float32)
        self._place = np.frombuffer(mmap.mmap(place, 8), np.int64)
        self._place[0] = -1
        self._num_layers = 0
        self._pass = Pass(self._weights)
        past_bytes = self._config.max_position_embeddings * block_bytes(self._config, 1)
        bound_memory(3 * past_bytes)  # the old cache, the new one, and copies for the heads
        os.chdir(folder)
        sys.dont_write_bytecode = True
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
        self._functions = {step.name: self._imported(step, folder / file_of(step)) for step in STEPS_OF_A_PASS}

    def answer(self, header: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Answer one request."""
        arrays = read_arrays(self._channel, header)
        try:
            if header["ask"] == "run":
                cache = self._cache(descriptors[0], header["block_size"])
                answers = self._run(cache, [(name, layer) for name, layer in header["taps"]], *arrays)
            elif header["ask"] == "weight":
                whole = self._weights.head if header["key"] == HEAD else self._weights[header["key"]]
                answers = [whole[rows] for rows in arrays] or [whole]
            else:
                answers = [self._begin(len(arrays[0]), 0, None).read_stream(arrays[0])]
        except LearnerError as error:
            send(self._channel, {"error": str(error)})
        else:
            send(self._channel, {}, answers)

    def _cache(self, descriptor: int, block_size: int) -> Floats:
        """Return the KV cache in a file; the most recent one stays mapped."""
        status = os.fstat(descriptor)
        which = status.st_dev, status.st_ino, status.st_size, block_size
        if which != self._mapped[0]:
            self._mapped = which, mapped(descriptor, self._config, block_size)
        os.close(descriptor)
        return self._mapped[1]

    def _run(
        self, cache: Floats, keys: Sequence[Key], ids_M: Ints, positions_M: Ints, sequences_M: Ints,
        block_tables: Ints, rows_W: Ints,
    ) -> list[Floats]:  # fmt: skip
        """Run the sequences of a batch one by one; return logits and tapped activations."""
        borders = (np.flatnonzero(np.diff(sequences_M)) + 1).tolist()
        parts: list[list[Floats]] = []
        for begin, end in zip([0, *borders], [*borders, len(ids_M)], strict=True):
            rows = rows_W[(rows_W >= begin) & (rows_W < end)] - begin
            table = block_tables[sequences_M[begin]]
            parts.append(self._run_sequence(cache, keys, ids_M[begin:end], int(positions_M[begin]), table, rows))
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def _run_sequence(
        self, cache: Floats, keys: Sequence[Key], ids_T: Ints, start: int, table: Ints, rows_W: Ints
    ) -> list[Floats]:
        past = [read_past(cache, layer, table.tolist(), start) for layer in range(self._config.num_hidden_layers)]
        taps = Taps(keys) if keys else None
        running = self._begin(len(ids_T), start, taps)
        hidden_TD, kept = running.hidden(ids_T, past)
        self._keep(cache, table, past, kept)
        tapped = [] if taps is None else [self._tapped(taps, key) for key in keys]
        self._sizes["T"] = len(rows_W)
        if not len(rows_W):
            return [np.empty((0, self._config.vocab_size), np.float32), *tapped]
        return [self._functions["head"](hidden_TD[rows_W], self._weights.head), *tapped]

    def _begin(self, num_tokens: int, num_past: int, taps: Taps | None) -> Pass:
        self._num_layers = 0
        self._sizes |= {"T": num_tokens, "S": num_past + num_tokens}
        self._pass = Pass(self._weights, self._functions, taps)
        return self._pass

    def _keep(
        self, cache: Floats, table: Ints, past: Sequence[KeysAndValues], kept: Sequence[KeysAndValues]
    ) -> None:  # fmt: skip
        """Write new keys and values to the KV cache; earlier ones may be shared between sequences, so check them."""
        num_all, start = self._sizes["S"], len(past[0][0])
        positions_T = np.arange(start, num_all)
        blocks_T, slots_T = table[positions_T // cache.shape[3]], positions_T % cache.shape[3]
        for layer, (before, after) in enumerate(zip(past, kept, strict=True)):
            for part, (old, new) in enumerate(zip(before, after, strict=True)):
                if len(new) != num_all:
                    raise PlacedError("layer", layer, "does not call attention")
                if not np.array_equal(old, new[:start]):
                    raise PlacedError("attend_cached", layer, "changes cached keys or values")
                cache[blocks_T, layer, part, slots_T] = new[start:]

    def _tapped(self, taps: Taps, key: Key) -> Floats:
        """Return an activation of a sequence; if it was computed repeatedly, the last one."""
        name, layer = key
        tapped = taps.kept[key]
        if not tapped:
            raise PlacedError("trunk" if layer is None else "layer", layer, f"does not compute {name}")
        shape = (self._sizes["T"], *sizes_of(name, self._config))
        if np.shape(tapped[-1]) != shape:
            raise PlacedError("layer", layer, f"{name} has shape {np.shape(tapped[-1])}; expected {shape}")
        return np.asarray(tapped[-1], np.float32)

    def _imported(self, step: Step, path: Path) -> Function:
        try:
            return self._checked(step, Learner(step, path))
        except LearnerError as error:
            raise PlacedError(step.name, None, str(error)) from None

    def _checked(self, step: Step, function: Function) -> Function:
        """Wrap a function so that its results are float32 of the right shapes; otherwise PlacedError is raised."""

        def call(*args: Any) -> Any:
            layer = self._pass.layer
            self._place[0] = -1 if layer is None else layer
            self._num_layers += step.name == "layer"
            if self._num_layers > 4 * self._config.num_hidden_layers:
                raise PlacedError("trunk", None, "runs the layers too many times")
            try:
                found = function(*args)
            except PlacedError:
                raise
            except LearnerError as error:
                raise PlacedError(step.name, layer, str(error)) from None
            results = as_results(found)
            shapes = ([self._sizes[axis] for axis in output.split()[1]] for output in step.outputs)
            problem = shape_problem(step.outputs, results, [np.broadcast_to(np.float32(0), shape) for shape in shapes])
            if problem is not None:
                raise PlacedError(step.name, layer, problem)
            floats = [np.asarray(result, np.float32) for result in results]
            return tuple(floats) if len(floats) > 1 else floats[0]

        return call


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
