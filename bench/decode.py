"""Decode: tokens per second of one greedy stream, against `transformers`' generate() on the same weights.

    python bench/decode.py --model llama-3.2-1b     random weights in the real shape, bfloat16
    python bench/decode.py --model smollm2-135m     the built-in GGUF, unpacked to bfloat16 by both

Timed from the first new token to the last, so that prefill is left out on both sides. Every step reads every weight
once, so GB/s of weights read, against what the memory can deliver, is the share of the limit that is reached.
"""

import time

import torch

import common
from llamarium.generation.loop import generate_tokens
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from peers import load_ours, load_theirs, token_ids


class Clock:
    """A `transformers` streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        """Note the time; the first call is the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def ours(runner: Runner, prompt: list[int], num_tokens: int) -> dict[str, float]:
    """Return tokens/s of our own loop."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    times = [time.perf_counter() for _ in generate_tokens(runner, [prompt], [params])]
    return {"tokens_per_s": (len(times) - 1) / (times[-1] - times[0])}


def theirs(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> dict[str, float]:
    """Return tokens/s of `transformers`' generate()."""
    clock = Clock()
    ids = torch.tensor([prompt])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    times = clock.times[1:]
    return {"tokens_per_s": (len(times) - 1) / (times[-1] - times[0])}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=["llama-3.2-1b", "smollm2-135m"])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llama, peer = load_ours(options.model), load_theirs(options.model)
    runner, prompt = llama.runner, token_ids(llama.config.vocab_size, options.prompt_tokens)
    medians = common.alternate(
        options.rounds,
        {
            "llamarium": lambda: ours(runner, prompt, options.new_tokens),
            "transformers": lambda: theirs(peer, prompt, options.new_tokens),
        },
    )
    weight_bytes = sum({p.data_ptr(): p.numel() * p.element_size() for p in llama.model.parameters()}.values())
    rows = [
        {
            "model": options.model,
            "program": name,
            "tokens/s": medians[name]["tokens_per_s"],
            "GB/s of weights": medians[name]["tokens_per_s"] * weight_bytes / 1e9,
            "times transformers": medians["llamarium / transformers"]["tokens_per_s"] if name == "llamarium" else 1.0,
        }
        for name in ("llamarium", "transformers")
    ]
    common.report(f"decode-{options.model}", options, rows, {"weight_bytes": weight_bytes, **medians})


if __name__ == "__main__":
    main()
