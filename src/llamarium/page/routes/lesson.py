"""The lesson that the server was started with."""

from fastapi import APIRouter, Request

from llamarium.page.schema.lesson import ClassLesson
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


@router.get("/lesson")
async def lesson(request: Request) -> ClassLesson:
    """Return the lesson; 404 if the server was started without one."""
    class_lesson: ClassLesson | None = request.app.state.lesson
    if class_lesson is None:
        message = "this server has no lesson; start it with `llamarium inspect --lesson FILE`"
        raise ApiError(404, message, code="no_lesson")
    return class_lesson
