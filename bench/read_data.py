"""Reading training data: megabytes of JSONL a second, read and understood, and the memory that it takes.

    python bench/read_data.py --megabytes 1000 --save

The file holds dialogs of two to eight messages in OpenAI's form, 1.1 kB a row on average. `parse` is Python's
`json.loads` alone, line by line; `read` yields checked rows with their places; `understood` also makes the examples of
them that are encoded in training.
"""

import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from llamarium.datasets.forms import example_of
from llamarium.datasets.rows import Reading
from llamarium.datasets.sources import read_rows

WORDS = ("a small model learns from what it is shown and answers questions of people who ask about the sea, numbers, "
         "letters, words or a story; ").split()  # fmt: skip


def main() -> None:
    """Write the file and read it in each way in turn."""
    parser = common.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the file (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dialogs.jsonl")
        write(path, options.megabytes * 1_000_000)
        readers = {"parse": parse, "read": read, "understood": understand}
        with common.Load() as load:
            medians: Any = common.alternate(
                options.rounds, {name: timed(reader, path) for name, reader in readers.items()}
            )

    rows = [{"what": name, "MB/s": medians[name]["MB/s"], "peak MB": medians[name]["peak MB"]} for name in readers]
    common.report("read-data", options, rows, {**medians, "others": load.others})


def write(path: Path, size: int) -> None:
    """Write dialogs of random words until the file has `size` bytes."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            roles = ["user", "assistant"] * draw.randint(1, 4)
            texts = (" ".join(draw.choices(WORDS, k=draw.randint(5, 80))) for _ in roles)
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def timed(reader: Callable[[Path], int], path: Path) -> Callable[[], dict[str, float]]:
    """Return a function that reads the file; its speed, and the process's peak memory so far."""

    def run() -> dict[str, float]:
        begin = time.perf_counter()
        count = reader(path)
        assert count
        speed = path.stat().st_size / (time.perf_counter() - begin) / 1e6
        return {"MB/s": speed, "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}

    return run


def parse(path: Path) -> int:
    """Parse each line, which is the least that any reader does."""
    with path.open("rb") as file:
        return sum(bool(json.loads(line)) for line in file)


def read(path: Path) -> int:
    """Read rows as training does."""
    return sum(1 for _ in read_rows(str(path)))


def understand(path: Path) -> int:
    """Read rows and make the examples of them."""
    reading = Reading()
    return sum(len(example_of(row.fields, reading)) for row in read_rows(str(path)))


if __name__ == "__main__":
    main()
