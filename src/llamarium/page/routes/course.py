"""Routes of the course: steps of a learner's folder, their checks and hints. Torch-free.

The only code that runs is that of the folder given on the command line, in a separate process, and only for a client on
this machine with the server's API key. No code is sent by the page.
"""

import ipaddress
import threading
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import Field

from llamarium.course import Result, check_step, hint, hints_of
from llamarium.course.folder.progress import Reached, progress
from llamarium.course.folder.source import definition
from llamarium.course.outline import Course, course_of, file_of, number_of, step_named
from llamarium.io import read_small
from llamarium.page.schema.base import PageRequest, View
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.hosts import is_address
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
        code: What the file holds now; None where there is no folder or no such file, or the client may not run
            it.
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


class StepRequest(PageRequest):
    """`POST /inspect/build/checks` and `/inspect/build/hints`: a step, by its name."""

    step: str = Field(max_length=40)


class HintView(View):
    """The hints of a step that were asked for, the new one last; the third is the solution."""

    hints: tuple[str, ...]


@router.get("")
async def course(request: Request) -> CourseView:
    """Return the steps, and how far they are."""
    folder: Path | None = request.app.state.build_folder

    def read(_: object, __: object) -> CourseView:
        if folder is None:
            return CourseView(folder=None, steps=_steps(Course(), None, shows_code=False))
        shows_code = _refusal(request) is None
        return CourseView(folder=str(folder), steps=_steps(course_of(folder), folder, shows_code=shows_code))

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
        depth, _ = hint(folder, body.step)
        return HintView(hints=hints_of(step_named(body.step), depth))

    return await work_on(request, "step", read)


def _own_folder(request: Request) -> Path:
    """Return the learner's folder; ApiError 403 if there is none, or if the client is not on this machine."""
    folder: Path | None = request.app.state.build_folder
    if folder is None:
        message = "no folder was named; start the page with `llamarium inspect --build my_llama`"
        raise ApiError(403, message, code="no_build_folder")
    if (refusal := _refusal(request)) is not None:
        raise refusal
    return folder


def _refusal(request: Request) -> ApiError | None:
    """Return the error if a client may not run and read the folder's code, else None."""
    service: Service = request.app.state.service
    if service.settings.api_keys and request.client is not None and _is_loopback(request.client.host):
        return None
    message = "code of the folder runs only for a client on this machine that has the server's key"
    return ApiError(403, message, code="not_local")


def _is_loopback(host: str) -> bool:
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def _steps(course: Course, folder: Path | None, *, shows_code: bool) -> tuple[StepView, ...]:
    reached = {} if folder is None else progress(folder)
    views: list[StepView] = []
    for step in map(step_named, course.steps):
        entry = reached.get(step.name, Reached())
        view = StepView(
            number=number_of(step), name=step.name, title=step.title, about=step.about, definition=definition(step),
            section=step.section, stage=step.stage, file=file_of(step),
            code=_code(folder / file_of(step)) if folder is not None and shows_code else None,
            is_right=entry.is_right, tries=entry.tries, hints=hints_of(step, entry.hints),
        )  # fmt: skip
        views.append(view)
    return tuple(views)


def _code(path: Path) -> str | None:
    """Return the content of a file for display; None if it cannot be read."""
    try:
        return read_small(path).decode("utf-8", "replace")[:_MAX_CODE_CHARS]
    except OSError:
        return None
