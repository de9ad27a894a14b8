r"""Answer a file of requests, in OpenAI's batch format.

A line of IN is {"custom_id": ..., "method": "POST", "url": ..., "body": ...};
url is any route that `llamarium serve` has for POST. A line of OUT is the
answer to one of them, in the order in which they are complete; custom_id says
which. A request that is refused, or a line that is none, is answered by an
error, and the others go on. - is standard input, or standard output.

Whatever ends a run, what OUT holds is kept: --resume runs the rest. IN must
then hold every line that was answered as it was; it may have new ones.

Exit code 1 if a line of OUT is an error, or IN was changed meanwhile. Needs: pip install 'llamarium[serve]'

  llamarium batch requests.jsonl answers.jsonl
  llamarium batch requests.jsonl answers.jsonl --resume
"""

import argparse
import asyncio
import hashlib
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from llamarium.cli.flags import given_options
from llamarium.cli.options import UsageError, add_chat_template, add_kv_cache, add_model, check_adapters
from llamarium.cli.output import BAR_WIDTH, bar, note, telling, warn
from llamarium.cli.serve import add_engine, add_served_names, add_tool_form, load_engine, served_names
from llamarium.errors import InputError, OutputError, counted, escape
from llamarium.extras import optional

if TYPE_CHECKING:
    from llamarium.generation.text_engine import TextEngine
    from llamarium.server.batch.answer import BatchProgress
    from llamarium.server.batch.lines import Line
    from llamarium.server.batch.output import Output

_LOOK_S = 0.2  # from one drawing of the progress to the next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("input", metavar="IN", help="requests, one a line")
    parser.add_argument("output", metavar="OUT", help="answers, one a line")
    parser.add_argument("--resume", action="store_true", help="keep the answers that OUT holds, and ask the rest")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    add_engine(parser.add_argument_group("limits"))
    add_served_names(parser)
    add_tool_form(parser)
    add_chat_template(parser)
    add_kv_cache(parser)
    add_model(parser, names_adapters=True)


def run(args: argparse.Namespace) -> int:
    """Answer the file, and say what came of it."""
    if args.resume and args.force:
        raise UsageError("--resume keeps what OUT holds, --force replaces it; give one of them")
    if args.resume and args.output == "-":
        raise UsageError("--resume needs a file; standard output keeps no answers")
    for module in ("fastapi", "prometheus_client"):
        optional(module, "serve", "llamarium batch", module.replace("_", "-"))
    check_adapters(args)
    with _open(args.input) as file, _output(args) as output:
        return _answer(args, file, output)


def _open(name: str) -> BinaryIO:
    """Open the requests; what cannot be read twice is copied into a file without a name."""
    try:
        source = sys.stdin.buffer if name == "-" else Path(name).open("rb")  # noqa: SIM115 - the caller closes it
        if name != "-" and Path(name).is_file():
            return source
        with nullcontext() if name == "-" else source:
            return _copy(source)
    except OSError as error:
        raise InputError(f"{_shown(name)}: cannot be read: {error.strerror}; expected a file of requests") from None


def _copy(source: BinaryIO) -> BinaryIO:
    copy = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
    try:
        shutil.copyfileobj(source, copy)
    except BaseException:
        copy.close()
        raise
    return copy


def _output(args: argparse.Namespace) -> "Output":
    from llamarium.server.batch.output import Output, OutputFile

    if args.output == "-":
        return Output()
    path = Path(args.output)
    if args.input != "-" and path.exists() and path.samefile(args.input):
        raise OutputError(f"{escape(path)}: is the input, too; choose another file for the answers")
    return OutputFile(path, resumes=args.resume, replaces=args.force)


def _shown(name: str) -> str:
    return "standard input" if name == "-" else escape(name)


def _answer(args: argparse.Namespace, file: BinaryIO, output: "Output") -> int:
    from llamarium.server.batch.answer import BatchProgress
    from llamarium.server.batch.check import check_lines, check_model
    from llamarium.server.batch.lines import noted, read_lines

    earlier = output.kept
    checked, answered = hashlib.sha256(), hashlib.sha256()
    number = check_lines(noted(read_lines(file), checked.update), _shown(args.input), earlier)
    check_model(earlier, (*served_names(args), *args.adapters), escape(args.output))
    tally = BatchProgress(number, earlier.num_answers, earlier.num_failed)
    if tally.num_answered < number:
        lines = noted(itertools.islice(read_lines(file), number), answered.update)
        _ask(args, (line for line in lines if not earlier.has(line)), output, tally)
        if answered.digest() != checked.digest():
            raise InputError(
                f"{_shown(args.input)}: was changed while it was being answered; expected its "
                f"{counted(number, 'line')} to stay "
                "as they were: --resume runs what is missing, if the answers are to what it holds now"
            )
    else:
        output.begin()  # what was not written to its end is cut off
        note(f"{tally}, all of them before")
    if tally.first_failure:
        note(f"the first that failed now: {tally.first_failure}")
    return 1 if tally.num_failed else 0


def _ask(args: argparse.Namespace, lines: "Iterable[Line]", output: "Output", tally: "BatchProgress") -> None:
    from llamarium.server.batch.answer import BatchRun
    from llamarium.server.lifecycle.loading import ModelLoader
    from llamarium.server.lifecycle.service import Service
    from llamarium.server.settings import Settings

    options = given_options(args, Settings)
    settings = Settings(**options, max_queue=sys.maxsize, request_timeout_s=None)  # the submitter bounds itself
    llama, engine = load_engine(args)
    with _told(args, engine, tally) as report, engine:  # once it has stopped, it has counted all
        loading = ModelLoader(lambda _: (llama, engine))
        loading.wait()
        batch = BatchRun(Service(loading, settings), served_names(args), output.write, warn, tally)
        output.begin()
        asyncio.run(_watched(batch.run(lines), report))


async def _watched(work: Coroutine[None, None, None], report: Callable[[], None]) -> None:
    async def watch() -> None:
        while True:
            report()
            await asyncio.sleep(_LOOK_S)

    watcher = asyncio.create_task(watch())
    try:
        await work
    finally:
        watcher.cancel()


@contextmanager
def _told(args: argparse.Namespace, engine: "TextEngine", tally: "BatchProgress") -> Generator[Callable[[], None]]:
    """Show how it goes while the body runs, and calls what it gets now and then; say what came of it in any case."""
    start, before = time.monotonic(), tally.num_answered

    def speed() -> str:
        tokens, seconds = engine.snapshot.counts.generated_tokens, time.monotonic() - start
        return f"{counted(tokens, 'token')}, {tokens / seconds:.0f} tokens/s"

    try:
        with telling(f"answering {_shown(args.input)}") as draw:
            yield lambda: draw(f"{bar(tally.share):<{BAR_WIDTH}} {tally}, {speed()}")
    finally:
        earlier = f" ({before} before)" if before else ""
        is_resumable = tally.num_answered < tally.num_lines and args.output != "-"
        note(f"{tally}{earlier}; {speed()}" + ("; --resume runs the rest" if is_resumable else ""))
