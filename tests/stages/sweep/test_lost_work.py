"""How the sweep handles lost work: which work is lost, who continues it, which end is announced, when a run closes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import NotFound as Missing

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, RetryLater
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.run.record import END_TOLD, Attempt, Endpoint, Record, RunState, Source, Transition
from dropforge.stages.sweep import lost_work
from dropforge.stages.sweep.lost_work import (
    LATE_FOR,
    LOST_AFTER,
    LOST_FOR,
    UNACCEPTED_FOR,
    accept,
    restart,
    settle,
    submit,
)

from ...deployments import SETTINGS, Memory, context_with, intend

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
RUN = "job-0123456789ab"
JOB, SERVICE = f"projects/p/locations/r/jobs/df-{RUN}-a1", f"projects/p/locations/r/services/df-{RUN}-serve"
KINDS = {JOB: "run.googleapis.com/Job", SERVICE: "run.googleapis.com/Service"}


class World:
    """The deployment's bucket, its executions by state, the resources in the cloud, and the actions in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.executions: dict[str, str] = {}
        self.cloud: set[str] = set()
        self.done: list[str] = []
        self.notices: list[str] = []
        self.is_delivered = True  # whether published events arrive
        self.concurrent_action: Any = lambda: None  # another caller's action while the sweep queries the cloud
        self.delete: Callable[[str], bool] = self.delete_resource
        platform: Any = SimpleNamespace(
            exists=lambda cloud, deployment: self.exists(), teardown=lambda cloud, kind, name: self.delete(name)
        )
        self.context = context_with(
            now=NOW,
            platforms=Platforms(server=lambda _: platform, owner=lambda _: platform),
            storage=Memory(),
            publisher=SimpleNamespace(publish=self.publish),
            workflow_executions=SimpleNamespace(
                create_execution=self.start, get_execution=self.get, list_executions=self.list
            ),
        )
        self.store = self.context.store
        patch.setattr(lost_work, "submit_object", self.submit_object)
        patch.setattr(lost_work, "accept_again", lambda _, run: self.done.append(f"accept {run}"))
        patch.setattr(lost_work, "resume", self.resume)

    @property
    def is_open(self) -> bool:
        return bool(self.store.bucket.blob(names.open_object(RUN)).exists())

    @property
    def live(self) -> frozenset[str]:
        return frozenset(id_ for id_, state in self.executions.items() if state == "ACTIVE")

    def start(self, **_: Any) -> Any:
        self.executions["new"] = "ACTIVE"
        self.done.append("start")
        return self.execution("new")

    def get(self, name: str, **_: Any) -> Any:
        if not self.executions.get(name.rsplit("/", 1)[1]):
            raise Missing(name)
        return self.execution(name.rsplit("/", 1)[1])

    def list(self, request: Any, **_: Any) -> Any:
        return [self.execution(id_) for id_ in self.live]

    def execution(self, id_: str) -> Any:
        state = SimpleNamespace(name=self.executions[id_])
        return SimpleNamespace(name=f"executions/{id_}", state=state, labels={names.RUN_LABEL: RUN}, start_time=None)

    def publish(self, topic: str, data: bytes, **attributes: Any) -> Any:
        """Note a run event as an action: "announce FAILED" for a state, "warn KEY" for a notice."""
        event = json.loads(data)
        self.done.append(f"warn {event['notice']}" if event["notice"] else f"announce {event['state']}")
        self.notices.append(event["details"].get("text", ""))
        return SimpleNamespace(result=self.arrive)

    def arrive(self, timeout: float) -> None:
        if not self.is_delivered:
            raise TimeoutError

    def submit_object(self, context: Context, bucket: str, name: str, generation: str, size: int, again: str) -> Record:
        self.done.append(f"submit {bucket}/{name}#{generation} of {size}")
        state = RunState.REJECTED if "bad" in name else RunState.ACCEPTED
        return self.put(record(state, run=names.run_id_of_object(bucket, name, generation)))

    def resume(self, context: Context, record: Record) -> Record:
        if self.live:
            raise RetryLater("another delivery handles this run")
        self.start()
        return self.store.update(record.run, lambda old: old.claimed("new"))

    def exists(self) -> bool:
        self.done.append("exists")
        self.concurrent_action()
        return SERVICE in self.cloud

    def delete_resource(self, name: str) -> bool:
        self.done.append(f"delete {name.rsplit('-', 1)[1]}")
        if name in self.cloud and "stuck" in self.cloud:
            return False
        self.cloud.discard(name)
        return True

    def put(self, record: Record) -> Record:
        self.store.create(record)
        return record

    def add_finished(self, state: RunState = RunState.FAILED, ended: timedelta = HOUR, **fields: Any) -> Record:
        """Store a run that ended `ended` ago and is still marked as open."""
        stored = record(state, ended, **{"execution": "old", **fields})
        self.executions["old"] = "SUCCEEDED"
        self.store.mark_open(stored)
        self.store.put_new(names.spec_object(RUN), json.dumps(SPEC).encode())  # unless the test has stored a spec
        return self.put(stored)

    def add_served(self, **fields: Any) -> Record:
        """Store a run that has succeeded and whose endpoint, by default, expires in an hour."""
        trained = Attempt(number=1, placement=0, region="r", started=NOW, deadline=NOW)
        self.add_finished(RunState.SUCCEEDED, endpoint=endpoint(**fields), attempts=[trained])
        intend(self.store, RUN, KINDS[SERVICE], SERVICE, 1)
        self.cloud.add(SERVICE)
        return self.store.record(RUN)

    def settle(self, live: frozenset[str] | None = frozenset(), now: datetime = NOW) -> None:
        settle(self.context, self.store.record(RUN), frozenset(self.cloud), live, now)


SPEC = {
    "api_version": "dropforge/v1",
    "name": "n",
    "model": {"source": "a/b"},
    "dataset": {"source": "a/b"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
    "serve": {"type": "cloud_run"},
}


def record(state: RunState, ended: timedelta = HOUR, run: str = RUN, **fields: Any) -> Record:
    history = [Transition(state=RunState.ACCEPTED, time=NOW - 2 * HOUR)]
    if state is not RunState.ACCEPTED:
        history.append(Transition(state=state, time=NOW - ended))
    return Record(run=run, name="n", source="s", state=state, created=NOW - 2 * HOUR, history=history, **fields)


def endpoint(expires: timedelta = HOUR, **fields: Any) -> Endpoint:
    return Endpoint(url="u", model="m", service=SERVICE, region="r", ready=NOW, expires=NOW + expires, **fields)


def blob(name: str = "specs/a.json", age: timedelta = HOUR, size: int | None = 7) -> Any:
    return SimpleNamespace(name=name, generation=5, size=size, time_created=NOW - age, again="")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize(
    ("age", "lost"),
    [
        (LOST_AFTER, False),  # its event may still arrive
        (LOST_AFTER + SECOND, True),
        (LOST_FOR - SECOND, True),
        (LOST_FOR, False),  # the spec may be older than the deployment: hundreds of old specs must not start
        (-SECOND, False),  # Cloud Storage's clock is ahead
    ],
)
def test_a_spec_without_a_run_is_lost_after_a_while_and_for_a_week(world: World, age: timedelta, lost: bool) -> None:
    run = names.run_id_of_object(SETTINGS.specs_bucket, "specs/a.json", "5")
    assert submit(world.context, blob(age=age), NOW) == (run if lost else "")
    assert world.done == (["submit x/specs/a.json#5 of 7"] if lost else [])
    if lost:
        # A submission that crashes leaves the open mark, so the sweep reads the run again without the object's event.
        mark = Source.model_validate_json(world.store.read(names.open_object(run)).data)
        assert mark == Source(text="gs://x/specs/a.json#5")
        assert submit(world.context, blob(age=age), NOW) == ""  # the spec has a run now


def test_the_submission_of_a_lost_spec_announces_its_refusal(world: World) -> None:
    run = submit(world.context, blob("specs/bad.json", size=0), NOW)
    assert world.done == ["submit x/specs/bad.json#5 of 0"]
    assert END_TOLD in world.store.record(run).notices  # so the sweep does not announce the end again


def test_a_missing_record_is_written_after_a_while(world: World) -> None:
    world.store.put_new(names.spec_object(RUN), b"{}")
    assert accept(world.context, RUN, NOW - LOST_AFTER + SECOND, NOW) == ""
    assert world.done == []
    assert accept(world.context, RUN, NOW - LOST_AFTER, NOW) == RUN
    assert world.done == [f"accept {RUN}"]


def test_the_open_mark_of_a_run_that_was_never_accepted_is_removed(world: World) -> None:
    """No delivery writes the record so late: a delivery that finds the mark writes no other mark."""
    world.store.put_new(names.open_object(RUN), b"gs://x/specs/a.json#5")
    for age, is_open in ((LOST_FOR, True), (UNACCEPTED_FOR, True), (UNACCEPTED_FOR + SECOND, False)):
        assert accept(world.context, RUN, NOW - age, NOW) == ""
        assert world.is_open is is_open
    assert world.done == []


@pytest.mark.parametrize(
    ("old", "now", "is_live"),
    [
        ("ACTIVE", "ACTIVE", True),
        ("QUEUED", "QUEUED", True),  # in the backlog
        ("", "ACTIVE", True),  # it started after the sweep listed the live executions
        ("", "UNAVAILABLE", True),  # the state is unknown: two executions would be worse than a wait
        ("", "SUCCEEDED", False),
        ("", "FAILED", False),
        ("", "CANCELLED", False),
        ("", "", False),  # Google deletes old executions
    ],
)
def test_a_run_is_restarted_only_when_its_execution_has_ended(world: World, old: str, now: str, is_live: bool) -> None:
    """`old` is the state when the live executions were listed, `now` the state when the sweep reads the execution."""
    stored = world.put(record(RunState.TRAINING, execution="first"))
    world.executions["first"] = now
    live = frozenset({"first"} if old else ())
    assert restart(world.context, stored, live) is not is_live
    after = world.store.record(RUN)
    if is_live:
        assert (after.execution, after.superseded, world.done) == ("first", [], [])
    else:
        assert (after.execution, after.superseded, world.done) == ("new", ["first"], ["start"])


def test_two_sweeps_at_once_restart_a_run_once(world: World) -> None:
    """Both sweeps have read the record before either sweep released the run."""
    stored = world.put(record(RunState.TRAINING, execution="first"))
    assert [restart(world.context, stored, frozenset()) for _ in range(2)] == [True, False]
    assert world.done == ["start"]
    assert world.store.record(RUN).execution == "new"


def test_an_execution_that_a_sweep_started_but_did_not_store_takes_over(world: World) -> None:
    """The sweep crashed after it released the run and before it stored the new execution in the record."""
    stored = world.put(record(RunState.TRAINING, superseded=["first"]))
    world.executions["unstored"] = "ACTIVE"
    assert restart(world.context, stored, world.live)
    assert world.done == []
    assert world.store.record(RUN).execution == "unstored"


def test_a_run_that_ended_meanwhile_is_not_restarted(world: World) -> None:
    stored = record(RunState.TEARING_DOWN, execution="first")
    world.put(record(RunState.FAILED, execution="first"))
    assert not restart(world.context, stored, frozenset())
    assert world.done == []
    assert world.store.record(RUN).execution == "first"


def test_the_submission_of_an_accepted_run_is_continued(world: World) -> None:
    """The sweep uses the rules of the submission, which detect a concurrent delivery of the same spec."""
    stored = world.put(record(RunState.ACCEPTED))
    world.executions["of-another-delivery"] = "ACTIVE"
    assert not restart(world.context, stored, world.live)
    world.executions.clear()
    assert restart(world.context, stored, frozenset())
    assert world.store.record(RUN).execution == "new"


def test_the_leftovers_of_a_finished_run_are_deleted_before_it_is_closed(world: World) -> None:
    world.add_finished()
    intend(world.store, RUN, KINDS[JOB], JOB, 1)
    world.cloud |= {JOB, "stuck"}
    world.settle()
    assert world.is_open
    world.cloud.discard("stuck")
    world.settle()
    assert world.cloud == set()
    assert world.store.ledger(RUN).remaining() == []
    assert not world.is_open


def test_a_run_stays_open_while_a_late_call_may_write_to_its_ledger(world: World) -> None:
    """A late call has read the run as open and leaves an unneeded entry."""
    world.add_finished(ended=LATE_FOR)
    world.settle()
    assert world.is_open
    intend(world.store, RUN, KINDS[JOB], JOB, 1)
    world.settle(now=NOW + SECOND)
    assert world.store.ledger(RUN).remaining() == []
    assert not world.is_open


@pytest.mark.parametrize(
    ("live", "state", "is_delivered", "done", "closed"),
    [
        (frozenset({"old"}), "ACTIVE", True, [], False),  # the execution will announce the end
        (frozenset(), "ACTIVE", True, [], False),  # the execution started after the listing
        (None, "FAILED", True, [], False),  # the live executions are unknown
        (frozenset(), "SUCCEEDED", True, [], True),  # the execution has announced the end
        (frozenset(), "FAILED", True, ["announce FAILED"], True),
        (frozenset(), "CANCELLED", True, ["announce FAILED"], True),
        (frozenset(), "", True, ["announce FAILED"], True),
        (frozenset(), "FAILED", False, ["announce FAILED"], False),  # the next sweep announces the end again
    ],
)
def test_an_end_is_announced_if_the_execution_may_have_ended_before_it_announced(
    world: World, live: frozenset[str] | None, state: str, is_delivered: bool, done: list[str], closed: bool
) -> None:
    world.add_finished()
    world.executions["old"], world.is_delivered = state, is_delivered
    world.settle(live)
    assert world.done == done
    assert world.is_open is not closed
    world.settle(live)
    assert len(world.done) == len(done) * (1 if is_delivered else 2), (
        "the end is announced again only if the event did not arrive"
    )


def test_a_refusal_is_announced_once(world: World) -> None:
    world.add_finished(RunState.REJECTED, execution=None)
    world.store.mark_open(record(RunState.REJECTED))
    world.settle()
    world.settle()
    assert world.done == ["announce REJECTED"]
    assert not world.is_open


def test_an_end_is_announced_even_if_a_deletion_is_refused(world: World) -> None:
    world.add_finished()
    world.executions["old"] = "FAILED"
    intend(world.store, RUN, KINDS[JOB], JOB, 1)

    def refuse(name: str) -> bool:
        raise CloudError(ErrorClass.PERMISSION, "no")

    world.delete = refuse
    with pytest.raises(CloudError):
        world.settle()
    assert world.done == ["announce FAILED"]
    assert world.is_open


def test_a_live_endpoint_is_kept_without_a_further_request(world: World) -> None:
    world.add_served()
    intend(world.store, RUN, KINDS[JOB], JOB, 1)
    world.settle()
    assert world.done == ["delete a1"]
    assert world.cloud == {SERVICE}
    assert world.is_open


def test_the_sweep_sends_each_warning_about_an_endpoints_cost_once(world: World) -> None:
    world.store.put_new(names.spec_object(RUN), json.dumps({**SPEC, "limits": {"max_cost_usd": 4}}).encode())
    deploying = Transition(state=RunState.DEPLOYING, time=NOW - HOUR)
    stored = world.add_finished(RunState.SUCCEEDED, endpoint=endpoint(8 * HOUR), serving_usd_per_hour=1.0)
    world.store.update(
        RUN, lambda old: old.model_copy(update={"history": [old.history[0], deploying, stored.history[1]]})
    )
    intend(world.store, RUN, KINDS[SERVICE], SERVICE, 1)
    world.cloud.add(SERVICE)
    for hours, warnings in ((0, []), (1, ["warn budget-50"]), (1.5, []), (3, ["warn budget-80"]), (3.5, [])):
        world.done.clear()
        world.settle(now=NOW + hours * HOUR)
        assert (hours, world.done) == (hours, warnings)


def test_an_expired_endpoint_is_ended_and_the_run_closed(world: World) -> None:
    world.add_served(expires=-SECOND)
    world.settle()
    ended = world.store.record(RUN).endpoint
    assert ended
    assert ended.ended
    assert world.done == ["delete serve", "warn endpoint-ended"]
    assert not world.is_open


@pytest.mark.parametrize(
    ("changes", "limit", "why"),
    [
        ({}, "ttl", "its ttl of 24h is over"),
        ({}, "max_cost_usd", "the budget is spent"),
        ({"cancel_requested": NOW, "cancel_cause": "topic t message 1"}, "ttl", "requested by topic t message 1"),
    ],
)
def test_the_reason_for_the_end_of_an_endpoint_is_announced(
    world: World, changes: dict[str, Any], limit: str, why: str
) -> None:
    ended = endpoint(-SECOND).model_copy(update={"ended": NOW, "limit": limit})
    world.add_finished(RunState.SUCCEEDED, endpoint=ended, **changes)
    world.is_delivered = False
    world.settle()
    assert world.is_open, "the next sweep announces the end"
    world.is_delivered = True
    world.settle()
    assert world.done == ["warn endpoint-ended"] * 2
    assert why in world.notices[-1]
    assert not world.is_open


def test_the_end_of_an_endpoint_that_never_served_is_not_announced(world: World) -> None:
    world.add_finished(RunState.FAILED, endpoint=endpoint(HOUR).model_copy(update={"ended": NOW}))
    world.settle()
    assert world.done == []
    assert not world.is_open


def test_an_endpoint_that_a_user_deleted_is_announced_once_and_ended(world: World) -> None:
    world.add_served()
    world.cloud.clear()
    world.settle()
    ended = world.store.record(RUN).endpoint
    assert ended
    assert ended.ended
    assert world.done == ["exists", "warn endpoint-lost", "delete serve"]
    assert not world.is_open
    world.settle()
    assert len(world.done) == 3


def test_a_list_that_lacks_an_endpoint_proves_nothing(world: World) -> None:
    stored = world.add_served()
    settle(world.context, stored, frozenset(), frozenset(), NOW)
    assert world.done == ["exists"]
    assert world.store.record(RUN) == stored
    assert world.is_open


def test_an_endpoint_is_not_ended_before_its_loss_is_announced(world: World) -> None:
    """Otherwise the loss would never be announced, because the sweep does not inspect an ended endpoint again."""
    world.add_served()
    world.cloud.clear()
    world.is_delivered = False
    for _ in range(2):
        world.settle()
    assert world.done == ["exists", "warn endpoint-lost"] * 2
    stored = world.store.record(RUN).endpoint
    assert stored
    assert stored.ended is None


@pytest.mark.parametrize("change", [{"expires": NOW - SECOND}, {"ended": NOW}], ids=lambda change: next(iter(change)))
def test_an_endpoint_that_dropforge_ended_meanwhile_is_not_reported_as_lost(
    world: World, change: dict[str, Any]
) -> None:
    """A cancel sets the expiry to now before it deletes the resource."""
    world.add_served()
    world.cloud.clear()

    def cancel() -> None:
        ended_endpoint = endpoint().model_copy(update=change)
        world.store.update(RUN, lambda record: record.model_copy(update={"endpoint": ended_endpoint}))

    world.concurrent_action = cancel
    world.settle()
    assert world.done == ["exists"]
