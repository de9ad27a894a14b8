"""Count the lines of code of `src` by package: without blank lines, comments and docstrings.

    python tools/code_lines.py              the working tree
    python tools/code_lines.py v0.1.0       a commit, and how far the working tree is from it

A statement over several lines counts as so many. A string that stands by itself is a docstring, wherever it stands.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/llamarium"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Return how many lines of a Python source hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    text = source.splitlines()
    return sum(bool(text[line - 1].strip()) for line in lines)


def by_package(sources: dict[str, str]) -> Counter[str]:
    """Add up the sources, by path below the package; a module beside the packages counts for itself."""
    total = Counter[str]()
    for path, source in sources.items():
        total[path.partition("/")[0].removesuffix(".py")] += code_lines(source)
    return total


def of_working_tree() -> dict[str, str]:
    """Read the sources as they are now."""
    folder = ROOT / PACKAGE
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.py")}


def of_commit(revision: str) -> dict[str, str]:
    """Read the sources of a commit."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, encoding="utf-8").stdout

    paths = git("ls-tree", "-r", "--name-only", revision, f"{PACKAGE}/").splitlines()
    return {
        path.removeprefix(f"{PACKAGE}/"): git("show", f"{revision}:{path}") for path in paths if path.endswith(".py")
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the lines of code of src by package.")
    parser.add_argument("revision", nargs="?", help="a commit to compare the working tree with")
    revision = parser.parse_args().revision

    current = by_package(of_working_tree())
    before = by_package(of_commit(revision)) if revision else Counter[str]()
    for name in [*sorted(current | before, key=lambda name: -max(current[name], before[name])), "total"]:
        lines = current.total() if name == "total" else current[name]
        past = before.total() if name == "total" else before[name]
        print(f"{name:14} {lines:7,}" + (f" {lines - past:+7,}   {past:7,} at {revision}" if revision else ""))


if __name__ == "__main__":
    main()
