"""What people read in Slack: Block Kit messages, sent by an incoming webhook whose URL is a secret.

Limits (https://api.slack.com/reference/block-kit/blocks): header 150 characters, section text 3,000, 50 blocks.
"""

from __future__ import annotations

import html
import logging
from datetime import datetime
from http.client import HTTPException
from typing import Any, NamedTuple

from dropforge.base import names
from dropforge.base.redact import redact
from dropforge.base.settings import Settings
from dropforge.cloud import clients
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.money import Notice, short_endpoint
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec

MAX_HEADER, MAX_SECTION = 150, 3000
_HEADLINES = {
    RunState.ACCEPTED: ":inbox_tray: accepted",
    RunState.REJECTED: ":no_entry: rejected",
    RunState.TRAINING: ":fire: training started",
    RunState.SUCCEEDED: ":white_check_mark: succeeded",
    RunState.FAILED: ":x: failed",
    RunState.CANCELLED: ":black_square_for_stop: cancelled",
}


_SILENT = logging.getLogger(f"{__name__}.sdk")  # what the SDK logs of a failure repeats the URL
_SILENT.disabled = True


class Message(NamedTuple):
    """A Slack message: the text of the notification, and the blocks of the message itself."""

    text: str
    blocks: list[dict[str, Any]]


def slack_message(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> Message | None:
    """The message for a record's present state; None when people do not care about that state."""
    headline = _HEADLINES.get(record.state)
    if headline is None:
        return None
    title = f"{record.name or record.run} {headline.split(' ', 1)[1]}"
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": f"{headline.split()[0]} {title}"[:MAX_HEADER]}}
    ]
    blocks += [_section(text) for text in _paragraphs(record, spec, settings, now) if text]
    entered = next(t for t in reversed(record.history) if t.state is record.state)
    event_id = f"{record.run}/{entered.attempt}/{record.state.lower()}"
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": f"run `{record.run}` · {event_id}"}]})
    return Message(_escaped(title), blocks)


def notice_message(record: Record, notice: Notice) -> Message:
    """The message for something that people should hear while a run goes on."""
    title = f"{record.name or record.run} {notice.headline}"
    header = {"type": "header", "text": {"type": "plain_text", "text": f":warning: {title}"[:MAX_HEADER]}}
    where = f"run `{record.run}` · {record.run}/notice/{notice.key}"
    context = {"type": "context", "elements": [{"type": "mrkdwn", "text": where}]}
    return Message(_escaped(title), [header, _section(notice.text), context])


def send(secret: str, message: Message, settings: Settings) -> tuple[str, bool]:
    """Send a message. Answers ("", False), or what went wrong and whether trying again may help."""
    # The package first: a thread that imports one of its modules does not wait for another that is importing the
    # package, and the two then meet in half-made modules ("cannot import name 'WebhookClient'").
    from slack_sdk import WebhookClient
    from slack_sdk.errors import SlackClientError

    try:
        url = read_secret(secret, settings)
    except LookupError as error:
        return str(error), False
    except client_errors() as error:
        return f"secret {secret!r} could not be read: {type(error).__name__}", True
    try:
        response = WebhookClient(url, timeout=int(TIMEOUT_SECONDS), logger=_SILENT).send(
            text=message.text, blocks=message.blocks
        )
    except (ValueError, HTTPException, SlackClientError) as error:  # their texts repeat the URL, which is the secret
        return f"secret {secret!r} does not hold the URL of a Slack webhook: {type(error).__name__}", False
    except OSError as error:
        return f"Slack could not be reached: {type(error).__name__}", True
    if response.status_code == 200:
        return "", False
    may_pass = response.status_code == 429 or response.status_code >= 500
    return (
        f"Slack answered {response.status_code} {response.body[:100]!r} to the webhook of secret {secret!r}",
        may_pass,
    )


def read_secret(secret: str, settings: Settings) -> str:
    """The value of a Secret Manager secret (`name` or `name:version`). Raises LookupError; never shows the value."""
    from google.api_core.exceptions import FailedPrecondition, Forbidden, NotFound

    name = names.secret_version(settings.project, secret)
    try:
        payload = clients.secrets().access_secret_version(name=name, timeout=TIMEOUT_SECONDS).payload
    except (FailedPrecondition, Forbidden, NotFound) as error:
        raise LookupError(
            f"secret {secret!r} of project {settings.project} cannot be read: {type(error).__name__}"
        ) from None
    try:
        return str(payload.data.decode()).strip()
    except UnicodeDecodeError:  # its text repeats the value
        raise LookupError(f"secret {secret!r} of project {settings.project} is not UTF-8 text") from None


def _paragraphs(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> list[str]:
    if record.state is RunState.ACCEPTED:
        return [f"from `{record.source}`", short_endpoint(spec) if spec else ""]
    if record.state is RunState.REJECTED:
        listed = "\n".join(f"• `{p['pointer'] or '/'}` {_problem(p)}" for p in record.problems[:20])
        return [listed, f"details: `gs://{settings.runs_bucket}/runs/{record.run}/errors.json`"]
    if record.state is RunState.TRAINING:
        where = record.attempts[-1]
        return [f"attempt {where.number} on {_machines(spec)} in {where.region}"]
    if record.state is RunState.SUCCEEDED:
        return [_metrics(record), _endpoint(record, spec), _cost(record, now)]
    return [_error(record), _logs(record, settings), _cost(record, now)]


def _problem(problem: dict[str, Any]) -> str:
    parts = [str(problem["message"])]
    parts += [f"{word} {problem[word]}" for word in ("found", "expected") if problem.get(word)]
    return "; ".join(parts)


def _metrics(record: Record) -> str:
    shown = {name: value for name, value in record.metrics.items() if value is not None}
    return "\n".join(f"• {name}: *{_number(value)}*" for name, value in shown.items())


def _number(value: float) -> str:
    """Whole and large numbers in full, others with four digits."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 10_000 else f"{value:.4g}"


def _machines(spec: JobSpec | None) -> str:
    """What an attempt trains on: `16 x nvidia-b200`."""
    if spec is None:
        return "its target"
    machines = spec.target.accelerators
    return f"{machines.count} x {machines.name}" if machines.count > 1 else machines.name


def _endpoint(record: Record, spec: JobSpec | None) -> str:
    found = record.endpoint
    if found is None:
        return "trained only; the spec asks for no endpoint"
    is_private = spec is not None and spec.serve is not None and spec.serve.is_private
    where = ", inside the VPC only," if is_private else ""
    text = f"serving `{found.model}` at {found.url}{where} until {found.expires:%Y-%m-%d %H:%M} UTC"
    if found.limit == "max_cost_usd":
        text += ", when the budget is used up"
    cost = record.serving_cost(found.expires)
    return text if cost is None else f"{text}; it costs at most ${cost:.2f} in all"


def _error(record: Record) -> str:
    if record.error is None:
        return ""
    hint = f"\n_{record.error.hint}_" if record.error.hint else ""
    return f"*{record.error.error_class}*: {record.error.message}{hint}"


def _logs(record: Record, settings: Settings) -> str:
    return f"logs: `dropforge logs {record.run}`; artifacts: `gs://{settings.runs_bucket}/models/{record.run}/`"


def _cost(record: Record, now: datetime) -> str:
    cost = record.training_cost(now)
    return "training cost: price unknown" if cost is None else f"training cost: *${cost:.2f}*"


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": _escaped(text)[:MAX_SECTION]}}


def _escaped(text: str) -> str:
    """Without credentials, and with nothing that Slack takes for a link or for a call to everybody (`<!channel>`)."""
    return html.escape(redact(text), quote=False)
