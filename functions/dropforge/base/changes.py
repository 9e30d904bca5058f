"""The one way to change a document: every change is checked against the fields of the document's class."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from .redact import cut

M = TypeVar("M", bound=BaseModel)
_MOST_CHARACTERS = 80  # of a wrong value


def evolve(document: M, /, **changes: Any) -> M:
    """A copy of `document` with the changed fields, each checked for its type and its bounds.

    pydantic's `model_copy(update=...)` takes any field and any value, so a wrong one is found by the next reader of the
    document. Validators of the class do not run: they are about what a user writes. Raises TypeError for a field that
    the class lacks and for a value that the field does not take; no such change comes from a user's input.
    """
    try:
        checked = _fields(type(document)).model_validate(changes)
    except ValidationError as error:
        raise TypeError(f"a change of {type(document).__name__} is wrong: {_problems(error)}") from None
    return document.model_copy(update={name: getattr(checked, name) for name in changes})


@cache
def _fields(document: type[BaseModel]) -> type[BaseModel]:
    """A class with the fields of a document's class, none of which is required."""
    config = ConfigDict(**{**document.model_config, "extra": "forbid", "strict": True, "defer_build": False})
    fields = {name: _optional(field) for name, field in document.model_fields.items()}
    return create_model(f"ChangeOf{document.__name__}", __config__=config, **fields)


def _optional(field: Any) -> Any:
    """A field by its own name: without its alias, and with a default, which is never used."""
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return annotation, None


def _problems(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))} is {cut(repr(each['input']), _MOST_CHARACTERS)}: {each['msg']}"
        for each in found
    )
