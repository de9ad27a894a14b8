"""What a KV cache in 8 and 4 bits gains: tokens/s behind a deep cache, by its dtype.

    python bench/kv_speed.py --model smollm2-135m --depth 8000 --rounds 7 --save

Each round decodes some tokens over a cache of each dtype in turn; the cache is filled without computing. A ratio is the
median of the rounds' ratios to `auto`'s rate.
"""

from functools import partial
from pathlib import Path
from typing import Any, get_args

import common
from kv_cache import load_native
from llamarium.inspect.measures.speed import Work, run_round
from llamarium.kv_codes import CacheDtype
from llamarium.runtime.native.runner import NativeRunner


def main() -> None:
    """Measure each dtype in turn."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name or a file (default %(default)s)")
    parser.add_argument("--depth", type=int, default=8000, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens of a round (default %(default)s)")
    options = parser.parse_args()
    _, runner = load_native(options.model, options.threads)

    dtypes: tuple[CacheDtype, ...] = get_args(CacheDtype)
    works = {
        dtype: Work(num_cached=options.depth, num_new=options.new_tokens, kv_cache_dtype=dtype) for dtype in dtypes
    }
    with common.Load() as load:
        sides = {dtype: partial(one_round, runner, work) for dtype, work in works.items()}
        medians: Any = common.alternate(options.rounds, sides)

    rows = [
        {
            "cache": dtype,
            "tokens/s": medians[dtype]["tokens_per_s"],
            "of auto": 1 / medians[f"auto / {dtype}"]["tokens_per_s"] if dtype != "auto" else 1.0,
        }
        for dtype in dtypes
    ]
    name = f"kv-speed-{Path(options.model).stem}-{options.depth}"
    common.report(name, options, rows, {**medians, "others": load.others})


def one_round(runner: NativeRunner, work: Work) -> dict[str, float]:
    """Decode behind the cache."""
    return {"tokens_per_s": 1 / run_round(runner, work).seconds}


if __name__ == "__main__":
    main()
