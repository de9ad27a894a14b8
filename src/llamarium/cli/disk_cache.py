"""The options of the prefix cache on disk, and parsing of sizes."""

import argparse
import re

from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group
from llamarium.cli.options import add_values, named_folder
from llamarium.engine.tiers.disk_cache import DEFAULT_BYTES, DiskCache

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", re.IGNORECASE)


def size(text: str) -> int:
    """Parse a number of bytes such as 2GiB, for argparse; units are powers of 1,024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size as in 512MiB or 2GiB, found {text!r}")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def add_disk_cache(group: Group) -> None:
    """Add `--cache-dir` and `--cache-disk`; `disk_cache` reads them."""
    text = "keep keys and values of texts there, for the next start; it holds the texts, too, so keep it private"
    bound = f"how large --cache-dir may become (default: {DEFAULT_BYTES >> 30}GiB)"
    add_values(group, ("--cache-dir", named_folder, "DIR", None, text), ("--cache-disk", size, "SIZE", None, bound))


def check_bound(args: argparse.Namespace) -> None:
    """Raise UsageError for `--cache-disk` without `--cache-dir`."""
    if args.cache_dir is None and args.cache_disk is not None:
        raise UsageError("argument --cache-disk: bounds --cache-dir; name a folder with that")


def disk_cache(args: argparse.Namespace) -> DiskCache | None:
    """Open the cache given by the options, or return None; OptionError if it cannot be used."""
    check_bound(args)
    return None if args.cache_dir is None else DiskCache(args.cache_dir, args.cache_disk or DEFAULT_BYTES)
