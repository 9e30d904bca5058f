"""The notices that stages send about a run. money/limits.py has those about limits, rollout/telling.py of endpoints."""

from __future__ import annotations

from datetime import date, datetime

from dropforge.base.changes import evolve
from dropforge.base.figures import usd
from dropforge.base.redact import cut
from dropforge.run.record import MAX_REASON, Attempt, Endpoint, Notice, Record, Tone

from .facts import cost_of

ANOTHER_RUN = "`dropforge submit --again`, or metadata or an attribute `again` with a new value, starts another run"
ENDPOINT_LOST = "endpoint-lost"  # the key of a notice
MAX_TRUNCATED = 0.01  # share of the rows


def queued(rule: str, place: int, until: str) -> Notice:
    """A run waits for its place."""
    text = f"place {place} of those that wait for `{rule}` of the deployment's policy; {until}"
    return Notice("queued", "waits for a place", text)


def joined(source: str, run: str) -> Notice:
    """The same spec came again, from this source, and joined the run."""
    text = f"{source} asks for the same as run {run} and joins this run: no other run is paid; {ANOTHER_RUN}"
    return Notice("joined", "was asked for again", text, Tone.NEWS)


def waits(attempt: Attempt) -> Notice:
    """An attempt has waited for long."""
    since = f"since {attempt.started:%H:%M} UTC"
    text = f"attempt {attempt.number} waits in {attempt.region} {since}: {attempt.wait_reason}"
    return Notice(f"waits-a{attempt.number}", "waits to train", text)


def stuck(attempt: int, message: str, follows: str) -> Notice:
    """An attempt makes no progress; `follows` is the effect of `limits.on_stuck`."""
    text = f"{message}. {follows}. If it is only slow, raise limits.stuck_after"
    return Notice(f"stuck-a{attempt}", "is stuck", text)


def not_finite(odd: dict[str, float]) -> Notice | None:
    """Metrics are NaN or infinite: the record has no value for them."""
    if not odd:
        return None
    found = cut(", ".join(f"{name} is {value}" for name, value in odd.items()), MAX_REASON)
    text = f"{found}: lists and reports have no value of it"
    return Notice("metrics-not-finite", "has metrics that are not finite", text)


def truncated(metrics: dict[str, float | None], max_length: int) -> Notice | None:
    """More than MAX_TRUNCATED of the rows were cut: the model has not seen how their answers end."""
    cut_rows, rows = metrics.get("rows_truncated") or 0, metrics.get("rows_train") or 0
    if cut_rows <= rows * MAX_TRUNCATED:
        return None
    found = f"{cut_rows:.0f} of {rows:.0f} rows were cut after {max_length} tokens"
    return Notice("rows-truncated", "has trained on cut rows", f"{found}: raise training.max_length, or shorten them")


def beyond(metrics: dict[str, float | None]) -> Notice | None:
    """Answers were too long for the evaluation: a low exact match then says nothing about the model."""
    answers, limit = metrics.get("answers_beyond") or 0, metrics.get("max_new_tokens") or 0
    if not answers:
        return None
    text = f"{answers:.0f} held-out answers are longer than {limit:.0f} tokens and count as wrong: raise "
    return Notice("answers-beyond", "has not judged its longest answers", f"{text}evaluation.max_new_tokens")


def unused(fields: list[str]) -> Notice | None:
    """Nothing has read some fields of the data: the author may have meant something by them."""
    if not fields:
        return None
    text = f"{', '.join(fields)}: if one of them should teach something, write it into the messages or the templates"
    return Notice("fields-unused", "has not used fields of its data", text)


def dated(day: date | None) -> Notice | None:
    """The base model's chat template shows today's date, and the exported one the date of the run."""
    if day is None:
        return None
    text = f"the chat template always shows {day}, the day of the run: with today's date, prompts would differ each day"
    return Notice("template-date", "has a date in its chat template", text)


def endpoint_lost(record: Record, endpoint: Endpoint, now: datetime) -> Notice:
    """An endpoint was deleted from outside. It costs nothing any more, which the record does not say yet."""
    text = (
        f"{endpoint.service} does not exist any more, and its time was not over: it was deleted from outside. "
        f"What is left of the endpoint is deleted as well; the model is kept"
    )
    gone = evolve(record, endpoint=evolve(endpoint, ended=now))
    actions = {"details": f"dropforge status {record.run}"}
    return Notice(ENDPOINT_LOST, "has lost its endpoint", text, actions=actions, cost=cost_of(gone, now))


def endpoint_ended(record: Record, endpoint: Endpoint, reason: str, now: datetime) -> Notice:
    """The endpoint of a finished run has ended."""
    cost = record.serving_cost(now)
    price = "" if cost is None else f"; it cost at most {usd(cost)}"
    return Notice(
        "endpoint-ended", "is not served any more", f"{endpoint.service} is deleted: {reason}{price}. The model is kept"
    )
