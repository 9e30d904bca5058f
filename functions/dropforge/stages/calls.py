"""The JSON bodies of the requests that the workflow, the containers and the console send to the functions.

A description says what a field must be: people read it when a request is malformed. Further fields are ignored, as a
workflow may be newer than the functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dropforge.base import names
from dropforge.base.redact import cut
from dropforge.run.record import Outcome

C = TypeVar("C", bound="Call")
MOST_ATTEMPTS = 1000
MAX_SHOWN = 80  # characters of a wrong value


def _holds(is_right: Any) -> AfterValidator:
    """A check of a text: its words are those of the field."""

    def check(text: str) -> str:
        if not is_right(text):
            raise ValueError
        return text

    return AfterValidator(check)


Run = Annotated[str, _holds(names.is_run_id), Field(description="a run id")]
Execution = Annotated[str, Field(min_length=1, description="the id of a workflow execution")]
Attempt = Annotated[
    int,
    Field(ge=0, le=MOST_ATTEMPTS, description=f"a whole number from 0 to {MOST_ATTEMPTS}, the number of an attempt"),
]


class Call(BaseModel):
    """Base class of the bodies."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields, as arguments of the stage."""
        return dict(self)


class Sweep(Call):
    """Cloud Scheduler asks for a sweep."""


class OfRun(Call):
    """An execution calls for a run."""

    run: Run
    execution: Execution


class OfAttempt(OfRun):
    """An execution calls for an attempt; `callback_url` wakes it."""

    attempt: Attempt
    callback_url: str = Field(description="the URL of a callback")


class Teardown(OfRun):
    """An execution asks to delete the resources of an attempt, or of the run, with or without its endpoint."""

    scope: Attempt | Literal["run"] = Field(description="'run', or the number of an attempt")
    keep_endpoint: bool = Field(description="one of False, True")
    outcome: Outcome | None = Field(default=None, description="the outcome of a run")


class Rollout(Call):
    """An execution calls for a rollout of a named endpoint."""

    endpoint: Annotated[str, _holds(names.is_endpoint_name), Field(description="the name of an endpoint")]
    rollout: Annotated[str, _holds(names.is_run_id), Field(description="the id of a rollout")]
    execution: Execution


class Access(Call):
    """A container of a run proves that it belongs to the run."""

    run: Run
    proof: str = Field(description="the proof of the run's key")


class Ask(Call):
    """The console asks for a token for an endpoint."""

    of: Annotated[str, _holds(lambda of: names.is_run_id(of) or names.is_endpoint_name(of))] = Field(
        description="a run id, or the name of an endpoint"
    )


class Preflight(Call):
    """The console asks about the text of a spec."""

    spec: str = Field(description="the text of a spec, as a string")


def read_call(call: type[C], body: bytes) -> C:
    """The body of a request. Raises ValueError, which says what is wrong and what was expected."""
    try:
        return call.model_validate_json(body)
    except ValidationError as error:
        raise ValueError("; ".join(dict.fromkeys(_problems(call, error)))) from None


def _problems(call: type[Call], error: ValidationError) -> Iterator[str]:
    for each in error.errors(include_url=False, include_context=False):
        if not each["loc"]:
            yield "the body is not a JSON object"
            continue
        name = str(each["loc"][0])
        expected = call.model_fields[name].description
        found = "missing" if each["type"] == "missing" else cut(repr(each["input"]), MAX_SHOWN)
        yield f"{name} is {found}; expected {expected}"
