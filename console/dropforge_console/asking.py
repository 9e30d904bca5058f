"""How a served model is asked: the prompt that it was trained on, and the stream of its answer.

`dropforge chat` and the console's playground ask by these rules.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dropforge.base.errors import DropforgeError
from dropforge.endpoints.record import EndpointRecord, Revision
from dropforge.run.record import Endpoint
from dropforge.spec import JobSpec
from dropforge.spec.sections import Columns, Dataset

PAGE = "docs/calling.md"
MESSAGE = "message"  # the only field of a prompt without a template
CONNECT_SECONDS = 20.0
ANSWER_SECONDS = 600.0  # between two parts of an answer; an endpoint that scaled to zero first loads its model
DATA = b"data:"


class Unanswered(DropforgeError):
    """Why an endpoint gave no answer, or not all of it. `hint` says how to mend it, or is ""."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Prompt:
    """How a question becomes messages: the templates of the training, or the question as it is."""

    user: str
    system: str | None = None

    @property
    def fields(self) -> list[str]:
        """The names that the templates hold, in the order of their first use."""
        texts = (self.system or "", self.user)
        return list(dict.fromkeys(name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name))

    def messages(self, values: Mapping[str, str]) -> list[dict[str, str]]:
        """The messages before the answer, as a row of the training has them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system.format_map(values)}]
        return [*system, {"role": "user", "content": self.user.format_map(values)}]

    def with_system(self, text: str) -> Prompt:
        """The prompt with another system prompt, which is no template."""
        return Prompt(self.user, text.replace("{", "{{").replace("}", "}}"))


PLAIN = Prompt(f"{{{MESSAGE}}}")


def prompt_of(spec: JobSpec) -> Prompt | None:
    """Return the prompt of a training row; None if the rows' own messages were the prompts."""
    columns: Columns | None = spec.dataset.columns if isinstance(spec.dataset, Dataset) else None
    return None if columns is None else Prompt(columns.prompt, columns.system)


def named_endpoint(record: EndpointRecord, serving: Revision, model: str = "") -> Endpoint:
    """A named endpoint, of which `serving` serves, as a client calls it; `model` is one of a shared endpoint."""
    return Endpoint(
        url=record.url,
        model=model or record.name,
        service=record.service,
        region=record.region,
        ready=serving.promoted or record.created,
        expires=record.expires or datetime.max.replace(tzinfo=UTC),
    )


class Answer:
    """An answer as it arrives: lines of server-sent events.

    https://platform.openai.com/docs/api-reference/chat-streaming. `of` names the endpoint. `ended` is the reason of the
    model's end: "stop", or "length" for an answer that was cut.
    """

    def __init__(self, of: str) -> None:
        self.ended = ""
        self.has_begun = False
        self._of = of

    def part(self, line: bytes) -> str:
        """The text in a line; "" if it has none. Raises Unanswered if the line says that the answer broke off."""
        data = line.removeprefix(DATA).strip()
        if not line.startswith(DATA) or data == b"[DONE]":
            return ""
        self.has_begun = True
        event = json.loads(data)
        if "error" in event:
            raise Unanswered(f"the endpoint of {self._of} broke off: {said(event)}")
        text = ""
        for choice in event["choices"]:
            self.ended = choice.get("finish_reason") or self.ended
            text += choice["delta"].get("content") or ""
        return text

    def check_end(self) -> None:
        """Raise Unanswered unless the model has ended its answer."""
        if self.ended not in ("stop", "length"):
            why = f"the answer has no end ({self.ended or 'no reason'})"
            raise Unanswered(f"the endpoint of {self._of} broke off: {why}")


def refused(of: str, spec: JobSpec, status: int, body: str) -> Unanswered:
    """The refusal of an endpoint, by its HTTP status and the body of its answer."""
    try:
        why = said(json.loads(body))
    except ValueError:
        why = body.strip() or "without a reason"
    hint = refusal_hint(spec, status) or f"its log: `dropforge logs {of} --tail 20`"
    return Unanswered(f"the endpoint of {of} answered HTTP {status}: {why}", hint)


def unreachable(of: str, spec: JobSpec, endpoint: Endpoint, why: str) -> Unanswered:
    """An endpoint that gave no answer at all."""
    assert spec.serve is not None, "the run has an endpoint"
    hint = f"is it still there? `dropforge status {of}`"
    if spec.serve.is_private:
        hint = f"only clients in the deployment's network reach it: {PAGE}#endpoints-inside-the-vpc"
    return Unanswered(f"the endpoint of {of} at {endpoint.base_url} {why}", hint)


def refusal_hint(spec: JobSpec, status: int) -> str:
    """Return how to mend an endpoint's refusal with an HTTP status; "" for a status that says nothing of the caller."""
    if status not in (401, 403) or spec.serve is None:
        return ""
    return {
        "identity_token": "your account needs roles/run.invoker on the service: "
        f"{PAGE}#the-token; a token lasts an hour, so start again after that",
        "api_key": f"the key of the deployment has changed since the endpoint started: {PAGE}#the-token",
        "none": f"{PAGE}#the-token",
    }[spec.serve.credential]


def said(body: Any) -> str:
    """Return the message of an error in OpenAI's form, or the whole body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
