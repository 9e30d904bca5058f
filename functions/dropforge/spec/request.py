"""The requests that a message on a requests topic may have beside a job spec: schemas/request.schema.json.

A message has one field, which says what it requests. The description of a field says what it must be: people read it
when a message is wrong.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import Discriminator, Field, JsonValue, Tag, TypeAdapter, ValidationError

from dropforge.base.errors import DropforgeError, InvalidSpec, SpecProblem

from .guess import one_of
from .parse import read_part
from .parts import DURATION, ENDPOINT, Budget, BudgetPeriod, Canary, Part, shown

# A wrong name gets an answer with the names that exist, or that are possible: only the schema has their pattern.
_Endpoint = Annotated[
    str, Field(json_schema_extra={"pattern": ENDPOINT}, description="the name of an endpoint, in quotes")
]
_RunId = Annotated[
    str,
    Field(
        json_schema_extra={"pattern": "^[a-z][a-z0-9-]{0,19}-[0-9a-f]{12}$"},
        description="the id of a run, such as my-job-0123456789ab",
    ),
]
_HOW_LONG = "how long, such as 36h or 7d, or null for no expiry"
_BUDGET_HINT = 'such as {"budget": {"endpoint": "NAME", "usd": 50, "per": "month"}}, or "usd": null for no budget'
_HINTS = {"serve": "docs/endpoints.md#canary", "budget": _BUDGET_HINT}


class Serving(Part):
    """Which model gets behind which name. Without `canary` it has that of the spec of its run; null: none."""

    run: str = Field(description="the id of a run, or gs://RUNS-BUCKET/models/RUN for a model of another deployment")
    endpoint: _Endpoint
    canary: Canary | None = Field(default=None, description="a canary, or null for none")
    with_: dict[str, JsonValue] | None = Field(
        default=None, alias="with", description="fields of `serve`, such as region, for a model of another deployment"
    )
    again: bool = Field(default=False, description="true to deploy a model again that serves already, or false")

    @property
    def has_canary(self) -> bool:
        """Whether the message says itself which canary the model has, or that it has none."""
        return "canary" in self.model_fields_set


class ModelOfEndpoint(Part):
    """A model of a shared endpoint; without `model`, the endpoint itself."""

    endpoint: _Endpoint
    model: str = Field(default="", description="the name of a model of a shared endpoint")


class Expiry(Part):
    """How long an endpoint lives from now on."""

    endpoint: _Endpoint
    ttl: Annotated[str, Field(pattern=DURATION)] | None = Field(description=_HOW_LONG)


class NewBudget(Budget):
    """The budget that an endpoint gets."""

    endpoint: _Endpoint


class NoBudget(Part):
    """An endpoint loses its budget."""

    endpoint: _Endpoint
    usd: None
    per: BudgetPeriod | None = None


def _has_usd(budget: Any) -> str:
    usd = budget.get("usd", 0) if isinstance(budget, dict) else getattr(budget, "usd", 0)
    return "none" if usd is None else "new"


class ServeRequest(Part):
    """The model of a run gets behind a name."""

    serve: Serving = Field(description="an object with run and endpoint")


class RollbackRequest(Part):
    """An endpoint goes back to the model before."""

    rollback: _Endpoint


class RetireRequest(Part):
    """An endpoint ends, or a model of a shared endpoint."""

    retire: _Endpoint | ModelOfEndpoint = Field(
        description="the name of an endpoint, or an object with endpoint and model"
    )

    @property
    def of(self) -> ModelOfEndpoint:
        """The endpoint, and the model if it is only that."""
        return ModelOfEndpoint(endpoint=self.retire) if isinstance(self.retire, str) else self.retire


class ExtendRequest(Part):
    """An endpoint gets another expiry."""

    extend: Expiry = Field(description="an object with endpoint and ttl")


class BudgetRequest(Part):
    """An endpoint gets another budget, or none."""

    budget: Annotated[Annotated[NewBudget, Tag("new")] | Annotated[NoBudget, Tag("none")], Discriminator(_has_usd)] = (
        Field(description="an object with endpoint, usd and per")
    )

    @property
    def amount(self) -> Budget | None:
        """The budget; None for none."""
        wanted = self.budget
        return None if isinstance(wanted, NoBudget) else Budget(usd=wanted.usd, per=wanted.per)


class CancelRequest(Part):
    """A run ends."""

    cancel: _RunId


class SpecUriRequest(Part):
    """A run by the spec in an object of a bucket."""

    spec_uri: Annotated[
        str,
        Field(
            json_schema_extra={"pattern": "^gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]/"},
            description="gs://BUCKET/OBJECT",
        ),
    ]


Change = ServeRequest | RollbackRequest | RetireRequest | ExtendRequest | BudgetRequest
_CLASSES = (*Change.__args__, CancelRequest, SpecUriRequest)
_KINDS = {next(iter(each.model_fields)): each for each in _CLASSES}
CHANGES = frozenset(name for name, each in _KINDS.items() if each in Change.__args__)


def kind_of(content: Any) -> str | None:
    """The kind of a request, which is the name of its one field; None for anything else, such as a spec."""
    is_request = isinstance(content, dict) and len(content) == 1 and content.keys() <= _KINDS.keys()
    return next(iter(content)) if is_request else None


class WrongRequest(DropforgeError):
    """A message that requests nothing that dropforge could do; `hint` says how to write it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def read_change(content: dict[str, Any]) -> Change:
    """The change of an endpoint that a message requests. Raises WrongRequest; `kind_of` is one of CHANGES."""
    kind = next(iter(content))
    try:
        change: Change = _KINDS[kind].model_validate_json(json.dumps(content))
        return change
    except ValidationError as error:
        raise WrongRequest(_in_words(kind, content[kind], error), _HINTS.get(kind, "docs/endpoints.md")) from None


def request_schema() -> dict[str, Any]:
    """The JSON Schema of requests, for schemas/. A job spec, which has a schema of its own, is a request, too."""
    kinds: Any = reduce(or_, (Annotated[kind, Tag(name)] for name, kind in _KINDS.items()))
    request: TypeAdapter[Any] = TypeAdapter(Annotated[kinds, Discriminator(kind_of)])
    return {
        "$id": "https://dropforge.dev/schemas/request.schema.json",
        "title": "dropforge request",
        "description": "A message on a requests topic that is not a job spec itself (job_spec.schema.json).",
        **request.json_schema(by_alias=True),
    }


def _in_words(kind: str, content: Any, error: ValidationError) -> str:
    """The first problem of a message; a budget and a canary have the words that they have in a spec."""
    first = next(iter(error.errors(include_url=False)))
    steps = [step for step in first["loc"] if step not in ("new", "none", "str", "ModelOfEndpoint")]
    if not steps:
        return "the message is not Unicode text, or it is nested too deeply"
    try:
        if kind == "budget" and isinstance(content, dict) and steps[-1] != "endpoint":
            read_part(Budget, {key: value for key, value in content.items() if key != "endpoint"}, "serve", "budget")
        if kind == "serve" and "canary" in steps:
            read_part(Canary, content["canary"], "serve", "canary")
    except InvalidSpec as invalid:
        return str(invalid.problems[0])
    return str(_problem(kind, steps, first))


def _problem(kind: str, steps: list[Any], error: Any) -> SpecProblem:
    place = "/".join(map(str, steps[1:] or steps))
    fields = _fields(kind)
    if error["type"] == "extra_forbidden":
        return SpecProblem(place, "unknown field", shown(error["input"]), one_of(str(steps[-1]), sorted(fields)))
    expected = fields.get(str(steps[-1]), _KINDS[kind].model_fields[kind].description)
    if error["type"] == "missing":
        return SpecProblem(place, "a required field is missing", "nothing", expected)
    return SpecProblem(place, "wrong value", shown(error["input"]), expected)


def _fields(kind: str) -> dict[str, str | None]:
    """The fields of what a message requests, by the names that a message has, with what each must be."""
    parts: dict[str, type[Part]] = {"serve": Serving, "retire": ModelOfEndpoint, "extend": Expiry, "budget": NewBudget}
    part = parts.get(kind)
    return {field.alias or name: field.description for name, field in part.model_fields.items()} if part else {}
