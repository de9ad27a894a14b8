"""Compare two sets of CPU kernels on the same model, such as AVX-VNNI with AVX2.

    python bench/sets.py avx_vnni avx2 [--evex] [--model FILE.gguf] [--rows 1,8] [--lengths 512] [--save]

Both run `llamarium bench all --json` in processes of their own, in turn. A ratio is the median of the rounds' ratios of
tokens/s, the first set over the second.

`--evex` is for processors with AVX-512 VNNI and without AVX-VNNI: `vpdpbusd` on 256 bits in AVX-512's encoding, a byte
longer, for the same registers. So the ratio is what AVX-VNNI gains on such a core, up to the longer code.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import common
from guard import one_round

sys.path.insert(0, str(common.ROOT))
import hatch_build

CHECKS = common.ROOT / "tests" / "native"


def evex_sources() -> Path:
    """Return a copy of the package whose AVX-VNNI set has AVX-512's encoding, compiled if sources have changed."""
    folder, cc = common.GENERATED / "evex", hatch_build.compiler()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(common.ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    hatch_build.SETS["x86_64"]["avx_vnni"] = hatch_build.AVX2
    flags = ["-DLM_EMULATE_AVX_VNNI", "-DLM_EMULATE_BY_EVEX", f"-I{CHECKS}"]
    objects = hatch_build.compile_objects(cc, folder / "objects", *flags)
    library = folder / "src" / "llamarium" / "kernels" / "_native.so"
    subprocess.run([*cc, "-shared", *objects, "-o", library, "-lpthread", "-ldl", "-lm"], check=True)
    return folder / "src"


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("sets", nargs=2, metavar="SET", help="names for LLAMARIUM_KERNELS")
    parser.add_argument("--evex", action="store_true", help="AVX-VNNI in AVX-512's encoding")
    parser.add_argument("--model", default="smollm2-135m", help="a model (default %(default)s)")
    parser.add_argument("--depths", default="100", help="tokens in the cache (default %(default)s)")
    parser.add_argument("--lengths", default="512", help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--rows", default="1,8", help="answers side by side (default %(default)s)")
    options = parser.parse_args()
    source = evex_sources() if options.evex else common.ROOT / "src"
    words = ["-m", options.model, "--threads", str(options.threads), "--depths", options.depths]
    words += ["--lengths", options.lengths, "--rows", options.rows]

    def side(kernels: str) -> dict[str, float]:
        os.environ["LLAMARIUM_KERNELS"] = kernels
        return one_round(source, options.model, words)

    with common.Load() as load:
        found = common.alternate(options.rounds, {name: partial(side, name) for name in options.sets})
    first, second = options.sets
    ratios = found[f"{first} / {second}"]
    rows = [
        {"what": what, first: value, second: found[second][what], f"{first} / {second}": ratios[what]}
        for what, value in found[first].items()
    ]
    options.save = options.save and not load.others
    name = f"sets-{first}-{second}-{Path(options.model).stem}"
    common.report(name, options, rows, {**found, "others": load.others})
    if load.others:
        raise SystemExit(f"The machine was busy: others took {load.others:.2f} cores. Nothing is saved.")


if __name__ == "__main__":
    main()
