"""What a paged cache wastes: slots of blocks that answers have, and that hold no token.

    python bench/blocks.py [--block-size 32] [--prompt-tokens lognormal:400:0.8] [--max-tokens uniform:16:512]

A tiny model of random weights answers --requests prompts of mixed lengths, 32 side by side; after each step the slots
are counted. No two prompts begin alike, so nothing is shared. Nothing here is timed.
"""

import dataclasses
import random

import common
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.load_test.workload import Lengths
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.sampling.params import SamplingParams


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--block-size", type=int, default=32, help="slots of a block (default %(default)s)")
    parser.add_argument("--requests", type=int, default=100, metavar="N")
    parser.add_argument("--prompt-tokens", type=Lengths.parse, default=Lengths.parse("lognormal:400:0.8"))
    parser.add_argument("--max-tokens", type=Lengths.parse, default=Lengths.parse("uniform:16:512"))
    options = parser.parse_args()
    config = dataclasses.replace(preset("tiny"), max_position_embeddings=16384)
    model = init_weights(LlamaForCausalLM(config), seed=0).eval().requires_grad_(False)
    engine = Engine(ModuleRunner(model), 4096, max_num_seqs=32, block_size=options.block_size)
    source = random.Random(0)
    for _ in range(options.requests):
        prompt = [source.randrange(config.vocab_size) for _ in range(options.prompt_tokens.draw(source))]
        params = SamplingParams(max_tokens=options.max_tokens.draw(source), temperature=0)
        engine.add(Request(prompt[:8192], params))
    computed_slots = used_slots = 0
    while not engine.is_idle:
        engine.step()
        computed_slots += sum(sequence.num_computed for sequence in engine.sequences)
        used_slots += engine.snapshot().used_blocks * options.block_size
    row = {
        "block size": options.block_size,
        "mean tokens": computed_slots / engine.counts.steps,
        "wasted": 1 - computed_slots / used_slots,
    }
    options.prompt_tokens, options.max_tokens = options.prompt_tokens.spelling, options.max_tokens.spelling
    common.report("blocks", options, [row], {"rows": [row]})


if __name__ == "__main__":
    main()
