"""What it costs to see: a pass that hands out what it computes on the way, against the same pass without.

    python bench/taps.py [--model NAME] [--tokens 64]

Three passes over the same tokens, in turn: as a request runs it; with a recorder that wants nothing; and with one that
wants everything that the runner can hand out.
"""

import time
from functools import partial

import common
import llamarium
from llamarium.inspect.forward import Memory, batches
from llamarium.runtime.runner import Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Key, Taps


def everything(runner: Runner) -> list[Key]:
    """Return all that a runner hands out."""
    names = [name for name in ACTIVATIONS if name not in (*FROM_CACHE, "logits")]
    layers = range(runner.config.num_hidden_layers)
    return [(name, layer) for name in names for layer in (layers if ACTIVATIONS[name].in_layer else (None,))]


def one_pass(runner: Runner, num_tokens: int, keys: list[Key] | None) -> dict[str, float]:
    """Run the tokens once and return the seconds."""
    memory = Memory(runner, num_tokens)
    (batch,) = batches([memory.begin([i % 1000 for i in range(num_tokens)], num_tokens)])
    taps = None if keys is None else Taps(keys)
    begin = time.perf_counter()
    runner.run(batch, memory.cache, taps)
    return {"seconds": time.perf_counter() - begin}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the model (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the pass (default %(default)s)")
    options = parser.parse_args()
    runner = llamarium.load(options.model).runner
    keys_of = {"everything": everything(runner), "nothing": [], "no recorder": None}
    sides = {name: partial(one_pass, runner, options.tokens, keys) for name, keys in keys_of.items()}
    medians = common.alternate(options.rounds, sides)
    plain = common.alternate(options.rounds, {name: sides[name] for name in ("nothing", "no recorder")})
    medians |= {"nothing / no recorder": plain["nothing / no recorder"]}
    rows = [{"what": name, "seconds or ratio": values["seconds"]} for name, values in medians.items()]
    common.report("taps", options, rows, medians)


if __name__ == "__main__":
    main()
