"""Events that leave or enter the control plane: job events (from containers) and run events (to other systems).

Both travel as CloudEvents in Pub/Sub's binary form: attributes `ce-*`, the JSON data as the message's data
(https://github.com/googleapis/google-cloudevents, CloudEvents Pub/Sub binding).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import ErrorClass
from dropforge.base.redact import cut, redact

from .proof import EVENT_NAME, PROOF, proof

MAX_MESSAGE_BYTES = 10**7  # of Pub/Sub: https://cloud.google.com/pubsub/quotas#resource_limits
MAX_JOB_EVENT_BYTES = 64 * 1024
MAX_TEXT, MAX_HINT = 4000, 1000  # characters of a failure's message and hint
MAX_SAYS = 100  # characters that an operator's program may say of itself
REQUESTED_BY = "requested_by"  # the attribute of a message of the console
REQUESTED_WITH = "requested_with"  # the attribute in which a program names itself and its user to operators
JOB_EVENT_TYPE = "dev.dropforge.job"
RUN_EVENT_TYPE = "dev.dropforge.run"


Told = Annotated[str, AfterValidator(redact)]  # text that a cloud or a container wrote, without credentials


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


Sequence = Annotated[int, Field(ge=0, lt=10**15)]


class JobEventBase(Event):
    """The fields of every job event. `sequence` increases strictly within an attempt (milliseconds)."""

    run: str = Field(pattern=r"^[a-z][a-z0-9-]{0,48}$")
    attempt: int = Field(ge=1, le=1000)
    sequence: Sequence
    time: datetime

    @property
    def at(self) -> datetime:
        """`time`, in UTC if the container gave no time zone."""
        return self.time if self.time.tzinfo else self.time.replace(tzinfo=UTC)


class Started(JobEventBase):
    """The container runs and has read the spec; training continues at `resumed_step` (0: the start)."""

    type: Literal["started"] = "started"
    resumed_step: int = Field(default=0, ge=0)
    device: Told = ""


class Start(Event):
    """The event `started` within the event of an end, which has the same run and attempt."""

    sequence: Sequence
    time: datetime
    resumed_step: int = Field(default=0, ge=0)
    device: Told = ""


class EndBase(JobEventBase):
    """The fields of every end of an attempt.

    `started` is the start of an attempt that ended a moment later: the container held the event of the start, and then
    sent both in one message. None: that event was sent by itself, or the attempt ended before its start.
    """

    started: Start | None = None

    def with_start(self, started: Started) -> Self:
        """This end with the event of the start."""
        start = Start(**started.model_dump(include=set(Start.model_fields)))
        return evolve(self, started=start)


class Checkpointed(JobEventBase):
    """A checkpoint is complete in the bucket."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int = Field(ge=0)
    uri: Told


class Succeeded(EndBase):
    """The artifacts are committed: `manifest_uri` was written last."""

    type: Literal["succeeded"] = "succeeded"
    manifest_uri: Told
    metrics: dict[str, float | None] = {}


class Failed(EndBase):
    """The container stopped with an error; `error_class` says whether another attempt may help."""

    type: Literal["failed"] = "failed"
    error_class: ErrorClass
    # The limits hold again after the redaction, which may lengthen a text: a stored event is read like a new one.
    message: Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(lambda text: cut(text, MAX_TEXT))]
    hint: Annotated[str, Field(max_length=MAX_HINT), AfterValidator(lambda text: cut(text, MAX_HINT))] = ""


class Preempted(EndBase):
    """The container received SIGTERM and saved a checkpoint if it could; `step` is the last saved step."""

    type: Literal["preempted"] = "preempted"
    step: int = Field(default=0, ge=0)


JobEvent = Annotated[Started | Checkpointed | Succeeded | Failed | Preempted, Field(discriminator="type")]
JOB_EVENT: TypeAdapter[JobEvent] = TypeAdapter(JobEvent)


class RunEvent(Event):
    """A state change of a run, for other systems, or a notice while the run is in `state`: then `notice` is its key.

    A repeated event has the same `id`. `title` says what happened in one line. `actions` are commands to copy, by what
    they do. `link` is the page of the run in the console; without a console, Google's page of its logs.
    """

    id: str
    run: str
    state: str
    time: datetime
    name: str = ""
    notice: str | None = None
    title: str = ""
    actions: dict[str, str] = {}
    link: str = ""
    details: dict[str, JsonValue] = {}


def job_event_message(event: JobEvent, key: str = "") -> tuple[bytes, dict[str, str]]:
    """Data and attributes of the Pub/Sub message for a job event, with the proof of its run."""
    attributes = _attributes(
        f"{event.run}/{event.attempt}/{event.sequence}", f"{JOB_EVENT_TYPE}.{event.type}", event.run, event.time
    )
    data = event.model_dump_json().encode()
    return data, attributes | ({PROOF: proof(key, EVENT_NAME, data)} if key else {})


def run_event_message(event: RunEvent) -> tuple[bytes, dict[str, str]]:
    """Data and attributes of the Pub/Sub message for a run event."""
    kind = f"{RUN_EVENT_TYPE}.{event.state.lower() if event.notice is None else 'notice'}"
    return event.model_dump_json().encode(), _attributes(event.id, kind, event.run, event.time)


def parse_job_event(data: bytes) -> JobEvent:
    """A job event from a message's data. Raises pydantic.ValidationError."""
    return JOB_EVENT.validate_json(data)


def events_of(event: JobEvent) -> list[JobEvent]:
    """The events that a message tells: an end may follow the event of its start."""
    if not isinstance(event, EndBase) or event.started is None:
        return [event]
    return [Started(run=event.run, attempt=event.attempt, **event.started.model_dump()), event]


def read_job_events(data: bytes, run: str) -> list[JobEvent]:
    """The events that a stored job event of a run tells; [] for other data, and for the event of another run."""
    try:
        event = parse_job_event(data)
    except ValidationError:
        return []
    return events_of(event) if event.run == run else []


class Upload(BaseModel):
    """The part of a Cloud Storage `finalized` or `deleted` CloudEvent's data that names the object."""

    # A name with a slash would make another URL of a request: https://cloud.google.com/storage/docs/buckets#naming
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$")
    name: str = Field(min_length=1)
    generation: int
    size: int = 0
    metadata: dict[str, str] = {}
    md5: str = Field(default="", alias="md5Hash")  # in base64; an object that was composed has none

    @property
    def again(self) -> str:
        """What the submitter wrote to get another run of the same spec."""
        return self.metadata.get(names.AGAIN, "")


def uploaded_object(event_data: Any) -> Upload:
    """The object in the data of a Cloud Storage CloudEvent. Raises ValueError for other data."""
    upload = Upload.model_validate(event_data)
    upload.name.encode()  # Cloud Storage's names are UTF-8
    return upload


def pubsub_message(event_data: Any) -> tuple[bytes, Mapping[str, str], str]:
    """Data, attributes and message id out of the data of a `messagePublished` CloudEvent.

    Raises ValueError for other data.
    """
    message = event_data.get("message") if isinstance(event_data, dict) else None
    if not isinstance(message, dict):
        raise ValueError(
            f"expected the data of a Pub/Sub CloudEvent with a `message`, not {cut(str(event_data), 80)!r}"
        )
    encoded, attributes = message.get("data") or "", message.get("attributes") or {}
    message_id = message.get("messageId") or message.get("message_id")
    if not (isinstance(encoded, str) and isinstance(attributes, dict) and message_id):
        raise ValueError(
            f"expected text as data, a map as attributes, and a messageId, not {cut(repr(sorted(message)), 400)}"
        )
    if len(encoded) > MAX_MESSAGE_BYTES * 4 // 3 + 4:
        raise ValueError(f"expected at most {MAX_MESSAGE_BYTES} bytes of data, not {len(encoded) * 3 // 4}")
    for text in (str(message_id), *map(str, attributes), *map(str, attributes.values())):
        text.encode()  # half of a surrogate pair is a UnicodeEncodeError, which is a ValueError: it cannot be stored
    return base64.b64decode(encoded, validate=True), attributes, str(message_id)


class Request(NamedTuple):
    """A message on a requests topic: the topic's short name, the idempotency key, and the id of the message.

    Cloud Pub/Sub does not say who published a message. IAM decides who may publish on a topic, so the topic is the
    source of the request. `by` is the person for whom the console sends the message, "" for every other publisher.
    `again` is what the publisher wrote to get another run of the same spec. `says` is what an operator's program says
    of itself: people read it, and nothing believes it.
    """

    topic: str
    key: str
    message: str
    by: str = ""
    again: str = ""
    says: str = ""

    @property
    def has_key(self) -> bool:
        """Whether the publisher gave the message an idempotency key."""
        return self.key != self.message

    @property
    def who(self) -> str:
        """Who requests, for people."""
        if self.by:
            return f"{self.by} in the console"
        says = f", which says it is from {self.says}" if self.says else ""
        return f"topic {self.topic} message {self.key}{says}"


def request_message(
    event_data: Any, event_source: str, console_topic: str, operations_topic: str = ""
) -> tuple[bytes, Request]:
    """The data of a `messagePublished` CloudEvent, and the request that it is. Raises ValueError for other events.

    Eventarc writes the topic into the event's source: //pubsub.googleapis.com/projects/PROJECT/topics/TOPIC
    (https://cloud.google.com/eventarc/docs/cloudevents). Only a message of `console_topic` names a person: nobody but
    the console's account may publish there.
    """
    source = re.fullmatch(r"//pubsub\.googleapis\.com/projects/[^/\s]+/topics/([^/\s]+)", event_source)
    if source is None:
        raise ValueError(f"the event's source is {event_source[:200]!r}; expected a topic of Cloud Pub/Sub")
    data, attributes, message = pubsub_message(event_data)
    topic, key = source[1], str(attributes.get("idempotency_key") or message)
    named = str(attributes.get(REQUESTED_BY, "")) if topic == console_topic else ""
    says = str(attributes.get(REQUESTED_WITH, "")) if topic == operations_topic else ""
    shown = cut(redact("".join(filter(str.isprintable, says))), MAX_SAYS)
    again = str(attributes.get(names.AGAIN, ""))
    return data, Request(topic, key, message, named if names.is_email(named) else "", again, shown)


def _attributes(event_id: str, kind: str, run: str, time: datetime) -> dict[str, str]:
    return {
        "ce-specversion": "1.0",
        "ce-id": event_id,
        "ce-source": f"//dropforge.dev/runs/{run}",
        "ce-type": kind,
        "ce-subject": run,
        "ce-time": time.isoformat(),
        "content-type": "application/json",
    }


def job_event_schema() -> dict[str, Any]:
    """The JSON Schema of a job event, for schemas/."""
    return {"title": "dropforge job event", **JOB_EVENT.json_schema()}


def run_event_schema() -> dict[str, Any]:
    """The JSON Schema of a run event, for schemas/."""
    return {**RunEvent.model_json_schema(), "title": "dropforge run event"}


def dumps(value: Any) -> bytes:
    """Canonical JSON for digests and records: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
