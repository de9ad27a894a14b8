"""A lesson: what a teacher wrote for a class, as plain JSON."""

from llamarium.page.schema.base import View


class ClassLessonPart(View):
    """A part of a lesson: a text, a question about it, and what helps to answer it.

    Attributes:
        text: What the model is asked about.
        question: Shown from the beginning.
        answer: Shown when it is asked for; None where there is none.
        cards: Ids of the story's cards that stand below the question.
        answer_cards: Those that are shown with the answer.
    """

    text: str
    question: str
    answer: str | None
    cards: tuple[str, ...]
    answer_cards: tuple[str, ...]


class ClassLesson(View):
    """`GET /inspect/lesson`: the lesson that the server was started with.

    Attributes:
        large: Whether it begins in large type, for a projector.
    """

    title: str
    large: bool
    parts: tuple[ClassLessonPart, ...]
