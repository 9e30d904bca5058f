"""The building blocks of a job spec's parts: the base class, types with patterns, and the error for a broken rule."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from dropforge.base.errors import SpecProblem
from dropforge.base.redact import cut

from . import misnamed
from .guess import likeliest
from .places import REGIONS

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# What a pattern allows, in words: people read them when a value does not match. `ruled` adds each pattern.
WORDS: dict[str, str] = {}


def ruled(pattern: str, words: str, **more: Any) -> Any:
    """A field whose values match `pattern`; `words` say the same to people."""
    WORDS[pattern] = words
    return Field(pattern=pattern, **more)


def words_of(pattern: str) -> str:
    """What a pattern allows, in words. A platform outside this repository may have patterns without words."""
    return WORDS.get(pattern, f"text matching {pattern}")


_NAME = "lower-case letters, digits and -; a letter first, no - at the end; at most"
DURATION = r"^[1-9][0-9]{0,5}(s|m|h|d)$"
Duration = Annotated[
    str,
    ruled(
        DURATION,
        "a whole number from 1 to 999999 and a unit (s, m, h or d), such as 90s, 45m, 2h or 7d",
        examples=["90s", "45m", "2h", "7d"],
    ),
]
Name = Annotated[str, ruled(r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", f"{_NAME} 40 characters")]
ENDPOINT = r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$"
EndpointName = Annotated[str, ruled(ENDPOINT, f"{_NAME} 30 characters")]
# Resource labels: https://cloud.google.com/resource-manager/docs/labels-overview#requirements
LabelKey = Annotated[
    str,
    ruled(r"^[a-z][a-z0-9_-]{0,62}$", "lower-case letters, digits, _ and -; a letter first; at most 63 characters"),
]
LabelValue = Annotated[str, ruled(r"^[a-z0-9_-]{0,63}$", "lower-case letters, digits, _ and -; at most 63 characters")]
SecretName = Annotated[
    str,
    ruled(
        r"^[A-Za-z0-9_-]{1,255}(:([1-9][0-9]*|latest))?$",
        "the short name of a Secret Manager secret: letters, digits, _ and -; after it, a version if you want one, "
        "such as hf-token:3",
    ),
]
EnvName = Annotated[
    str,
    ruled(r"^[A-Z_][A-Z0-9_]{0,127}$", "upper-case letters, digits and _; no digit first; at most 128 characters"),
]
_REGION, ZONE = r"^[a-z]+-[a-z]+[0-9]{1,2}$", r"^[a-z]+-[a-z]+[0-9]{1,2}-[a-z]$"
SLIP = 0.9  # of difflib's ratio: a name of a dozen letters with a wrong one


def one_meant(pattern: str, places: Collection[str], *, is_whole: bool = False) -> BeforeValidator:
    """Refuse a text that is no place, and probably means one of `places`: the answer names it.

    A well-formed text, which matches `pattern`, may be a place that is newer. It is refused only as a slip in a name of
    `places`, if this is the whole list (`is_whole`).
    """

    def check(value: object) -> object:
        if not isinstance(value, str) or value in places:
            return value
        near, is_formed = likeliest(value, places), re.search(pattern, value) is not None
        if is_formed:
            near = [name for name in near if is_whole and SequenceMatcher(None, value, name).ratio() >= SLIP]
        if near:
            words = words_of(pattern)
            meant = f"did you mean {' or '.join(map(repr, near))}? {words[0].upper()}{words[1:]}"
            raise Wrong("", "no place of this name", value, meant)
        return value

    return BeforeValidator(check)


Region = Annotated[
    str, ruled(_REGION, "a region of Google Cloud, such as us-central1"), one_meant(_REGION, REGIONS, is_whole=True)
]
Zone = Annotated[str, ruled(ZONE, "a zone of Google Cloud, such as us-central1-a")]
# A Compute Engine reservation: https://cloud.google.com/compute/docs/reference/rest/v1/reservations
Reservation = Annotated[str, ruled(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$", f"{_NAME} 63 characters")]
# https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters (at most 40 characters)
ClusterName = Annotated[str, ruled(r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", f"{_NAME} 40 characters")]
BudgetPeriod = Literal["day", "month"]
Capacity = Literal["on_demand", "spot", "flex_start", "reservation"]


def corrected(pattern: str, value: object) -> str:
    """The text that matches a pattern, and that a value of another form probably means; "" if there is none."""
    if not isinstance(value, str):
        return ""
    simple = cut(value.strip(), 64)
    forms = (simple, simple.lower(), re.sub(r"[\s_]+", "-", simple.lower()), re.sub(r"[\s-]+", "_", simple.upper()))
    lengths = (simple.lower().replace(" ", ""), re.sub(r"\s*(second|minute|hour|day)s?$", _unit, simple.lower()))
    return next((form for form in (*forms, *lengths) if form and re.search(pattern, form)), "")


def _unit(match: re.Match[str]) -> str:
    return match[1][0]


def not_an_endpoint(name: str) -> str:
    """Why a text is not the name of an endpoint: the rule, and the name that it probably means."""
    shown_name, meant = cut(name, 60), corrected(ENDPOINT, name)
    if meant == name:
        return f"{shown_name!r} is not the name of an endpoint: it is reserved, or the id of a run"
    guess = f"; did you mean {meant!r}?" if meant else ""
    return f"{shown_name!r} is not the name of an endpoint; expected {words_of(ENDPOINT)}{guess}"


class _NamedKeys:
    """Marks a mapping whose keys have a pattern: the JSON Schema refuses every other key, as pydantic does."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        ((pattern, values),) = schema.pop("patternProperties").items()
        return {**schema, "propertyNames": {"pattern": pattern}, "additionalProperties": values}


NAMED_KEYS = _NamedKeys()


class Wrong(ValueError):
    """A broken rule that JSON Schema cannot express, at `pointer` below the part whose validator raises the error."""

    def __init__(self, pointer: str, message: str, value: object, expected: str) -> None:
        super().__init__(message)
        self.problem = SpecProblem(pointer, message, shown(value), expected)


class Part(BaseModel):
    """Base of every part of a spec: immutable, unknown fields refused, numbers finite and not strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PlacementSpec(Protocol):
    """The fields that the placements of every target have."""

    @property
    def region(self) -> str: ...
    @property
    def max_wait(self) -> Duration | None: ...


class Placement(Part):
    """A place where an attempt may run. Attempts try the placements in the given order."""

    region: Region = Field(description="A region of Google Cloud.")
    max_wait: Duration | None = Field(
        default=None, description="How long to wait for capacity before the next placement; default: 30m."
    )


def seconds(duration: str) -> int:
    """`"2h"` as 7200."""
    return int(duration[:-1]) * _UNIT_SECONDS[duration[-1]]


def check_source(value: str) -> str:
    """Accept `owner/name`, `name` or `gs://bucket/path`; raise Wrong for anything else. Only a path may leave ASCII."""
    if value.startswith("gs://"):
        if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]/[^\x00-\x1f]+", value):
            bucket = value.removeprefix("gs://").partition("/")[0]
            expected = "gs://bucket/path, with 3 to 222 lower-case letters, digits, -, _ and . as the bucket"
            raise Wrong("", f"not a gs:// URI{_foreign(bucket)}", value, expected)
    elif answer := misnamed.instead(value):
        message, expected = answer
        raise Wrong("", message, value, expected)
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", value, re.ASCII):
        expected = "a Hugging Face Hub id (owner/name) or gs://bucket/path"
        raise Wrong("", f"not a source{_foreign(value)}", value, expected)
    return value


def check_files(uris: list[str]) -> list[str]:
    """Accept different gs:// URIs; raise Wrong for anything else."""
    for place, uri in enumerate(uris):
        if not uri.startswith("gs://"):
            raise Wrong(f"/{place}", "a list names files in buckets", uri, "a gs:// URI (a Hub id stands alone)")
        if uri in uris[:place]:
            raise Wrong(f"/{place}", "the list names a source twice", uri, "each source once")
        check_source(uri)
    return uris


def _foreign(name: str) -> str:
    """Names the first character outside ASCII, as the end of a message: it may look like a letter of ASCII."""
    letter = next((character for character in name if not character.isascii()), "")
    return letter and f": its {letter!r} is {unicodedata.name(letter, f'U+{ord(letter):04X}')}, and names are ASCII"


def shown(value: Any) -> str:
    """A value as a reader should see it: JSON, short, without credentials."""
    return cut(json.dumps(value, ensure_ascii=False, default=str), 120)


class Canary(Part):
    """How a new model of a named endpoint shows that it answers users well, before it gets every request."""

    percent: int = Field(default=10, ge=1, le=50, description="The new model's share of the requests, in percent.")
    lasts: Duration = Field(
        default="10m", alias="for", description="How long the new model has this share. At most 1d."
    )
    max_error_rate: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="The largest share of the new model's requests that may fail on the server's side (5xx). A larger "
        "share may fail if as large a share of the previous model's requests fails.",
    )
    max_latency_ratio: float = Field(
        default=2.0,
        ge=1,
        le=100,
        description="The largest ratio of the 95th percentile of the new model's latencies to the previous model's.",
    )

    @model_validator(mode="after")
    def _lasts_a_day_at_most(self) -> Canary:
        if seconds(self.lasts) > _UNIT_SECONDS["d"]:
            raise Wrong("/for", "longer than a canary may last", self.lasts, "at most 1d")
        return self


class Budget(Part):
    """What a named endpoint may cost in each period."""

    usd: float = Field(gt=0, le=1_000_000_000, description="US dollars, at most.")
    per: BudgetPeriod = Field(description="The period: a day or a calendar month, in UTC.")
