"""The rules: whether a history keeps dropforge's promises. They read only the history, not the code and not the cloud.

Each rule is a function of one `Life`, the part of the history about one run. It yields each violation as a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from . import container_rules, forgeries, limits, outcomes, places, progress, repeats
from .history import History
from .limits import Rule, outlives
from .lives import SWEEP_SECONDS, TERMINAL, At, Life, Machine, read, seconds_of

FINAL_CLASSES = frozenset({"config", "data", "permission", "out_of_memory", "deadline", "gate", "code", "cancelled"})
_RUN_ID = re.compile(r"[a-z][a-z0-9-]{0,19}-[0-9a-f]{12}")
SWEEPS_SECONDS = 2 * SWEEP_SECONDS  # the second sweep deletes every unowned resource
# The errors that a function may answer with 500: faults of the cloud, and requests to be called again.
EXPECTED_ERRORS = frozenset(
    {
        "RetryLater",
        "Conflict",
        "CloudError",
        "ServiceUnavailable",
        "DeadlineExceeded",
        "ConnectionError",
        "ReadTimeout",
        "ResourceExhausted",
    }
)


class Problem(NamedTuple):
    """A broken promise: the rule, the run, the time, and the violation."""

    rule: str
    run: str
    time: float
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.run or 'the cloud'}: {self.text}"


def check(history: History) -> list[Problem]:
    """Every promise that the history breaks; an empty list for a good history."""
    lives, problems = read(history), []
    for life in lives.values():
        for rule in RULES:
            problems += [Problem(rule.__name__, life.run, time, text) for time, text in rule(life)]
    problems += [Problem("places_are_kept", "", *found) for found in places.places_are_kept(history, lives.values())]
    problems += [Problem("one_intent", "", *found) for found in repeats.one_intent(history, lives)]
    problems += [Problem("sweeps_end", "", time, text) for time, text in outcomes.sweeps_end(history)]
    problems += [Problem("hostile_does_nothing", "", *found) for found in hostile_does_nothing(history)]
    for about in container_rules.RULES:
        problems += [Problem(about.__name__, "", time, text) for time, text in about(history)]
    problems += _defects(history)
    return sorted(problems, key=lambda problem: problem.time)


def one_run(life: Life) -> Iterator[tuple[float, str]]:
    """One spec, however often it is delivered, makes one record, or joins a run. There is no record without a spec.

    A spec that is deleted before submit reads it may have no record, or a record that was rejected or cancelled.
    """
    if life.records and not life.dropped:
        yield life.records[0].time, "the run has a record, but no user dropped its spec"
    if life.dropped and not life.records and not life.joined and not (life.withdrawn and life.was_lost):
        yield life.end.time, "a user dropped its spec, but the run has no record"
    if len(life.creations) > 1:
        yield life.creations[1].time, "the record was created twice"
    if life.records and life.dropped:
        first = life.records[0].value["history"][0]["state"]
        unread = life.withdrawn is not None and life.withdrawn.index < life.records[0].index
        if first != ("ACCEPTED" if life.valid else "REJECTED") and not (unread and first in ("REJECTED", "CANCELLED")):
            yield life.records[0].time, f"the spec is {'valid' if life.valid else 'invalid'}, but the run was {first}"


def ends(life: Life) -> Iterator[tuple[float, str]]:
    """Every run and each of its executions ends."""
    if life.records and life.over is None:
        yield life.end.time, f"the run is still {life.last['state']}"
    for id_ in life.executions:
        if id_ not in life.ended:
            yield life.end.time, f"execution {id_} still runs"


def terminal_once(life: Life) -> Iterator[tuple[float, str]]:
    """A terminal record keeps its end. The history of a record is never rewritten."""
    for before, after in pairwise(life.records):
        old, new = before.value, after.value
        if new["history"][: len(old["history"])] != old["history"]:
            yield after.time, "the history of the record was rewritten"
        if old["state"] in TERMINAL and any(old[key] != new[key] for key in ("state", "error", "attempts", "history")):
            yield after.time, f"the record was {old['state']}, but then changed to {new['state']}"


def attempts_are_closed(life: Life) -> Iterator[tuple[float, str]]:
    """When a run is over, each of its attempts has an end, so its cost no longer grows."""
    if life.over is not None:
        for attempt in life.over.value["attempts"]:
            if attempt["ended"] is None:
                yield life.over.time, f"attempt {attempt['number']} has no end in the record of a finished run"


def one_owner(life: Life) -> Iterator[tuple[float, str]]:
    """One execution owns a run. Another takes over only after the owner has ended. Other executions change nothing."""
    owners: list[str] = []
    for record in life.records:
        owner = record.value["execution"]
        if owner and owner not in owners:
            former = owners[-1] if owners else None
            if former and (former not in life.ended or life.ended[former].index > record.index):
                yield record.time, f"execution {owner} took over the run while {former} was running"
            owners.append(owner)
    for id_, ended in life.ended.items():
        if (
            id_ not in owners
            and ended.value["state"] == "SUCCEEDED"
            and ended.value["result"]["status"] != "SUPERSEDED"
        ):
            yield ended.time, f"execution {id_} does not own the run, but ended as {ended.value['result']['status']}"


def training_is_reported(life: Life) -> Iterator[tuple[float, str]]:
    """A run is TRAINING only after a container of that attempt has reported. No other container speaks for it.

    A model that a container of any attempt has committed is the success of the run.
    """
    reported = {event.value["attempt"]: event.index for event in reversed(life.job_events)}
    committed = [manifest.index for manifest in life.manifests if manifest.value.get("run") == life.run]
    seen: set[int] = set()
    for record in life.records:
        number = record.value["history"][-1]["attempt"]
        if record.value["state"] == "TRAINING" and number not in seen:
            seen.add(number)
            if min([reported.get(number, record.index), *committed]) >= record.index:
                yield record.time, f"attempt {number} was TRAINING before its container had reported anything"


def rejected_does_nothing(life: Life) -> Iterator[tuple[float, str]]:
    """A rejected spec has no execution and no resource."""
    if life.last.get("state") == "REJECTED":
        for id_, started in life.executions.items():
            yield started.time, f"execution {id_} was started for a rejected spec"
        for machine in life.machines:
            yield machine.created.time, f"{machine.name} was created for a rejected spec"


def intent_first(life: Life) -> Iterator[tuple[float, str]]:
    """The ledger says that a resource is intended before it is created."""
    for machine in life.machines:
        entry = life.entry_at(machine.created.index, machine.name)
        if machine.owner is not None:
            continue  # created by a controller, so no request names it
        if entry is None:
            yield machine.created.time, f"{machine.name} was created without a ledger entry"
        elif entry["state"] == "gone" and not machine.late and not _was_known(life, machine):
            yield machine.created.time, f"{machine.name} was created while its ledger entry was gone"


def one_at_a_time(life: Life) -> Iterator[tuple[float, str]]:
    """The training resources of an attempt are deleted before the next attempt or the endpoint creates resources."""
    for machine in life.machines:
        present = [other for other in life.training if other.exists_at(machine.created.index)]
        others = [other for other in present if other.attempt != machine.attempt]
        for other in others:
            if not life.is_stray(machine) and not life.is_stray(other):
                yield machine.created.time, f"{machine.name} was created while {other.name} existed"


def nothing_left(life: Life) -> Iterator[tuple[float, str]]:
    """When a run is over, its resources are deleted except its endpoint; the next clean sweep deletes late ones."""
    for machine in life.machines:
        serves = life.serves(machine) and life.over is not None and life.over.value["state"] == "SUCCEEDED"
        if machine.gone is None:
            yield life.end.time, f"{machine.name} still exists"
        elif life.over is not None and machine.exists_at(life.over.index) and not serves and not life.is_stray(machine):
            yield life.over.time, f"{machine.name} existed when the run was {life.over.value['state']}"
        if machine.gone is not None and life.over is not None and not serves:
            since = max((machine.made or machine.created).time, life.over.time, life.calm)
            if machine.gone.time - since > SWEEPS_SECONDS:
                yield machine.gone.time, f"{machine.name} had no owner for {machine.gone.time - since:.0f} s"
            sweep = life.swept_after(max(machine.created.index, life.over.index), 0.0)
            if sweep is not None and outlives(machine, sweep):
                yield sweep.ended.time, f"a clean sweep did not delete {machine.name}, which had no owner"


def cancel_wins(life: Life) -> Iterator[tuple[float, str]]:
    """A run that a user cancels before its teardown begins ends CANCELLED and serves nothing."""
    if life.over is None:
        return
    request = next((record for record in life.records if record.value["cancel_requested"]), None)
    # A later cancel request ends the endpoint.
    must_cancel = request is not None and request.value["state"] not in (*TERMINAL, "TEARING_DOWN")
    if must_cancel and life.over.value["state"] != "CANCELLED":
        yield life.over.time, f"the cancel was recorded, but the run ended {life.over.value['state']}"
    unrequested = request is None or not (life.cancels or life.withdrawn or life.is_cancelled_by_repeat)
    if life.over.value["state"] == "CANCELLED" and unrequested:
        yield life.over.time, "the run ended CANCELLED without a cancel request"
    for cancel in life.cancels:
        handled = life.handled.get(cancel.value["message"])
        if handled is None:
            yield life.end.time, f"no function answered the cancel message {cancel.value['message']}"
            continue
        record = life.record_at(handled.index)
        if record is None or record["state"] == "REJECTED":
            continue
        kept = life.over.value["state"] == "CANCELLED" and any(i.index < handled.index for i in life.intents)
        is_ending = record["state"] in TERMINAL or record["state"] == "TEARING_DOWN"
        if not is_ending and not record["cancel_requested"] and not kept:
            yield (
                handled.time,
                f"the cancel was answered in state {record['state']}, but the record has no cancel request",
            )
        serving = [m for m in life.machines if life.serves(m) and m.exists_at(handled.index) and not life.is_stray(m)]
        if record["state"] in TERMINAL and serving and cancel.value["how"] == "message":
            yield handled.time, f"the cancel was answered while {serving[0].name} existed"


def forged_does_nothing(life: Life) -> Iterator[tuple[float, str]]:
    """A request about an unknown run, or about the run of another source, is answered by an event: that is all."""
    answers = {message.value["event"]["details"]["message"] for message in life.published if _is_answer(message)}
    for request in life.forged:
        message = request.value["message"]
        if message not in life.handled:
            yield life.end.time, f"message {message} names no run of its source and was never acknowledged"
        elif _RUN_ID.fullmatch(life.run) and message not in answers:
            yield life.end.time, f"message {message} names no run of its source and got no answer"
    if life.forged and not life.dropped:
        if not all(_is_answer(message) for message in life.published):
            yield life.end.time, "no user dropped its spec, but the run has published events"
        for kind in ("records", "ledgers", "machines", "executions", "slack"):
            if getattr(life, kind):
                yield life.end.time, f"no user dropped its spec, but the run has {kind}"


def attempts_end(life: Life) -> Iterator[tuple[float, str]]:
    """No attempt follows a permanent failure, and there are no more attempts than the spec allows."""
    attempts = life.last.get("attempts", [])
    for before, after in pairwise(attempts):
        error_class = (before["error"] or {}).get("error_class")
        if error_class in FINAL_CLASSES:
            yield seconds_of(after["started"]), f"attempt {after['number']} followed a permanent failure: {error_class}"
    most = life.spec.get("limits", {}).get("max_attempts", 20)
    if len(attempts) > most:
        yield seconds_of(attempts[-1]["started"]), f"{len(attempts)} attempts; the spec allows {most}"


def everybody_is_told(life: Life) -> Iterator[tuple[float, str]]:
    """The end is reported at least once by a run event and in Slack. Every report is true."""
    if not life.records:
        return
    reached = {_event_id(life.run, entry): seconds_of(entry["time"]) for entry in life.last["history"]}
    by_event = {message.value["id"] for message in life.published}
    in_slack = {message.value["event"] for message in life.slack if message.value["status"] == 200}
    for message in life.published:
        event = message.value["event"]
        if event.get("notice"):
            continue
        if message.value["id"] not in reached or event["id"] != message.value["id"]:
            yield message.time, f"event {message.value['id']} reports a state that the run did not reach"
        elif abs(seconds_of(event["time"]) - reached[event["id"]]) > 0.001:
            yield message.time, f"event {event['id']} was published with another time: {event['time']}"
    for message in life.slack:
        if message.value["event"] not in reached and "/notice/" not in message.value["event"]:
            yield message.time, f"Slack got {message.value['event']}, a state that the run did not reach"
    if life.over is not None:
        final = _event_id(life.run, life.last["history"][-1])
        if final not in by_event:
            yield life.end.time, f"no event {final} was published"
        if final not in in_slack:
            yield life.end.time, f"Slack never got {final}"
    unstarted = [entry["state"] for entry in life.last["history"]] == ["ACCEPTED", "CANCELLED"]
    if not life.publish_faults and not unstarted:  # cancelled before its start was reported
        for id_, time in reached.items():
            if id_ not in by_event:
                yield time, f"no event {id_} was published, although publishing never failed"


def summaries_are_true(life: Life) -> Iterator[tuple[float, str]]:
    """Every record was written with its summary: no list of runs ever shows what the record does not say."""
    for record, summary in zip(life.records, life.summaries, strict=True):
        shown, value = json.loads(summary.value.get("summary-1", "{}")), record.value
        told = {name: shown.get(name, missing) for name, missing in _SUMMARY.items()}
        told["about"] = told["about"] and _ABOUT | told["about"]
        attempts, queued = value["attempts"], value.get("queued")
        expected = {
            "run": life.run,
            "state": value["state"],
            "created": value["created"],
            "metrics": value["metrics"],
            "attempt": attempts[-1]["number"] if attempts else 0,
            "place": queued["place"] if queued else None,
            "about": value.get("about"),
        }
        wrong = [name for name in expected if told[name] != expected[name]]
        if wrong:
            yield record.time, f"the summary of the record has another {', '.join(wrong)}: {told}"


# The fields that the rule compares, and what each is if the summary leaves it out.
_SUMMARY = {"run": "", "state": "", "created": "", "metrics": {}, "attempt": 0, "place": None, "about": None}
_ABOUT: dict[str, Any] = {"labels": {}, "metric": "", "most_usd": None}

RULES: tuple[Rule, ...] = (
    one_run,
    ends,
    terminal_once,
    attempts_are_closed,
    one_owner,
    training_is_reported,
    rejected_does_nothing,
    intent_first,
    one_at_a_time,
    nothing_left,
    cancel_wins,
    forged_does_nothing,
    attempts_end,
    everybody_is_told,
    summaries_are_true,
    *limits.RULES,
    *outcomes.RULES,
    progress.stuck_is_told,
    progress.one_host_ends_all,
)


def hostile_does_nothing(history: History) -> Iterator[tuple[float, str]]:
    """No function keeps a forged job event, and nothing is written about a run that nobody has.

    A hostile container may read, list, replace and delete nothing outside of its run.
    """
    for act in history.of("hostile"):
        if act.data.get("allowed") and not act.data["name"].startswith(forgeries.places(act.data["run"])):
            yield act.time, f"{act.data['run']} may {act.data['does']} {act.data['name']}"
    for fact in history.of("write"):
        if forgeries.is_kept(fact.data["name"]):
            yield fact.time, f"{fact.data['name']} was written because of a forgery"
        elif forgeries.is_told(fact.data["content"]):
            yield fact.time, f"{fact.data['name']} repeats a forged series"


def _defects(history: History) -> Iterator[Problem]:
    """Errors without a fault that explains them: defects in the code."""
    for fact in history.of("answer"):
        if fact.data["status"] == 500:
            name = str(fact.data["body"]["error"]).split(":")[0]
            if name.isidentifier() and name not in EXPECTED_ERRORS:
                text = f"{fact.data['instance']} answered {fact.data['body']['error'][:300]}"
                yield Problem("no_defects", "", fact.time, text)
        elif fact.data["status"] in (400, 404):
            text = f"{fact.data['instance']} answered {fact.data['status']} to the workflow: {fact.data['body']}"
            yield Problem("no_defects", "", fact.time, text)


def _is_answer(message: At) -> bool:
    """Whether a run event answers a request that names no run of its source."""
    return bool(message.value["event"].get("state") == "UNKNOWN")


def _was_known(life: Life, machine: Machine) -> bool:
    """Whether the ledger once had the resource: its create request was still under way during teardown."""
    return any(
        entry["name"] == machine.name and entry["state"] != "gone"
        for ledger in life.ledgers
        if ledger.index < machine.created.index
        for entry in ledger.value["entries"]
    )


def _event_id(run: str, entry: dict[str, Any]) -> str:
    return f"{run}/{entry['attempt']}/{entry['state'].lower()}"
