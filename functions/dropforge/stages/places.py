"""Places of runs that the policy limits: provision waits for a place, and a run that ends gives its place to the next.

If a function crashes before it gives a place back, or if the object with the places is lost, the sweep repairs it from
the records. A policy without such limits costs no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from pydantic import ValidationError

from dropforge.base.errors import Conflict, Malformed, NotFound
from dropforge.base.redact import cut
from dropforge.context import Context
from dropforge.run.places import Entry, Places, Rule, Wait
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec
from dropforge.spec.policy import BrokenPolicy, ByLabel, policy_of
from dropforge.tell import notices
from dropforge.tell.everybody import warn

from .answers import Pending
from .ceiling import cost_of
from .looks import next_turn

OBJECT = "runs/places.json"
# With pauses of 5 s at most in all, because a call keeps an instance of its function busy; of the sweep, 82 s.
CHANGE_TRIES, REPAIR_TRIES = 9, 13
READERS = 32  # of specs at once
PATIENCE = timedelta(hours=1)  # of the workflow, if provision does not answer any more


def wait_for_place(context: Context, run: str, execution: str, spec: JobSpec) -> Pending | None:
    """Wait for a place if the policy limits how many such runs there may be; None if the run may continue.

    Raises NotFound for an unknown run, and Conflict if the record keeps changing.
    """
    rules = _rules(context)
    if not any(rule.covers(spec.labels) for rule in rules):
        return None
    store = context.store
    record = store.update(run, lambda latest: latest.claimed(execution))
    if record.execution != execution or record.state is not RunState.ACCEPTED or record.placed:
        return None
    entry, now = _entry(record, spec), context.now()
    try:
        waits = _change(context, rules, lambda places: places.with_waiting(entry))
    except Conflict:  # many runs change the places: the sweep enters this run, unless the run itself is faster
        return _not_entered(context, record, [rule for rule in rules if rule.covers(spec.labels)], now)
    now = context.now()
    if wait := waits.get(run):
        record = store.update(run, lambda latest: latest.with_wait(wait.rule, wait.place, now))
    else:
        record = store.update(run, lambda latest: latest.with_place(now))
    if record.state.is_terminal:  # a user has cancelled the run meanwhile
        leave(context, record)
        return None
    return _pending(context, record, spec, wait, now) if wait else None


def leave(context: Context, record: Record) -> None:
    """Give back the place of a run that has ended, and the money that it did not use. Idempotent. Raises Conflict."""
    if rules := _rules(context):
        _change(context, rules, lambda places: places.without(record.run, _cost_in_the_end(record), rules))


def known_runs(context: Context) -> set[str]:
    """The runs that hold a place or wait for one."""
    return _read(context)[0].runs if _rules(context) else set()


def repair(context: Context, records: Mapping[str, Record | None]) -> None:
    """Take the places of runs that have ended, and enter runs that lost theirs, or could not enter. Raises Conflict.

    All of that is one write: where many runs begin and end, the object takes fewer changes than there are runs.
    """
    rules = _rules(context)
    if not rules:
        return
    places = _read(context)[0]
    held = {entry.run for entry in places.holding}
    lost = [run for run, record in records.items() if record and _holds_place(record) and run not in held]
    again = [record for run in lost if (record := context.store.find(run)) and _holds_place(record)]
    entries = [_entry(record, context.store.spec(record.run)) for record in again]
    missing = [run for run, record in records.items() if record and run not in places.runs and _waits(record)]
    behind = [entry for entry in context.cloud.threads.map(partial(_waiting, context), missing, READERS) if entry]
    over = [record for run in places.runs if (record := records.get(run)) and record.state.is_terminal]

    def repaired(present: Places) -> Places:
        for record in over:
            present = present.without(record.run, _cost_in_the_end(record), rules)
        return present.with_holding(entries).with_waiting(*behind)

    _change(context, rules, repaired, REPAIR_TRIES)


def _rules(context: Context) -> list[Rule]:
    """The rules of the policy that limit runs or money; none if the policy is broken: accepted runs continue."""
    try:
        policy = policy_of(context.settings.policy)
    except BrokenPolicy:
        return []
    rules = [
        Rule(name, ceiling.labels if isinstance(ceiling, ByLabel) else {}, ceiling.max_runs, ceiling.max_usd_per_day)
        for name, ceiling in policy.ceilings.items()
    ]
    return [rule for rule in rules if rule.runs is not None or rule.usd is not None]


def _change(
    context: Context, rules: list[Rule], change: Callable[[Places], Places], tries: int = CHANGE_TRIES
) -> dict[str, Wait]:
    """Change the places and give out those that are free, in one conditional write, again after each conflict.

    Returns what each run waits for. Raises Conflict.
    """
    today = context.now().date().isoformat()
    for attempt in range(tries):
        before, generation = _read(context)
        after, waits = change(before).given_out(rules, today)
        if after == before or context.store.try_write(OBJECT, after.model_dump_json().encode(), generation):
            return waits
        context.cloud.clock.sleep(context.cloud.chance.uniform(0, 0.01 * 2**attempt))
    raise Conflict(f"{OBJECT} kept changing through {tries} tries")


def _read(context: Context) -> tuple[Places, int]:
    """The places and the generation of their object; none if it does not exist or cannot be read."""
    try:
        data, generation = context.store.read(OBJECT)
    except NotFound:
        return Places(), 0
    try:
        return Places.model_validate_json(data), generation
    except ValidationError as error:
        context.log(cut(f"{OBJECT} is begun again: {error!r}", 500), stage="provision", severity="ERROR")
        return Places(), generation


def _pending(context: Context, record: Record, spec: JobSpec, wait: Wait, now: datetime) -> Pending:
    warn(context, record, spec, notices.queued(wait.rule, wait.place, _free(wait)))
    return _turn(record.queued.since if record.queued else now, now)


def _not_entered(context: Context, record: Record, rules: list[Rule], now: datetime) -> Pending:
    """The answer for a run that could not enter the places. Its record says that the run waits, behind the others."""
    if record.queued is None:
        limit = rules[0].max_usd if rules[0].runs is None else rules[0].max_runs
        place = len(_read(context)[0].waiting) + 1
        context.store.update(record.run, lambda latest: latest.with_wait(limit, place, now))
    return _turn(record.queued.since if record.queued else record.created, now)


def _turn(since: datetime, now: datetime) -> Pending:
    """The answer for a run that waits since `since`."""
    return Pending(wait_seconds=next_turn((now - since).total_seconds()), deadline=(now + PATIENCE).timestamp())


def _free(wait: Wait) -> str:
    if wait.rule.endswith("max_runs"):
        return "it starts when enough earlier runs have ended"
    return "it starts when earlier runs return money, or on another day (UTC)"


def _entry(record: Record, spec: JobSpec) -> Entry:
    day = record.placed.date().isoformat() if record.placed else ""
    return Entry(run=record.run, created=record.created, labels=spec.labels, usd=cost_of(spec).most or 0.0, day=day)


def _waiting(context: Context, run: str) -> Entry | None:
    """The entry of a run that still waits. A run whose objects cannot be read does not stop the others."""
    with suppress(Malformed, NotFound):
        record = context.store.record(run)
        return _entry(record, context.store.spec(run)) if _waits(record) else None
    return None


def _waits(record: Record) -> bool:
    """Whether a run waits for a place; it has asked for one, so its execution runs, and not in a queue."""
    is_waiting = record.state is RunState.ACCEPTED and record.queued is not None and record.placed is None
    return is_waiting and record.cancel_requested is None


def _holds_place(record: Record) -> bool:
    return record.placed is not None and not record.state.is_terminal


def _cost_in_the_end(record: Record) -> float | None:
    """The most that an ended run costs, with its endpoint until that expires; None if a price is unknown."""
    endpoint = record.endpoint
    return record.cost(endpoint.ended or endpoint.expires if endpoint else record.history[-1].time)
