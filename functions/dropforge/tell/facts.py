"""What every message and every run event about a run says: its first line, what it costs, what to do, and a link.

A person on call sees the first line alone on a phone: what happened, to which run, and why in a word.
"""

from __future__ import annotations

from datetime import datetime

from dropforge.base.figures import usd
from dropforge.base.log import explorer
from dropforge.base.redact import cut, redact
from dropforge.base.settings import Settings
from dropforge.run.record import Record, RunState

MAX_LINE, MAX_TITLE = 500, 140
_VERBS = {
    RunState.ACCEPTED: "accepted",
    RunState.PROVISIONING: "gets its machines",
    RunState.TRAINING: "training started",
    RunState.DEPLOYING: "gets its endpoint",
    RunState.TEARING_DOWN: "is being torn down",
    RunState.SUCCEEDED: "succeeded",
}


def title_of(record: Record, what: str) -> str:
    """The first line: the run's name, what happened, and the short id, which tells runs of one name apart."""
    if not record.name:
        return one_line(f"{record.run} {what}", MAX_TITLE)
    short = f" ({record.run.rpartition('-')[2]})"
    return one_line(f"{record.name} {what}", MAX_TITLE - len(short)) + short


def what_of(record: Record, state: RunState) -> str:
    """What the first line says about a state that the record has entered: of an end, with its cause in a word."""
    if state is RunState.REJECTED and record.problems:
        return f"rejected: {record.problems[0]['pointer'] or '/'} {record.problems[0]['message']}"
    if state is RunState.FAILED and record.error:
        return f"failed: {record.error.error_class}"
    if state is RunState.CANCELLED:
        return f"cancelled by {record.ended_by}" if record.ended_by else "cancelled"
    return _VERBS.get(state, state.lower())


def source_of(record: Record) -> str:
    """Which object or message asked for the run, and the person if the console says who."""
    return one_line(f"{record.source}{f' by {record.submitter}' if record.submitter else ''}")


def cost_of(record: Record, now: datetime) -> str:
    """What the run costs per hour, what it has cost, and the most that it may cost."""
    hourly, spent, endpoint = record.hourly_cost(now), record.cost(now), record.endpoint
    if hourly is None or spent is None:
        return "price unknown"
    serves = record.is_serving(now)
    text = f"{'at most ' if serves else ''}{usd(hourly)} an hour now, {usd(spent)} so far"
    attempt = record.attempts[-1] if record.attempts else None
    if attempt and not (attempt.running or attempt.ended) and attempt.usd_per_hour:
        text += f", {usd(attempt.usd_per_hour)} an hour once it trains"
    if serves and endpoint is not None:
        most = usd(record.cost(endpoint.expires))
        return f"{text}, at most {most} until the endpoint ends at {endpoint.expires:%Y-%m-%d %H:%M} UTC"
    if not record.state.is_terminal and record.about and record.about.most_usd is not None:
        text += f", at most {usd(record.about.most_usd)} in all"
    return text


def actions_of(record: Record, state: RunState, now: datetime) -> dict[str, str]:
    """What a person can do about a run in a state: commands to copy, by what they do."""
    run = record.run
    has_log = state is RunState.TRAINING or any(attempt.running or attempt.ended for attempt in record.attempts)
    actions = {"log": f"dropforge logs {run}"} if has_log else {"details": f"dropforge status {run}"}
    if record.endpoint and record.is_serving(now):
        actions["end the endpoint"] = f"dropforge cancel {run}"
    elif not (state.is_terminal or state is RunState.TEARING_DOWN):
        actions["end the run"] = f"dropforge cancel {run}"
    return actions


def link_of(record: Record, settings: Settings) -> str:
    """The page of the run in the console; without a console, Google's page of logs with what the functions did."""
    return settings.page_of(record.run) or explorer(settings.project, f'jsonPayload.run="{record.run}"', record.created)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """A foreign text in one line, without credentials, control characters and marks that reorder a text."""
    shown = "".join(c if c.isprintable() else " " for c in redact(text))
    return cut(" ".join(shown.split()), limit)
