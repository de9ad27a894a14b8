"""The README, the chapters, the guides and the reference are run: every command, every line of Python, every output.

What the code blocks of a document mean:

    ```console      Lines that begin with `$ ` are run, all of them `llamarium ...` or `curl ...`; what follows is their
                    stdout. A line that ends with a backslash goes on in the next.
    ```python       Is run; the blocks of a document share one namespace, from top to bottom. With `>>> ` prompts what
                    follows each of them is its output, as in a Python session. Without prompts, what the block prints
                    stands in the next block:
    ```output       What the Python block before it has printed.

`<!-- test: skip (why) -->` on the line before a block leaves it alone; any other language that could be run, or a
fence that is not at the start of a line, is refused, so that nothing escapes by accident. Blocks of text, JSON or
configuration are no business of this module.

Text must be equal to the letter. A number with a decimal point may differ by two units of its last digit, or by
1/10,000, as machines round differently, and then the blanks around it may differ too; whole numbers are ids, shapes and
counts, and exact.
Bars drawn beside a number are not compared. So that this holds, documents compute in float32.

To write the outputs that the code has now into the documents (they stay as they are where they agree):

    python tests/integration/test_docs.py --update
"""

import copy
import difflib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import llamarium
from llamarium.cli.main import main
from llamarium.hub.resolve import resolve
from quiet_clients import quiet_langchain, quiet_litellm
from serving import free_port

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FOLDERS = "learn", "guides", "reference"
DOCUMENTS = [ROOT / "README.md", *(path for folder in FOLDERS for path in sorted(ROOT.glob(f"docs/{folder}/*.md")))]

BLOCK = re.compile(r"(?P<skip><!-- test: skip \([^\n]+\) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
PORT = "8123"  # where the pages' servers listen
UNTESTABLE = {"", "bash", "sh", "shell", "pycon", "py"}
COMMAND = re.compile(r"^(\$ (?:.*\\\n)*.*\n)", re.M)
PROMPT = re.compile(r"^(>>> .*\n(?:\.\.\.(?: .*)?\n)*)", re.M)
DECIMAL = re.compile(r"-?\d[\d,]*\.\d+(?:e[+-]\d+)?")
BAR = re.compile("[█▉▊▋▌▍▎▏]+")


# --- running ----------------------------------------------------------------------------------------------------------


class Document:
    """One file; `rerun` returns its text with the outputs that its code has now."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._namespace: dict[str, Any] = {"__name__": name}
        self._printed = ""

    def rerun(self) -> str:
        fences = re.findall(r"^\s*(?:```|~~~)", self.text, re.M)
        blocks = list(BLOCK.finditer(self.text))
        assert len(fences) == 2 * len(blocks), f"{self.name}: a code block is not closed or not at the start of a line"
        try:
            text = BLOCK.sub(self._block, self.text)
        finally:
            self._end_programs()
        self._expect_all_shown("at the end")
        return text

    def _end_programs(self) -> None:
        """End what a page that fails has started: a server would answer the next page that starts one."""
        for program in self._namespace.values():
            if isinstance(program, subprocess.Popen) and program.poll() is None:
                program.kill()
                program.wait()

    def _block(self, found: re.Match[str]) -> str:
        line = self.text.count("\n", 0, found.start("body")) + 1
        language, body = found["language"], found["body"]
        where = f"{self.name}:{line}"
        if found["skip"]:
            return found[0]
        assert language not in UNTESTABLE, f"{where}: use console, python or text instead of {language!r}, or skip"
        if language == "output":
            now, self._printed = _settle(body, self._printed), ""
            return f"```output\n{now}```"
        self._expect_all_shown(f"before line {line}")
        if language == "console":
            return f"```console\n{_console(body, where)}```"
        if language == "python" and PROMPT.search(body):
            return f"```python\n{self._session(body, line)}```"
        if language == "python":
            self._python(body, line)
        return found[0]

    def _python(self, body: str, line: int, mode: str = "exec") -> None:
        printed = io.StringIO()
        code = compile("\n" * (line - 1) + body, self.name, mode)  # a traceback names the document's own line
        with redirect_stdout(printed):
            exec(code, self._namespace)
        self._printed = printed.getvalue()

    def _session(self, body: str, line: int) -> str:
        """Run a block of `>>> ` prompts and return it with their outputs."""
        parts = PROMPT.split(body)
        assert not parts[0], f"{self.name}:{line}: a block with prompts begins with one"
        for i in range(1, len(parts), 2):
            at = line + "".join(parts[:i]).count("\n")
            source = "".join(row[4:] or "\n" for row in parts[i].splitlines(keepends=True))
            self._python(source, at, "single")
            parts[i + 1], self._printed = _settle(parts[i + 1], self._printed), ""
        return "".join(parts)

    def _expect_all_shown(self, where: str) -> None:
        assert not self._printed, f"{self.name}: Python {where} printed, and no output block follows:\n{self._printed}"


def _console(body: str, where: str) -> str:
    """Run a console block's commands and return it with their outputs."""
    parts = COMMAND.split(body)
    assert not parts[0], f"{where}: a console block begins with a command, `$ llamarium ...`"
    for i in range(1, len(parts), 2):
        parts[i + 1] = _settle(parts[i + 1], _shell(parts[i][2:].strip(), where))
    return "".join(parts)


def _shell(command: str, where: str) -> str:
    program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert program in PROGRAMS, f"{where}: only {' and '.join(PROGRAMS)} can be run, not {command!r}; skip the block"
    code, out, err = PROGRAMS[program](words)
    assert code == 0, f"{where}: {command!r} ended with {code}: {err}"
    return out


def _llamarium(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def _curl(words: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(["curl", *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


PROGRAMS = {"llamarium": _llamarium, "curl": _curl}
"""What can be run: from arguments to exit code, stdout and stderr."""


# --- comparing --------------------------------------------------------------------------------------------------------


def _settle(expected: str, actual: str) -> str:
    """Return what a command printed, with the expected lines where the two agree."""
    old, new = expected.splitlines(), actual.rstrip().splitlines()
    if len(old) == len(new):
        new = [was if _agree(was, now) else now for was, now in zip(old, new, strict=True)]
    return "".join(f"{line.rstrip()}\n" for line in new)


def _agree(expected: str, actual: str) -> bool:
    if expected == actual:
        return True
    numbers = DECIMAL.findall(expected), DECIMAL.findall(actual)
    if not numbers[0] or _text(expected) != _text(actual):
        return False
    return all(map(_near, *numbers))


def _text(line: str) -> list[str]:
    return BAR.sub("", DECIMAL.sub("#", line)).split()


def _near(expected: str, actual: str) -> bool:
    (value, unit), (found, same) = _value_and_unit(expected), _value_and_unit(actual)
    return unit == same and abs(value - found) <= max(2.1 * unit, 1e-4 * abs(value))


def _value_and_unit(number: str) -> tuple[float, float]:
    """Return a number and what one step of its last digit is worth."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    return float(number.replace(",", "")), 10.0 ** (int(exponent or 0) - len(mantissa.rpartition(".")[2]))


# --- models that are loaded once --------------------------------------------------------------------------------------


@contextmanager
def _reading_room(smollm2: llamarium.Llama | None = None) -> Iterator[None]:
    """80 columns, and every model loaded once for all documents; `smollm2` is the built-in one in float32."""
    load, builtin = llamarium.load, str(resolve("smollm2-135m"))
    models: dict[Any, llamarium.Llama] = {}

    def load_once(*args: Any, **options: Any) -> llamarium.Llama:
        given = inspect.signature(load).bind(*args, **options)
        given.apply_defaults()
        chosen = {**given.arguments, "model": str(resolve(given.arguments["model"])), "progress": None}
        key = tuple(chosen.items())
        if key not in models:
            same = (chosen["model"], chosen["dtype"], chosen["quantize"]) == (builtin, "float32", None)
            models[key] = smollm2 if smollm2 is not None and same else load(*args, **options)
        return copy.copy(models[key])  # a command gives the model it loaded a name

    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),  # for what a document's commands write
        mock.patch("llamarium.api.load", load_once),
        mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
        torch.set_grad_enabled(True),  # a document may switch gradients off; this puts them back
    ):
        yield


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_document_shows_what_its_code_prints(path: Path, smollm2: llamarium.Llama) -> None:
    text = path.read_text(encoding="utf-8")
    with _reading_room(smollm2), quiet_langchain(), quiet_litellm() if "litellm" in text else nullcontext():
        while (port := str(free_port())) in text:  # a page's own may be another program's
            pass
        now = Document(str(path), text.replace(PORT, port)).rerun().replace(port, PORT)
    diff = difflib.unified_diff(text.splitlines(), now.splitlines(), f"{path.name}, written", "printed now", n=1)
    assert text == now, "\n".join(diff)


def rerun(text: str) -> str:
    return Document("page.md", text).rerun()


def test_a_page_that_agrees_stays_as_it_is() -> None:
    page = "Text.\n\n```python\nx = 0.1234\nprint(x)\n```\n\n```output\n0.1235\n```\n\n```json\n{}\n```\n"
    assert rerun(page) == page


def test_what_python_prints_now_is_written_into_the_page() -> None:
    page = "```python\nx = 3\n```\n\n```python\nprint(x, 'mice\\n')\n```\n\n```output\n{}```\n"
    assert rerun(page.format("2 mice\n")) == page.format("3 mice\n")
    assert rerun(page.format("")) == page.format("3 mice\n")


def test_what_a_session_shows_is_written_into_the_page() -> None:
    page = "```python\n>>> x = 3\n{}>>> for i in range(x):\n...     print(i, end=' ')\n...\n{}>>> x / 7\n{}```\n"
    now = page.format("", "0 1 2\n", "0.42857142857142855\n")
    assert rerun(page.format("", "", "")) == rerun(page.format("None\n", "", "1\n")) == rerun(now) == now


def test_what_a_command_prints_now_is_written_into_the_page() -> None:
    page = "```console\n$ llamarium --version  # which one\n{}$ llamarium --version\n{}```\n"
    now = f"llamarium {llamarium.__version__}\n"
    assert rerun(page.format("llamarium 0.0.9\n", "")) == page.format(now, now)


def test_a_command_may_have_several_lines_and_be_curl(tmp_path: Path) -> None:
    (tmp_path / "llama.txt").write_text("a llama")
    page = f"```console\n$ curl --silent \\\n    'file://{tmp_path}/llama.txt'\n{{}}```\n"
    assert rerun(page.format("an alpaca\n")) == page.format("a llama\n")
    with pytest.raises(AssertionError, match=r"page\.md:2: .* ended with 37: "):
        rerun(page.replace("llama.txt", "alpaca.txt").format(""))


def test_a_program_does_not_outlive_a_page_that_fails() -> None:
    page = Document("page.md", "```python\nimport subprocess\n\nnap = subprocess.Popen(['sleep', '60'])\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        page.rerun()
    assert page._namespace["nap"].poll() is not None


def test_a_skipped_block_is_not_run() -> None:
    page = "<!-- test: skip (it would take an hour) -->\n```python\nraise SystemExit\n```\n"
    assert rerun(page) == page


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```bash\nrm -rf /\n```\n", "page.md:2: use console"),
        ("\n```\nls\n```\n", "page.md:3: use console"),
        ("```console\n$ ls\n```\n", "page.md:2: only llamarium and curl can be run, not 'ls'"),
        ("```console\nllamarium --version\n```\n", "page.md:2: a console block begins"),
        ("```console\n$ llamarium sing\n```\n", "page.md:2: 'llamarium sing' ended with 2: .*no command 'sing'"),
        ("- ```python\n  1 / 0\n  ```\n", "not at the start of a line"),
        ("```python\n1 / 0\n", "not closed"),
        ("```python\nx = 1\n>>> x\n```\n", "page.md:2: a block with prompts begins with one"),
        ("```python\nprint(1)\n```\n", "at the end printed, and no output block follows"),
        ("```python\nprint(1)\n```\n\n```python\nprint(2)\n```\n\n```output\n2\n```\n", "before line 6 printed"),
    ],
)
def test_a_page_whose_code_cannot_be_trusted_is_refused(page: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){complaint}"):
        rerun(page)


@pytest.mark.parametrize(
    ("expected", "actual", "agree"),
    [
        ("the same 7", "the same 7", True),
        ("an id 791", "an id 792", False),
        ("P 0.725", "P 0.727", True),
        ("P 0.725", "P 0.728", False),
        ("P 0.725", "Q 0.725", False),
        ("P -0.000", "P 0.000", True),
        ("P 0.725", "P -0.725", False),
        ("8.4e-05 %", "8.2e-05 %", True),
        ("8.4e-05 %", "8.4e-06 %", False),
        ("0.725", "0.7250", False),
        ("1,234.5678 MB", "1,234.6789 MB", True),
        ("1,234.5678 MB", "1,234.7 MB", False),
        ("  9.99  ██▌", " 10.01  ███", True),
        ("0.5  0.25", "0.5", False),
        ("nan 0.5", "nan 0.5", True),
    ],
)
def test_lines_agree_but_for_rounding(expected: str, actual: str, agree: bool) -> None:
    assert _agree(expected, actual) is agree


def _update() -> None:
    with _reading_room():
        for path in DOCUMENTS:
            text = path.read_text(encoding="utf-8")
            if (now := Document(str(path), text).rerun()) != text:
                path.write_text(now, encoding="utf-8")
                print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {sys.argv[0]} --update")
    _update()
