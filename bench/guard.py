"""Guard speed: this library against an older commit of it, on the same model, with a verdict.

    python bench/guard.py COMMIT [--model FILE.gguf] [--rows 1,2,4,8,16] [--depths 100,4000] [--lengths 512] [--save]

The commit is checked out and compiled below `bench/generated` once; a folder with a checkout will do, too. Both sides
load the model and run `llamarium bench all --json` in processes of their own, in turn, one round each. A ratio is the
median of the rounds' ratios of tokens/s and of loads a second, new over old. The exit code is 1 if one is below
`--least`, and 3 if the machine was too busy to say. A result is saved only from a quiet one, by the processor's name.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import common

LOAD = """
import sys, time
import llamarium.api
begin = time.perf_counter()
llamarium.load(sys.argv[1]).runner
print(time.perf_counter() - begin)
"""


def one_round(source: Path, model: str, words: list[str]) -> dict[str, float]:
    """Run all measurements once; loads a second, and tokens/s by what was measured."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, model], capture_output=True, text=True, env=environment, check=False
    )
    if loaded.returncode:
        raise SystemExit(f"{source}: {loaded.stderr.strip()}")
    command = [sys.executable, "-m", "llamarium", "bench", "all", "--json", "--rounds", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{source}: {done.stderr.strip()}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {"loads": 1 / float(loaded.stdout), **{_name(line): line["tokens_per_s"] for line in lines}}


def _name(line: dict[str, Any]) -> str:
    if line["test"] == "prefill":
        return f"prefill of {line['num_prompt']}"
    if line["test"] == "decode":
        return f"decode after {line['num_cached']}"
    return f"{line['num_rows']} answers at once"


def checkout(commit_or_folder: str) -> Path:
    """Return a checkout with compiled kernels: the folder, or the commit's, which is made if it is not there."""
    if Path(commit_or_folder).is_dir():
        return Path(commit_or_folder).resolve()
    git = ["git", "-C", str(common.ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", commit_or_folder], capture_output=True, text=True, check=True
    )
    folder = common.GENERATED / f"guard-{commit.stdout.strip()}"
    if not folder.exists():
        subprocess.run([*git, "worktree", "add", "--detach", str(folder), commit.stdout.strip()], check=True)
    if not list(folder.glob("src/llamarium/kernels/*.so")):
        subprocess.run([sys.executable, "hatch_build.py"], cwd=folder, check=True)
    return folder


def verdict(ratios: dict[str, float], least: float) -> list[str]:
    """Return what is slower than allowed."""
    return [what for what, ratio in ratios.items() if ratio < least]


def main() -> None:
    """Measure, report, and judge."""
    parser = common.parser(__doc__)
    parser.add_argument("old", help="a commit, or the folder of a checkout with its kernels compiled")
    parser.add_argument("--model", default="smollm2-135m", help="a model that both can load (default %(default)s)")
    parser.add_argument("--depths", default="100", help="tokens in the cache (default %(default)s)")
    parser.add_argument("--lengths", default="512", help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--rows", default="1,2,4,8,16", help="answers side by side (default %(default)s)")
    parser.add_argument("--least", type=float, default=0.97, help="the ratio that is not yet slower (default 0.97)")
    options = parser.parse_args()
    words = ["-m", options.model, "--threads", str(options.threads), "--depths", options.depths]
    words += ["--lengths", options.lengths, "--rows", options.rows]
    old = checkout(options.old)
    sides = {"new": common.ROOT, "old": old}

    with common.Load() as load:
        found = common.alternate(
            options.rounds,
            {side: partial(one_round, source / "src", options.model, words) for side, source in sides.items()},
        )
    ratios = found["new / old"]
    rows = [
        {"what": what, "new": new, "old": found["old"].get(what), "new / old": ratios.get(what)}
        for what, new in found["new"].items()
    ]
    slower = verdict(ratios, options.least)
    options.old, options.old_commit = old.name, common.commit_of(old)
    options.save = options.save and not load.others
    name = f"guard-{_slug(common.processor())}-{Path(options.model).stem}"
    common.report(name, options, rows, {**found, "slower": slower, "others": load.others})

    if load.others:
        print(f"The machine was busy: others took {load.others:.2f} cores. Nothing is concluded, nothing saved.")
        raise SystemExit(3)
    print(f"Slower than {options.least:g}: {', '.join(slower)}." if slower else "Nothing is slower.")
    raise SystemExit(1 if slower else 0)


def _slug(processor: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", processor.lower().replace("(r)", "")).strip("-")


if __name__ == "__main__":
    main()
