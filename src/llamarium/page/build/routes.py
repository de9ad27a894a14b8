"""A learner's folder on the page: its steps, their checks and hints. Never torch.

The only code that runs is that of the folder which the command line named, in a process of its own, and only for a
client of this machine that has the server's key. No code comes from the page.
"""

import ipaddress
import threading
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import Field

from llamarium.build import Result, check_step, hint, hints_of
from llamarium.build.folder import COURSE, Course, definition, file_of, number_of, progress, step_named
from llamarium.page.schema.base import View
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service

router = APIRouter(prefix="/inspect/build", route_class=StrictRoute)

_MAX_CODE_CHARS = 100_000
_checking = threading.Lock()


class StepView(View):
    """A step of the course, and how far its function is.

    Attributes:
        definition: What the function takes and returns, in words.
        section: Where the course explains it: a chapter's file, `#`, and a heading.
        file: The name of the file that it stands in.
        code: What the file holds now; None where there is no folder, or no such file.
        hints: The hints that were read.
    """

    number: int
    name: str
    title: str
    about: str
    definition: str
    section: str
    stage: str
    file: str
    code: str | None
    is_right: bool
    tries: int
    hints: tuple[str, ...]


class CourseView(View):
    """The course; `folder` is None where none was named when the server was started."""

    folder: str | None
    steps: tuple[StepView, ...]


class StepRequest(Body):
    """`POST /inspect/build/checks` and `/inspect/build/hints`: a step, by its name."""

    step: str = Field(max_length=40)


class HintView(View):
    """All hints of a step that were read, the new one last; the third is the solution."""

    hints: tuple[str, ...]


@router.get("")
async def course(request: Request) -> CourseView:
    """Return the steps, and how far they are."""
    folder: Path | None = request.app.state.build_folder

    def read(_: object, __: object) -> CourseView:
        chosen = Course() if folder is None else Course.read(folder / COURSE)
        return CourseView(folder=None if folder is None else str(folder), steps=_steps(chosen, folder))

    return await work_on(request, "step", read)


@router.post("/checks")
async def check(request: Request, body: StepRequest) -> Result:
    """Run a function of the learner's folder inside the course's model, and compare it."""
    folder = _own_folder(request)

    def run(_: object, __: object) -> Result:
        with _checking:
            return check_step(folder, body.step)

    return await work_on(request, "step", run)


@router.post("/hints")
async def give_hint(request: Request, body: StepRequest) -> HintView:
    """Return one hint more than was read."""
    folder = _own_folder(request)

    def read(_: object, __: object) -> HintView:
        hint(folder, body.step)
        return HintView(hints=_hints(folder, body.step))

    return await work_on(request, "step", read)


def _own_folder(request: Request) -> Path:
    """Return the folder whose code may run; ApiError 403 where there is none, or the client is not of this machine."""
    folder: Path | None = request.app.state.build_folder
    if folder is None:
        message = "no folder was named; start the page with `llamarium inspect --build my_llama`"
        raise ApiError(403, message, code="no_build_folder")
    service: Service = request.app.state.service
    if not service.settings.api_keys or request.client is None or not _is_loopback(request.client.host):
        message = "code of the folder runs only for a client on this machine that has the server's key"
        raise ApiError(403, message, code="not_local")
    return folder


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _steps(course: Course, folder: Path | None) -> tuple[StepView, ...]:
    reached = {} if folder is None else progress(folder)
    views: list[StepView] = []
    for step in map(step_named, course.steps):
        entry = reached.get(step.name, {})
        view = StepView(
            number=number_of(step), name=step.name, title=step.title, about=step.about, definition=definition(step),
            section=step.section, stage=step.stage, file=file_of(step), code=_code(folder, file_of(step)),
            is_right=bool(entry.get("passed")), tries=int(entry.get("tries", 0)),
            hints=() if folder is None else _hints(folder, step.name),
        )  # fmt: skip
        views.append(view)
    return tuple(views)


def _code(folder: Path | None, name: str) -> str | None:
    """Return what a file of the folder holds, to be shown; None where it cannot be read."""
    if folder is None:
        return None
    try:
        return (folder / name).read_text(encoding="utf-8", errors="replace")[:_MAX_CODE_CHARS]
    except OSError:
        return None


def _hints(folder: Path, name: str) -> tuple[str, ...]:
    depth = int(progress(folder).get(name, {}).get("hints", 0))
    return hints_of(step_named(name), depth)
