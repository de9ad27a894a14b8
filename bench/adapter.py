"""Adapters: tokens per second of one greedy stream with a LoRA adapter on every Linear, against the base alone.

    python bench/adapter.py                          the built-in SmolLM2 (Q4_1), rank 16
    python bench/adapter.py --model folder --rank 64

Both run in one process over the same weights, in turn. Rank 16 on every Linear of SmolLM2 is 19.5 MB of float32 beside
84 MB in Q4_1, which every token reads, and the products of low rank need barriers of their own. The goal
is at least 0.9 of the base's speed.
"""

import tempfile
from pathlib import Path

import torch

import common
import llamarium
from decode import ours
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora, lora_linears
from llamarium.adapters.save import save_adapter
from peers import token_ids


def make_adapter(model: str, rank: int, folder: Path) -> None:
    """Save an adapter of random numbers, on every Linear but the head."""
    base = llamarium.load(model, device="cpu").model
    apply_lora(base, LoRAConfig(r=rank))
    for _, linear in lora_linears(base):
        torch.nn.init.normal_(linear.lora_B.weight, std=1e-3)
    save_adapter(base, folder, base_model=model)


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_adapter(options.model, options.rank, Path(folder))
        adapted = llamarium.load(adapter=folder, device="cpu")
    base = llamarium.load(options.model, device="cpu")
    prompt = token_ids(base.config.vocab_size, options.prompt_tokens)
    medians = common.alternate(
        options.rounds,
        {
            "adapter": lambda: ours(adapted.runner, prompt, options.new_tokens),
            "base": lambda: ours(base.runner, prompt, options.new_tokens),
        },
    )
    ratio = medians["adapter / base"]["tokens_per_s"]
    rows = [
        {"runs": name, "tokens/s": medians[name]["tokens_per_s"], "of the base": ratio if name == "adapter" else 1.0}
        for name in ("adapter", "base")
    ]
    common.report(f"adapter-{Path(options.model).name}", options, rows, medians)


if __name__ == "__main__":
    main()
