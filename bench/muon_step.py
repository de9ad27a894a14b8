"""Muon's step: the processor's time to update a small model's weights, with instructions for bfloat16 and without.

    python bench/muon_step.py --threads 1 --rounds 2

PyTorch's Muon orthogonalises in bfloat16. Other processors are emulated: oneDNN is kept from newer instructions
(`ONEDNN_MAX_CPU_ISA`), each kind in a process of its own. Gradients are random numbers; no loss is computed.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import common
from learning_rates import SHAPE
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.train.optim import make_optimizers
from llamarium.train.setup import multiplies_bfloat16

KINDS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")


def _user() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """Return the median milliseconds of user time of AdamW's and Muon's step, by shape."""
    torch.set_num_threads(threads)
    sizes = {name: value for name, value in SHAPE.items() if name not in ("preset", "context")}
    shapes = {
        "2.4M": replace(preset("small"), vocab_size=65, **sizes),
        "10.7M": replace(preset("nano-gpt"), vocab_size=65),
    }
    results: dict[str, Any] = {"fast bfloat16": multiplies_bfloat16()}
    for label, shape in shapes.items():
        for name in ("adamw", "muon"):
            model, times = init_weights(LlamaForCausalLM(shape), 0), list[float]()
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizers = make_optimizers(model, name, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
            for _ in range(rounds + 1):  # the first makes the state
                begin = _user()
                for optimizer in optimizers:
                    optimizer.step()
                times.append(_user() - begin)
            results[f"{label} {name} ms"] = 1000 * median(times[1:])
    return results


def main() -> None:
    """Measure each kind apart, and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--apart", action="store_true", help="measure here")
    options = parser.parse_args()
    if options.apart:
        print(json.dumps(measure(options.rounds, options.threads)))
        return
    command = [sys.executable, __file__, "--apart", "--rounds", str(options.rounds), "--threads", str(options.threads)]
    table: list[dict[str, Any]] = []
    for kind in KINDS:
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": kind}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        table.append({"instructions": kind, **json.loads(done.stdout)})
    common.report("muon-step", options, table, {"kinds": table})


if __name__ == "__main__":
    main()
