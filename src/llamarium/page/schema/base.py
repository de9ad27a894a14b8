"""What all that the page asks and gets has in common."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

Dtype = Literal["float32", "float16", "uint8"]
"""What numbers in bulk travel as."""


MAX_INDEX = 2**31 - 1
"""Of anything that a query counts."""


class Query(BaseModel):
    """What stands after the ? of a path; what is no field of it is refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, int) and value > MAX_INDEX:
            raise ValueError(f"expected {MAX_INDEX} at most")
        return value


class Answer(BaseModel):
    """What is answered; its numbers are numbers."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), allow_inf_nan=False)


class EndView(Answer):
    """The last event of a stream that came to its end."""

    type: Literal["end"] = "end"
