"""One side of `peer_table.py`: a program of its own, which loads a GGUF file and answers what is asked of it.

    python bench/peer.py NAME FILE.gguf THREADS

It says on a line what it runs with, and answers each line `[prompt tokens, new tokens, answers]` with `[seconds of the
prompts, seconds of a step]`, a step being one more token of each answer; null is what it cannot do. Prompts are other
ones each time, since some sides keep what they know of earlier ones. Each is asked through the interface that its
package offers, with that package's defaults.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

CONTEXT = 8448  # tokens in all, for one answer or several

Prompts = list[list[int]]
Seconds = tuple[float, float]


class Side(Protocol):
    """A program with a model; `about` says what it runs with."""

    about: str

    def run(self, prompts: Prompts, num_new: int) -> Seconds | None:
        """Return the seconds of the prompts, and of a step after them."""
        ...


class Llamarium:
    """This library, through the engine that users run."""

    def __init__(self, path: str, num_threads: int) -> None:
        import llamarium
        from llamarium.kernels import native
        from llamarium.kernels.threads import set_num_threads

        set_num_threads(num_threads)
        self.about = native.kernels() or "PyTorch"
        self._runner = llamarium.load(path).runner

    def run(self, prompts: Prompts, num_new: int) -> Seconds | None:
        """As `Side`."""
        from llamarium.generation.loop import generate_tokens
        from llamarium.sampling.params import SamplingParams

        wanted = [SamplingParams(temperature=0.0, max_tokens=num_new + 1)] * len(prompts)
        begin, last = time.perf_counter(), len(prompts) - 1
        came = [time.perf_counter() for event in generate_tokens(self._runner, prompts, wanted) if event.row == last]
        return came[0] - begin, (came[-1] - came[0]) / max(1, num_new)


class LlamaCpp:
    """llama.cpp in xllamacpp's wheel: the code of its server, in this process, and what it says of its times."""

    def __init__(self, path: str, num_threads: int) -> None:
        import xllamacpp

        self.about = " ".join(part.split()[0] for part in xllamacpp.get_system_info().split("|") if "= 1" in part)
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.kv_unified = path, CONTEXT, 8, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        self._server = xllamacpp.Server(params)

    def run(self, prompts: Prompts, num_new: int) -> Seconds | None:
        """As `Side`."""

        def ask(prompt: list[int]) -> dict[str, Any]:
            same = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
            return self._server.handle_completions({"prompt": prompt, "n_predict": num_new + 1, **same})["timings"]

        with ThreadPoolExecutor(len(prompts)) as threads:
            times = list(threads.map(ask, prompts))
        steps = [time["predicted_ms"] / max(1, time["predicted_n"] - 1) for time in times]
        return max(time["prompt_ms"] for time in times) / 1000, max(steps) / 1000


class IkLlamaCpp:
    """ik_llama.cpp in ik-llama-cpp-python's wheel: its `llama_decode`, one answer at a time."""

    def __init__(self, path: str, num_threads: int) -> None:
        import ik_llama_cpp

        self.about = "ik-llama-cpp-python"
        self._llama = ik_llama_cpp.IkLlama(path, n_ctx=CONTEXT, n_threads=num_threads, verbose=False)
        self._context = self._llama._context  # which does not keep the model by itself

    def run(self, prompts: Prompts, num_new: int) -> Seconds | None:
        """As `Side`."""
        from ik_llama_cpp._internals import make_batch_range, make_batch_single

        if len(prompts) > 1:
            return None
        (prompt,) = prompts
        self._context.kv_cache_clear()
        begin = time.perf_counter()
        for start in range(0, len(prompt), 512):
            if self._context.decode(make_batch_range(prompt[start : start + 512], pos_start=start)):
                return None
        read = time.perf_counter()
        for i in range(num_new):
            self._context.decode(make_batch_single(prompt[i % len(prompt)], len(prompt) + i))
        return read - begin, (time.perf_counter() - read) / max(1, num_new)


class OpenVino:
    """OpenVINO GenAI: its `LLMPipeline` as it comes, with its own reader of GGUF."""

    def __init__(self, path: str, num_threads: int) -> None:
        import openvino_genai

        self.about = openvino_genai.get_version().split("-")[0]
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=num_threads)

    def run(self, prompts: Prompts, num_new: int) -> Seconds | None:
        """As `Side`."""
        import openvino
        import openvino_genai

        if len(prompts) > 1:
            return None
        wanted = openvino_genai.GenerationConfig(max_new_tokens=num_new + 1, ignore_eos=True, do_sample=False)
        found = self._pipeline.generate(openvino.Tensor(np.array(prompts)), wanted).perf_metrics
        return found.get_ttft().mean / 1000, found.get_tpot().mean / 1000


SIDES = {"Llamarium": Llamarium, "llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp, "OpenVINO": OpenVino}


def main() -> None:
    """Load the model, then answer line after line; what a side prints itself goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, path, num_threads = sys.argv[1:]
    side: Side = SIDES[name](path, int(num_threads))
    print(json.dumps(side.about), file=answers, flush=True)
    random = np.random.default_rng(0)
    for line in sys.stdin:
        num_prompt, num_new, num_rows = json.loads(line)
        prompts = random.integers(1000, 20000, (num_rows, num_prompt)).tolist()
        print(json.dumps(side.run(prompts, num_new)), file=answers, flush=True)


if __name__ == "__main__":
    main()
