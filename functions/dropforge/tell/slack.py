"""Channel Slack: Block Kit messages to an incoming webhook, whose URL is a secret.

Limits (https://api.slack.com/reference/block-kit/blocks): header 150 characters, section text 3,000, 50 blocks.
"""

from __future__ import annotations

import html
import re
from datetime import datetime
from http.client import HTTPException
from typing import Any, NamedTuple

from dropforge.base.redact import cut, redact
from dropforge.base.settings import Settings
from dropforge.cloud.classify import client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.secrets import read_secret
from dropforge.money import short_endpoint
from dropforge.run.record import Notice, Record, RunState
from dropforge.spec import JobSpec

from .channel import Failure

MAX_HEADER, MAX_SECTION = 150, 3000
_LINK = re.compile(r"https?://[A-Za-z0-9.:/_-]{1,255}")
_HALF_ENTITY = re.compile(r"&[a-z]{0,3}\Z")
_HEADLINES = {
    RunState.ACCEPTED: ":inbox_tray: accepted",
    RunState.REJECTED: ":no_entry: rejected",
    RunState.TRAINING: ":fire: training started",
    RunState.SUCCEEDED: ":white_check_mark: succeeded",
    RunState.FAILED: ":x: failed",
    RunState.CANCELLED: ":black_square_for_stop: cancelled",
}


class Message(NamedTuple):
    """A Slack message: the text of the notification, and the blocks of the message."""

    text: str
    blocks: list[dict[str, Any]]


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The webhook secret of a spec, by JSON pointer; empty without a webhook."""
    return {"/notify/slack/webhook_secret": spec.notify.slack.webhook_secret} if spec.notify.slack else {}


def secret_of(spec: JobSpec | None, settings: Settings) -> str:
    """The webhook secret of the spec or, if the spec has none, of the deployment; "" if neither names a secret."""
    return spec.notify.slack.webhook_secret if spec and spec.notify.slack else settings.slack_webhook_secret


def state_message(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> Message | None:
    """The message for a record's present state; None for a state without a message."""
    headline = _HEADLINES.get(record.state)
    if headline is None:
        return None
    title = f"{record.name or record.run} {headline.split(' ', 1)[1]}"
    link = record.endpoint.base_url if record.endpoint else ""
    blocks = [_header(f"{headline.split()[0]} {title}")]
    blocks += [_section(text, link) for text in _paragraphs(record, spec, settings, now) if text]
    entered = next(t for t in reversed(record.history) if t.state is record.state)
    event_id = f"{record.run}/{entered.attempt}/{record.state.lower()}"
    return Message(_escaped(title), [*blocks, _context(f"run `{record.run}` · {event_id}")])


def notice_message(record: Record, notice: Notice) -> Message:
    """The message for a notice."""
    title = f"{record.name or record.run} {notice.headline}"
    where = f"run `{record.run}` · {record.run}/notice/{notice.key}"
    return Message(_escaped(title), [_header(f":warning: {title}"), _section(notice.text), _context(where)])


def send(cloud: Cloud, secret: str, message: Message) -> Failure | None:
    """Send a message to the webhook in the secret; None on success. Never raises."""
    from slack_sdk import errors  # from the package, not `slack_sdk.errors`: see Clients.slack

    try:
        url = read_secret(cloud, secret)
    except LookupError as error:
        return Failure(str(error), may_pass=False)
    except client_errors() as error:
        return Failure(f"secret {secret!r} could not be read: {type(error).__name__}", may_pass=True)
    try:
        response = cloud.clients.slack(url).send(
            text=message.text, blocks=message.blocks, unfurl_links=False, unfurl_media=False
        )
    except (
        ValueError,
        HTTPException,
        errors.SlackClientError,
    ) as error:  # their texts repeat the URL, which is a secret
        problem = f"secret {secret!r} does not hold the URL of a Slack webhook: {type(error).__name__}"
        return Failure(problem, may_pass=False)
    except OSError as error:
        return Failure(f"Slack could not be reached: {type(error).__name__}", may_pass=True)
    if response.status_code == 200:
        return None
    problem = f"Slack answered {response.status_code} {cut(response.body, 100)!r} to the webhook of secret {secret!r}"
    return Failure(problem, may_pass=response.status_code == 429 or response.status_code >= 500)


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
    """Whole and large numbers in full, other numbers with four digits."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 10_000 else f"{value:.4g}"


def _machines(spec: JobSpec | None) -> str:
    """The accelerators of an attempt: `16 x nvidia-b200`."""
    if spec is None:
        return "its target"
    machines = spec.target.accelerators
    return f"{machines.count} x {machines.name}" if machines.count > 1 else machines.name


def _endpoint(record: Record, spec: JobSpec | None) -> str:
    endpoint = record.endpoint
    if endpoint is None:
        return "trained only; the spec has no endpoint"
    is_private = spec is not None and spec.serve is not None and spec.serve.is_private
    where = ", inside the VPC only," if is_private else ""
    text = f"serving `{endpoint.model}` at {endpoint.base_url}{where} until {endpoint.expires:%Y-%m-%d %H:%M} UTC"
    if endpoint.limit == "max_cost_usd":
        text += ", when the budget is used up"
    if record.parity is not None:
        text += f"; parity: *{record.parity.state}*"
    cost = record.serving_cost(endpoint.expires)
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


def _header(text: str) -> dict[str, Any]:
    return {"type": "header", "text": {"type": "plain_text", "text": cut(text, MAX_HEADER)}}


def _section(text: str, link: str = "") -> dict[str, Any]:
    """A paragraph. Of its addresses, only `link` becomes a link."""
    address = f"<{link}|{link}>" if _LINK.fullmatch(link) else ""
    shown = _HALF_ENTITY.sub("", _escaped(text)[: MAX_SECTION - len(address)])
    return {"type": "section", "text": _verbatim(shown.replace(link, address, 1) if address else shown)}


def _context(text: str) -> dict[str, Any]:
    return {"type": "context", "elements": [_verbatim(_escaped(text))]}


def _verbatim(text: str) -> dict[str, Any]:
    """A text in which Slack makes no links of addresses, names of channels or names of people.

    https://docs.slack.dev/reference/block-kit/composition-objects/text-object
    """
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _escaped(text: str) -> str:
    """The text without credentials, links and mentions of everybody (`<!channel>`)."""
    return html.escape(redact(text), quote=False)
