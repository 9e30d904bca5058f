"""The checker finds each broken promise: a good history passes, and with one thing wrong it does not."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dropforge_local.chaos import checker, limits, lives, progress
from dropforge_local.chaos.checker import RULES, check
from dropforge_local.chaos.history import Fact, History

RUN = "job-0123456789ab"
JOB = f"projects/p/locations/us-central1/jobs/df-{RUN}-a"
NODE = f"projects/p/locations/us-central1-a/nodes/df-{RUN}-a1"
SERVICE = f"projects/p/locations/us-central1/services/df-{RUN}-serve"
SPEC = {
    "target": {"price_usd_per_hour": 3.6},
    "serve": {"ttl": "10m", "price_usd_per_hour": 0.36},
    "limits": {"max_duration": "10m", "max_cost_usd": 0.5, "max_attempts": 3},
}


class Story:
    """A history that is written fact by fact; each fact comes a second after the one before, unless told otherwise."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.now = 1_000_000.0
        self.record: dict[str, Any] = {
            "state": "",
            "created": _iso(self.now),
            "history": [],
            "execution": None,
            "cancel_requested": None,
            "attempts": [],
            "endpoint": None,
            "error": None,
        }
        self.entries: list[dict[str, Any]] = []
        self.sweeps = 0

    def tell(self, kind: str, after: float = 1.0, **data: Any) -> None:
        self.now += after
        self.facts.append(Fact(self.now, kind, copy.deepcopy(data)))

    def write(self, name: str, content: Any, replaced: int) -> None:
        self.tell("write", bucket="b", name=f"runs/{RUN}/{name}", generation=1, replaced=replaced, content=content)

    def change(self, state: str = "", **changes: Any) -> None:
        """Write the record, in a new state if one is given; that is told, too."""
        first = not self.record["history"]
        self.record |= changes
        if state:
            moved = {"state": state, "time": _iso(self.now + 1), "attempt": len(self.record["attempts"])}
            self.record |= {"state": state, "history": [*self.record["history"], moved]}
        self.write("record.json", self.record, 0 if first else 1)
        if state:
            self.publish(state)

    def publish(self, state: str) -> None:
        entered = next(moved for moved in self.record["history"] if moved["state"] == state)
        id_ = f"{RUN}/{entered['attempt']}/{state.lower()}"
        self.tell("published", topic="run-events", id=id_, event={"id": id_, "run": RUN, "time": entered["time"]})
        self.tell("slack", event=id_, text=state, status=200)

    def ledger(self, name: str, state: str) -> None:
        self.entries = [*[entry for entry in self.entries if entry["name"] != name], {"name": name, "state": state}]
        self.write("ledger.json", {"run": RUN, "entries": self.entries}, 1)

    def attempt(self, number: int, error_class: str | None, seconds: float = 60.0) -> None:
        """One attempt, from its opening to its teardown."""
        opened = {"number": number, "started": _iso(self.now), "ended": None, "error": None}
        opened["deadline"] = _iso(self.now + 500)
        self.change(attempts=[*self.record["attempts"], opened])
        self.ledger(f"{JOB}{number}", "intended")
        self.tell("created", type="job", name=f"{JOB}{number}", labels={"dropforge-run": RUN})
        self.tell("running", name=f"{JOB}{number}")
        self.tell("told", after=seconds, run=RUN, attempt=number, type=error_class or "succeeded")
        self.tell("ended", name=f"{JOB}{number}", exit_code=0)
        error = error_class and {"error_class": error_class}
        closed = self.record["attempts"][-1] | {"ended": _iso(self.now), "error": error}
        self.change(attempts=[*self.record["attempts"][:-1], closed])
        self.tell("deleting", name=f"{JOB}{number}")
        self.tell("gone", name=f"{JOB}{number}")
        self.ledger(f"{JOB}{number}", "gone")

    def begin(self, limits: dict[str, Any], seconds: float) -> float:
        """A run with these limits, until its only attempt trains, which may take so long; when that was opened."""
        self.tell("dropped", run=RUN, valid=True, spec=SPEC | {"limits": limits})
        self.change("ACCEPTED")
        self.tell("execution", id="e1", run=RUN)
        self.change(execution="e1")
        self.change("PROVISIONING")
        started = self.now
        opened = {"number": 1, "started": _iso(started), "deadline": _iso(started + seconds)}
        self.change(attempts=[opened | {"ended": None, "error": None}])
        self.ledger(f"{JOB}1", "intended")
        self.tell("created", type="job", name=f"{JOB}1", labels={"dropforge-run": RUN})
        self.tell("running", name=f"{JOB}1")
        self.change("TRAINING")
        return started

    def fail(self, error_class: str, exit_code: int | None) -> None:
        """Its only attempt ends so, and the run with it."""
        self.tell("ended", name=f"{JOB}1", exit_code=exit_code)
        error = {"error_class": error_class}
        self.change(attempts=[self.record["attempts"][0] | {"ended": _iso(self.now), "error": error}])
        self.change("TEARING_DOWN")
        self.tell("deleting", name=f"{JOB}1")
        self.tell("gone", name=f"{JOB}1")
        self.ledger(f"{JOB}1", "gone")
        self.change("FAILED", error=error)
        self.tell("execution_ended", id="e1", run=RUN, state="SUCCEEDED", result={"status": "FAILED"})

    def sweep(self, after: float = 1.0) -> None:
        """One that has no problems."""
        self.sweeps += 1
        self.tell("call", after=after, instance=f"sweep-{self.sweeps}")
        self.tell("answer", instance=f"sweep-{self.sweeps}", status=200, body={"problems": []})

    def serve(self, seconds: float) -> None:
        """The endpoint, for so long, and the run's end."""
        self.change("DEPLOYING")
        self.ledger(SERVICE, "intended")
        self.tell("created", type="service", name=SERVICE, labels={"dropforge-run": RUN})
        self.change(endpoint={"ready": _iso(self.now), "expires": _iso(self.now + seconds), "ended": None})
        self.change("TEARING_DOWN")
        self.change("SUCCEEDED")
        self.tell("execution_ended", id="e1", run=RUN, state="SUCCEEDED", result={"status": "SUCCEEDED"})

    def end_endpoint(self) -> None:
        """The sweep that ends it, and another one."""
        self.tell("call", after=300, instance="sweep-8")
        self.tell("deleting", name=SERVICE)
        self.tell("gone", name=SERVICE)
        self.ledger(SERVICE, "gone")
        self.change(endpoint=self.record["endpoint"] | {"ended": _iso(self.now)})
        self.notice("endpoint-ended")
        self.tell("answer", instance="sweep-8", status=200, body={"problems": []})
        self.sweep(after=600)

    def notice(self, key: str) -> None:
        id_ = f"{RUN}/notice/{key}"
        event = {"id": id_, "run": RUN, "notice": key, "time": _iso(self.now)}
        self.tell("published", topic="run-events", id=id_, event=event)
        self.tell("slack", event=id_, text=key, status=200)

    def history(self) -> History:
        return History(0, [*self.facts, Fact(self.now + 1, "calm", {}), Fact(self.now + 9000, "end", {"living": []})])


def served() -> Story:
    """A preempted attempt, one that succeeds, an endpoint until its ttl."""
    story = Story()
    story.tell("dropped", run=RUN, valid=True, spec=SPEC)
    story.change("ACCEPTED")
    story.tell("execution", id="e1", run=RUN)
    story.change(execution="e1")
    story.change("PROVISIONING")
    story.attempt(1, "preempted")
    story.attempt(2, None)
    story.serve(600)
    story.sweep(after=400)
    story.end_endpoint()
    return story


def warned() -> Story:
    """A model that is served until its budget is spent, and three sweeps meanwhile."""
    story = Story()
    started = story.begin({"max_duration": "15m", "max_cost_usd": 0.1}, 50)
    story.tell("told", after=40, run=RUN, attempt=1, type="succeeded")
    story.tell("ended", name=f"{JOB}1", exit_code=0)
    story.change(attempts=[story.record["attempts"][0] | {"ended": _iso(story.now)}])
    story.tell("deleting", name=f"{JOB}1")
    story.tell("gone", name=f"{JOB}1")
    story.ledger(f"{JOB}1", "gone")
    story.serve(540)
    for key, after in (("budget-50", 150), ("budget-80", 320)):
        story.tell("call", after=started + after - story.now, instance=f"sweep-{key}")
        story.notice(key)
        story.tell("answer", instance=f"sweep-{key}", status=200, body={"problems": []})
    story.end_endpoint()
    return story


def stopped() -> Story:
    """An attempt that its budget ends, after two warnings of the budget and one of the time."""
    story = Story()
    started = story.begin({"max_duration": "15m", "max_cost_usd": 0.8}, 800)
    story.tell("told", run=RUN, attempt=1, type="started")
    story.tell("tick", after=400)
    story.notice("budget-50")
    story.tell("tick", after=200)
    story.notice("budget-80")
    story.tell("tick", after=80)
    story.notice("time-80")
    story.tell("told", after=started + 780 - story.now, run=RUN, attempt=1, type="failed")
    story.fail("budget", exit_code=75)
    return story


def stuck() -> Story:
    """An attempt that tells of the same step again and again, and is ended for that."""
    story = Story()
    story.begin({"max_duration": "1h", "stuck_after": "5m", "on_stuck": "fail"}, 3000)
    for sequence, step in enumerate((3, 7, 7, 7)):
        story.tell("told", after=150, run=RUN, attempt=1, sequence=sequence, type="progress", step=step)
        story.write(f"events/0001-{sequence:015d}-progress.json", None, 0)
    story.tell("tick", after=60)
    story.notice("stuck-a1")
    story.fail("stuck", exit_code=None)
    return story


def cancelled() -> Story:
    """Somebody asks for the end in the middle of training."""
    story = Story()
    story.tell("dropped", run=RUN, valid=True, spec=SPEC)
    story.change("ACCEPTED")
    story.tell("execution", id="e1", run=RUN)
    story.change(execution="e1")
    story.tell("cancel", run=RUN, message="m1", how="message")
    story.tell("call", instance="on_spec_message-1", message="m1")
    story.change(cancel_requested=_iso(story.now))
    story.tell("answer", instance="on_spec_message-1", status=200, body=None)
    story.change("TEARING_DOWN")
    story.change("CANCELLED")
    story.tell("execution_ended", id="e1", run=RUN, state="SUCCEEDED", result={"status": "CANCELLED"})
    return story


def rejected() -> Story:
    """A spec that is not valid."""
    story = Story()
    story.tell("dropped", run=RUN, valid=False, spec=SPEC)
    story.change("REJECTED")
    return story


@pytest.mark.parametrize("story", [served, warned, stopped, stuck, cancelled, rejected])
def test_a_good_history_keeps_every_promise(story: Callable[[], Story]) -> None:
    assert check(story().history()) == []


# What is done to a story that is good, and the rule that must find it.
def _twice_created(story: Story) -> None:
    story.write("record.json", story.record, 0)


def _lost(story: Story) -> None:
    story.tell("dropped", run="other-0123456789ab", valid=True, spec=SPEC)


def _invented(story: Story) -> None:
    story.facts = [fact for fact in story.facts if fact.kind != "dropped"]


def _accepted_though_invalid(story: Story) -> None:
    _alter(story, "dropped", 0, valid=False)


def _refused_before_it_was_withdrawn(story: Story) -> None:
    _alter(story, "dropped", 0, valid=True)
    story.tell("withdrawn", run=RUN, how="deleted")


def _without_end(story: Story) -> None:
    story.facts = story.facts[: _index(story, "execution_ended") - 3]


def _endless_execution(story: Story) -> None:
    story.tell("execution", id="e2", run=RUN)


def _second_end(story: Story) -> None:
    story.record = story.record | {"error": {"error_class": "code"}}
    story.change()


def _rewritten(story: Story) -> None:
    story.record["history"] = story.record["history"][1:]
    story.change()


def _open_attempt(story: Story) -> None:
    for fact in story.facts:
        for attempt in (fact.data.get("content") or {}).get("attempts", []):
            attempt["ended"] = None


def _stolen(story: Story) -> None:
    at = _index(story, "created")
    record = copy.deepcopy(next(f for f in reversed(story.facts[:at]) if "record" in f.data.get("name", "")))
    record.data["content"]["execution"] = "e2"
    story.facts.insert(at, record)
    story.facts.insert(at, Fact(record.time, "execution", {"id": "e2", "run": RUN}))
    ended = {"id": "e2", "run": RUN, "state": "SUCCEEDED", "result": {"status": "SUPERSEDED"}}
    story.facts.insert(at + 1, Fact(record.time, "execution_ended", ended))


def _busy_stranger(story: Story) -> None:
    story.tell("execution", id="e2", run=RUN)
    story.tell("execution_ended", id="e2", run=RUN, state="SUCCEEDED", result={"status": "FAILED"})


def _executed(story: Story) -> None:
    story.tell("execution", id="e1", run=RUN)
    story.tell("execution_ended", id="e1", run=RUN, state="SUCCEEDED", result={"status": "SUPERSEDED"})


def _unannounced(story: Story) -> None:
    story.facts.insert(_index(story, "created") - 1, story.facts.pop(_index(story, "created")))


def _again_after_teardown(story: Story) -> None:
    at = _index(story, "created", 1)
    again = [Fact(story.facts[at].time, kind, {"name": f"{JOB}1"}) for kind in ("gone",)]
    created = Fact(story.facts[at].time, "created", {"name": f"{JOB}9", "labels": {"dropforge-run": RUN}})
    story.facts[at:at] = [created, *[Fact(f.time, f.kind, {"name": f"{JOB}9"}) for f in again]]


def _two_at_once(story: Story) -> None:
    gone = story.facts.pop(_index(story, "gone"))
    story.facts.insert(_index(story, "created", 1) + 1, gone)


def _serves_too_early(story: Story) -> None:
    gone = story.facts.pop(_index(story, "gone", 1))
    story.facts.insert(_index(story, "created", 2) + 1, gone)


def _left_over(story: Story) -> None:
    story.facts.pop(_index(story, "gone", 1))


def _there_at_the_end(story: Story) -> None:
    gone = story.facts.pop(_index(story, "gone", 1))
    story.facts.append(Fact(story.now, "gone", gone.data))


def _late_and_long(story: Story) -> None:
    name = f"{JOB}3"
    story.tell("late", call="run.create_job", delay=1)
    story.tell("created", after=0, type="job", name=name, labels={"dropforge-run": RUN})
    story.ledger(name, "intended")
    story.tell("calm")
    story.tell("gone", after=3000, name=name)


def _endpoint_for_ever(story: Story) -> None:
    at = _index(story, "call", 1)
    story.facts.insert(at, Fact(story.facts[at - 1].time, "calm", {}))
    _delay(story, at + 1, 3000)


def _cancel_lost(story: Story) -> None:
    for fact in story.facts:
        if fact.kind == "write":
            fact.data["content"]["cancel_requested"] = None


def _cancel_ignored(story: Story) -> None:
    _end_as(story, "FAILED")


def _cancel_unanswered(story: Story) -> None:
    story.facts = [fact for fact in story.facts if fact.kind != "answer"]


def _cancel_from_nowhere(story: Story) -> None:
    _end_as(story, "CANCELLED")


def _cancel_that_nobody_asked(story: Story) -> None:
    story.facts = [fact for fact in story.facts if fact.kind != "cancel"]


def _forged_and_unanswered(story: Story) -> None:
    story.tell("forged", run="nobody-0123456789ab", message="m9")


def _forged_and_obeyed(story: Story) -> None:
    story.facts.insert(0, Fact(story.facts[0].time, "forged", {"run": RUN, "message": "m9"}))
    story.facts = [fact for fact in story.facts if fact.kind != "dropped"]


def _expensive(story: Story) -> None:
    _delay(story, _index(story, "ended", 1), 1200)


def _expensive_endpoint(story: Story) -> None:
    limits = SPEC["limits"] | {"max_cost_usd": 0.2}  # type: ignore[operator]
    serve = {"ttl": "10m", "price_usd_per_hour": 36.0}
    _alter(story, "dropped", 0, spec={**SPEC, "limits": limits, "serve": serve})


def _expensive_machine(story: Story) -> None:
    """The machine of a node ends only when somebody deletes it."""
    _rename(story, f"{JOB}1", NODE)
    _delay(story, _index(story, "ended"), 600)


def _swept_in_vain(story: Story) -> None:
    """A sweep that should have ended the endpoint, and did not."""
    at = _index(story, "call", 1)
    began = story.facts[at]
    story.facts[at:at] = [
        began._replace(data={"instance": "sweep-7"}),
        Fact(began.time, "answer", {"instance": "sweep-7", "status": 200, "body": {"problems": []}}),
    ]


def _stray_survives_a_sweep(story: Story) -> None:
    name = f"{JOB}3"
    story.tell("late", call="run.create_job", delay=1)
    story.tell("created", after=0, type="job", name=name, labels={"dropforge-run": RUN})
    story.ledger(name, "intended")
    story.sweep()
    story.tell("deleting", name=name)
    story.tell("gone", name=name)


def _endpoint_too_early(story: Story) -> None:
    at = _index(story, "deleting", 2)
    story.facts[at:] = [fact._replace(time=fact.time - 300) for fact in story.facts[at:]]


def _endless_ttl(story: Story) -> None:
    for fact in story.facts:
        if endpoint := (fact.data.get("content") or {}).get("endpoint"):
            endpoint["expires"] = _iso(story.now + 3600)


def _unwarned_of_money(story: Story) -> None:
    _forget_notice(story, "budget-50", "budget-80")


def _ended_silently(story: Story) -> None:
    _forget_notice(story, "endpoint-ended")


def _ended_too_early(story: Story) -> None:
    id_ = f"{RUN}/notice/endpoint-ended"
    event = {"id": id_, "run": RUN, "notice": "endpoint-ended"}
    told = Fact(story.now - 1000, "published", {"topic": "run-events", "id": id_, "event": event})
    story.facts.insert(_index(story, "execution_ended"), told)


def _unwarned_in_slack(story: Story) -> None:
    story.facts = [f for f in story.facts if not (f.kind == "slack" and "/notice/budget" in f.data["event"])]


def _unwarned_of_time(story: Story) -> None:
    _alter(story, "dropped", 0, spec={**SPEC, "limits": {"max_duration": "8m"}})
    _forget_notice(story, "time-80")


def _warned_too_early(story: Story) -> None:
    told = next(f for f in story.facts if f.kind == "published" and f.data["id"].endswith("time-80"))
    story.facts.insert(_index(story, "tick"), told._replace(time=story.facts[_index(story, "running")].time))


def _warned_by_another_id(story: Story) -> None:
    event = story.facts[_index(story, "published", 3)].data["event"]
    story.tell("published", topic="run-events", id=f"{RUN}/notice/again", event=event)


def _ended_without_a_word(story: Story) -> None:
    story.facts = [fact for fact in story.facts if fact.data.get("type") != "failed"]


def _stuck_and_untold(story: Story) -> None:
    _delay(story, _index(story, "tick"), 900)
    _forget_notice(story, "stuck-a1")
    _end_otherwise(story)


def _stuck_and_left_alone(story: Story) -> None:
    _delay(story, _index(story, "ended"), 900)
    _end_otherwise(story)


def _stuck_though_it_goes_on(story: Story) -> None:
    _alter(story, "told", 3, step=8)


def _stuck_and_ended_unasked(story: Story) -> None:
    _alter(story, "dropped", 0, spec=SPEC | {"limits": {"max_duration": "1h", "stuck_after": "5m"}})


def _ended_without_teardown(story: Story) -> None:
    for fact in story.facts:
        for entered in (fact.data.get("content") or {}).get("history", []):
            if entered["state"] == "TEARING_DOWN":
                entered["state"] = "TRAINING"


def _too_long(story: Story) -> None:
    _alter(story, "dropped", 0, spec={**SPEC, "limits": {"max_duration": "1m", "max_attempts": 3}})
    _delay(story, _index(story, "ended", 1), 1200)


def _loop(story: Story) -> None:
    _end_otherwise(story)


def _too_many(story: Story) -> None:
    _alter(story, "dropped", 0, spec={**SPEC, "limits": {"max_duration": "10m", "max_attempts": 1}})


def _untold(story: Story) -> None:
    story.facts = [f for f in story.facts if not (f.kind == "published" and f.data["id"].endswith("succeeded"))]


def _silent(story: Story) -> None:
    story.facts = [f for f in story.facts if not (f.kind == "slack" and f.data["event"].endswith("succeeded"))]


def _untold_on_the_way(story: Story) -> None:
    story.facts = [f for f in story.facts if not (f.kind == "published" and f.data["id"].endswith("deploying"))]


def _told_too_early(story: Story) -> None:
    id_ = f"{RUN}/2/cancelled"
    story.tell("published", topic="run-events", id=id_, event={"id": id_, "run": RUN, "time": _iso(story.now)})


def _told_otherwise(story: Story) -> None:
    found = story.facts[_index(story, "published", 3)]
    event = found.data["event"] | {"time": _iso(found.time + 100)}
    story.tell("published", topic="run-events", id=event["id"], event=event)


def _told_wrongly_in_slack(story: Story) -> None:
    story.tell("slack", event=f"{RUN}/0/rejected", text="", status=200)


def _defect(story: Story) -> None:
    story.tell("answer", instance="inspect-7", status=500, body={"error": "KeyError: 'run'"})


def _refused(story: Story) -> None:
    story.tell("answer", instance="inspect-7", status=400, body={"error": "malformed"})


MUTATIONS: list[tuple[str, Callable[[], Story], Callable[[Story], None]]] = [
    ("one_run", served, _twice_created),
    ("one_run", served, _lost),
    ("one_run", served, _invented),
    ("one_run", served, _accepted_though_invalid),
    ("one_run", rejected, _refused_before_it_was_withdrawn),
    ("ends", served, _without_end),
    ("ends", served, _endless_execution),
    ("terminal_once", served, _second_end),
    ("terminal_once", served, _rewritten),
    ("attempts_are_closed", served, _open_attempt),
    ("one_owner", served, _stolen),
    ("one_owner", served, _busy_stranger),
    ("rejected_does_nothing", rejected, _executed),
    ("intent_first", served, _unannounced),
    ("intent_first", served, _again_after_teardown),
    ("one_at_a_time", served, _two_at_once),
    ("one_at_a_time", served, _serves_too_early),
    ("nothing_left", served, _left_over),
    ("nothing_left", served, _there_at_the_end),
    ("nothing_left", served, _late_and_long),
    ("nothing_left", served, _stray_survives_a_sweep),
    ("endpoint_ends", served, _endpoint_for_ever),
    ("endpoint_ends", served, _swept_in_vain),
    ("cancel_wins", cancelled, _cancel_lost),
    ("cancel_wins", cancelled, _cancel_ignored),
    ("cancel_wins", cancelled, _cancel_unanswered),
    ("cancel_wins", served, _cancel_from_nowhere),
    ("cancel_wins", cancelled, _cancel_that_nobody_asked),
    ("forged_does_nothing", served, _forged_and_unanswered),
    ("forged_does_nothing", served, _forged_and_obeyed),
    ("within_budget", served, _expensive),
    ("within_budget", served, _expensive_endpoint),
    ("within_budget", stopped, _expensive_machine),
    ("within_duration", served, _too_long),
    ("people_are_warned", stopped, _unwarned_of_money),
    ("people_are_warned", stopped, _unwarned_in_slack),
    ("people_are_warned", warned, _unwarned_of_money),
    ("people_are_warned", warned, _unwarned_in_slack),
    ("people_are_warned", stopped, _unwarned_of_time),
    ("people_are_warned", stopped, _warned_too_early),
    ("people_are_warned", stopped, _warned_by_another_id),
    ("limits_end_in_order", stopped, _ended_without_a_word),
    ("limits_end_in_order", stopped, _ended_without_teardown),
    ("stuck_is_told", stuck, _stuck_and_untold),
    ("stuck_is_told", stuck, _stuck_and_left_alone),
    ("stuck_is_told", stuck, _stuck_though_it_goes_on),
    ("stuck_is_told", stuck, _stuck_and_ended_unasked),
    ("endpoint_lives", served, _endpoint_too_early),
    ("endpoint_lives", served, _endless_ttl),
    ("endpoint_end_is_told", served, _ended_silently),
    ("endpoint_end_is_told", served, _ended_too_early),
    ("attempts_end", served, _loop),
    ("attempts_end", served, _too_many),
    ("everybody_is_told", served, _untold),
    ("everybody_is_told", served, _silent),
    ("everybody_is_told", served, _untold_on_the_way),
    ("everybody_is_told", served, _told_too_early),
    ("everybody_is_told", served, _told_otherwise),
    ("everybody_is_told", served, _told_wrongly_in_slack),
    ("no_defects", served, _defect),
    ("no_defects", served, _refused),
]


@pytest.mark.parametrize(("rule", "story", "mutate"), MUTATIONS, ids=[m[2].__name__.strip("_") for m in MUTATIONS])
def test_a_broken_promise_is_found(rule: str, story: Callable[[], Story], mutate: Callable[[Story], None]) -> None:
    told = story()
    mutate(told)
    assert rule in {problem.rule for problem in check(told.history())}


def test_every_rule_has_a_mutation() -> None:
    assert {rule.__name__ for rule in RULES} <= {rule for rule, _, _ in MUTATIONS}


@pytest.mark.parametrize("module", [checker, limits, lives, progress], ids=lambda module: module.__name__)
def test_the_checker_reads_nothing_but_the_history(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    siblings = {
        node.module or node.names[0].name for node in imported if isinstance(node, ast.ImportFrom) and node.level
    }
    others = {node.module for node in imported if isinstance(node, ast.ImportFrom) and not node.level}
    others |= {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    assert siblings <= {"history", "limits", "lives", "progress"}
    assert {str(name).split(".")[0] for name in others} <= set(sys.stdlib_module_names)


def _index(story: Story, kind: str, which: int = 0) -> int:
    return [index for index, fact in enumerate(story.facts) if fact.kind == kind][which]


def _alter(story: Story, kind: str, which: int, **changes: Any) -> None:
    story.facts[_index(story, kind, which)].data.update(changes)


def _delay(story: Story, index: int, seconds: float) -> None:
    """Let more time pass before a fact, and after it everything as before."""
    story.facts[index:] = [fact._replace(time=fact.time + seconds) for fact in story.facts[index:]]
    story.now += seconds


def _rename(story: Story, old: str, new: str) -> None:
    """The same resource by another name."""
    for fact in story.facts:
        for data in (fact.data, *(fact.data.get("content") or {}).get("entries", [])):
            if data.get("name") == old:
                data["name"] = new


def _end_otherwise(story: Story) -> None:
    """The attempt ended as code that fails."""
    for fact in story.facts:
        for attempt in (fact.data.get("content") or {}).get("attempts", []):
            if attempt["error"]:
                attempt["error"]["error_class"] = "code"


def _forget_notice(story: Story, *keys: str) -> None:
    ids = [f"{RUN}/notice/{key}" for key in keys]
    story.facts = [fact for fact in story.facts if fact.data.get("id", fact.data.get("event")) not in ids]


def _end_as(story: Story, state: str) -> None:
    """The same life with another end."""
    was = story.record["state"]
    for fact in story.facts:
        if fact.kind == "write" and fact.data["content"].get("state") == was:
            fact.data["content"]["state"] = state
            fact.data["content"]["history"][-1]["state"] = state


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
