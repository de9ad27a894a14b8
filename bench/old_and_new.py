"""This library against an older checkout of it, on the same model: nothing may have become slower.

    git worktree add ../before COMMIT && (cd ../before && python hatch_build.py)
    python bench/old_and_new.py --old ../before [--model FILE.gguf] [--depths 100,8000] [--lengths 512] [--rows 8]
        [--input-bits 16]

Both run `llamarium bench all --json` in processes of their own, in turn, one round each; the figure is the median of
the rounds' ratios of tokens/s, new over old.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import common


def one_round(source: Path, words: list[str]) -> dict[str, float]:
    """Run all measurements once; tokens/s by what was measured."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "llamarium", "bench", "all", "--json", "--rounds", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{source}: {done.stderr.strip()}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {_name(line): line["tokens_per_s"] for line in lines}
    return found | {f"{_name(line)}, outside C": line["python_share"] for line in lines if line.get("python_share")}


def _name(line: dict[str, float]) -> str:
    if line["test"] == "prefill":
        return f"prefill of {line['num_prompt']}"
    return f"decode after {line['num_cached']}" if line["test"] == "decode" else f"{line['num_rows']} answers at once"


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--old", type=Path, required=True, help="the older checkout, with its kernels compiled")
    parser.add_argument("--model", default="smollm2-135m", help="a model that both can load (default %(default)s)")
    parser.add_argument("--depths", default="100,4000", help="tokens in the cache")
    parser.add_argument("--lengths", default="512", help="tokens of a prompt")
    parser.add_argument("--rows", default="8", help="answers side by side")
    parser.add_argument("--input-bits", choices=("8", "16"), help="of the new side (its default is 8)")
    options = parser.parse_args()
    words = ["-m", options.model, "--threads", str(options.threads), "--depths", options.depths]
    words += ["--lengths", options.lengths, "--rows", options.rows]
    own = ["--input-bits", options.input_bits] if options.input_bits else []
    sides = {
        "new": partial(one_round, common.ROOT / "src", [*words, *own]),
        "old": partial(one_round, options.old.resolve() / "src", words),
    }
    found = common.alternate(options.rounds, sides)
    rows = [
        {"what": what, "new": new, "old": found["old"].get(what), "new / old": found["new / old"].get(what)}
        for what, new in found["new"].items()
    ]
    suffix = f"-{options.input_bits}-bits" if options.input_bits else ""
    options.old_commit = common.commit_of(options.old)
    common.report(f"old-and-new-{Path(options.model).stem}{suffix}", options, rows, found)


if __name__ == "__main__":
    main()
