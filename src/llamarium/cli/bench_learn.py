"""`llamarium bench learn-and-write`: all tokens of a text at once, against one after the other.

A text to learn is known: one pass predicts the token after each of its tokens. A text to write is not known: each token
needs the one before it. The first two measurements are of the same modules in PyTorch, with fresh weights in float32;
the others are of the model as it answers.
"""

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from llamarium.cli.options import FALLBACK_MODEL, importing_torch, load_llama
from llamarium.cli.output import emit, show, status, table
from llamarium.errors import ContextLengthError, counted
from llamarium.extras import need_torch

if TYPE_CHECKING:
    from llamarium.config import ModelConfig

NUM_TOKENS, ROUNDS = 128, 5
_WHAT = {
    "learn": "learn: all at once, forward and backward",
    "write": "write: one at a time, the same modules",
    "read": "read: all at once, as it answers",
    "answer": "write: one at a time, as it answers",
}


def run(args: argparse.Namespace) -> int:
    """Run the four measurements, print them, and explain the difference."""
    need_torch("bench learn-and-write", "train")
    args.model = args.model or FALLBACK_MODEL
    num_tokens, num_rounds = args.max_tokens or NUM_TOKENS, args.rounds or ROUNDS
    llama = load_llama(args)
    from llamarium.inspect.measures.speed import Work
    from llamarium.inspect.measures.speed import measure as measure_runner

    room = llama.config.max_position_embeddings
    if num_tokens + 2 > room:
        raise ContextLengthError(f"{num_tokens} tokens; the model's context holds {room}: use at most {room - 2} (-n)")
    with status("measuring how fast it learns and writes"):
        speeds = measure(llama.config, llama.runner.device, num_tokens, num_rounds)
        for name, work in (("read", Work(num_prompt=num_tokens)), ("answer", Work(num_new=num_tokens))):
            speeds[name] = measure_runner(llama.runner, work, num_rounds=num_rounds).tokens_per_s
    why = explain(speeds, num_tokens)
    if args.json:
        emit({"model": llama.name, "num_tokens": num_tokens, "tokens_per_s": speeds, "why": why})
        return 0
    print(f"{llama.name}: one text of {counted(num_tokens, 'token')}, on {llama.runner.device}\n")
    result = table("", "tokens/s", "time a token", right=("tokens/s", "time a token"))
    for name, speed in speeds.items():
        result.add_row(_WHAT[name], f"{speed:,.0f}", f"{1e6 / speed:,.0f} µs")
    show(result)
    from rich.text import Text

    show(Text(f"\n{why}"))
    return 0


def measure(config: "ModelConfig", device: str, num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Return the tokens/s of PyTorch modules for learning a text of `num_tokens`, and for writing as many."""
    with importing_torch():
        import torch

        from llamarium.api import Llama
        from llamarium.inspect.measures.speed import Work
        from llamarium.inspect.measures.speed import measure as measure_runner
        from llamarium.model import LlamaForCausalLM
        from llamarium.model.init import init_weights
        from llamarium.train.data.batch import TrainingBatch
        from llamarium.train.optim import make_optimizers
        from llamarium.train.step import train_step

    model = init_weights(LlamaForCausalLM(config).to(device), seed=0)
    optimizers = make_optimizers(model, "adamw", learning_rate=1e-4, weight_decay=0.0, betas=(0.9, 0.95))
    ids_BU = torch.arange(num_tokens + 1)[None] % config.vocab_size
    batch = TrainingBatch(ids_BU[:, :-1], ids_BU[:, 1:], torch.arange(num_tokens)[None], None)
    seconds: list[float] = []
    for _ in range(num_rounds + 1):
        start = time.perf_counter()
        train_step(model, optimizers, [batch])  # sync: it returns the loss as a number
        seconds.append(time.perf_counter() - start)
    model.requires_grad_(False)
    written = measure_runner(
        Llama("the modules", model.eval(), None).runner, Work(num_new=num_tokens), num_rounds=num_rounds
    )
    return {"learn": num_tokens / statistics.median(seconds[1:]), "write": written.tokens_per_s}


def explain(speeds: dict[str, float], num_tokens: int) -> str:
    """Explain in a sentence why learning and writing differ, with the measured values."""
    ratio = speeds["learn"] / speeds["write"]
    ratio_text = f"{ratio:.1f} times as fast as" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as"
    return (
        f"A text to learn is known, so one pass computes all {num_tokens} tokens side by side, and a weight that is "
        "read serves all of them; a text to write is not known, so each token waits for the one before it, and every "
        f"weight is read again for it: learning is {ratio_text} writing here, though it computes three times as much "
        "for a token (forward, and twice that backward)."
    )
