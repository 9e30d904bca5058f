"""What the sweep makes of one resource and one record: every case that decides whether something is deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, Unlisted, is_of_deployment, list_places
from dropforge.platforms.lookup import Platforms
from dropforge.run.record import Attempt, Endpoint, Ledger, LedgerEntry, Record, ResourceState, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.stages.sweep import orphans
from dropforge.stages.sweep.orphans import EXPIRED, SURVIVES, Deletions, Orphan, judge, list_all
from dropforge.stages.sweep.sweep import Look

from ...deployments import cloud_with, context_with, settings_with

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
RUN = "job-0123456789ab"
SETTINGS = settings_with(check_interval_seconds=60)
CLOUD = cloud_with(SETTINGS)
JOB, SERVICE = f"projects/p/locations/r/jobs/df-{RUN}-a1", f"projects/p/locations/r/services/df-{RUN}-serve"


def listed(name: str = JOB, age: timedelta = HOUR, **labels: str) -> Listed:
    """A training job of attempt 1, or, with an expiry, something that serves."""
    own = {names.DEPLOYMENT_LABEL: SETTINGS.deployment, **{f"dropforge-{key}": value for key, value in labels.items()}}
    if not labels:
        own[names.ATTEMPT_LABEL] = "1"
    return Listed("kind", name, names.labels(RUN, own), NOW - age)


def record(state: RunState, attempts: int = 1, **fields: Any) -> Record:
    opened = [Attempt(number=n + 1, placement=0, region="r", started=NOW, deadline=NOW) for n in range(attempts)]
    history = [Transition(state=RunState.ACCEPTED, time=NOW)]
    return Record(
        run=RUN, name="n", source="s", state=state, created=NOW, history=history, attempts=opened, **fields
    )  # fmt: skip


def endpoint(expires: timedelta = HOUR, service: str = SERVICE, **fields: Any) -> Endpoint:
    return Endpoint(url="u", model="m", service=service, region="r", ready=NOW, expires=NOW + expires, **fields)


def expiry(after: timedelta) -> dict[str, Any]:
    return {"expires": str(int((NOW + after).timestamp()))}


@pytest.mark.parametrize(
    ("found", "of", "why"),
    [
        (listed(), record(RunState.TRAINING), ""),
        (listed(), record(RunState.TEARING_DOWN), ""),
        (listed(), record(RunState.TRAINING, attempts=2), "left by an attempt that is over"),
        (listed(attempt="3"), record(RunState.TRAINING, attempts=2), ""),  # a record of a newer version of it
        (listed(), record(RunState.SUCCEEDED), "left by a run that is over"),
        (listed(), record(RunState.CANCELLED), "left by a run that is over"),
        (listed(), None, "of a run that does not exist"),
        (listed(age=timedelta(seconds=30)), None, ""),
        (listed()._replace(created=None), None, ""),
        (listed()._replace(labels=names.labels(RUN, {})), None, ""),  # of a version that named no deployment
        (listed()._replace(labels=names.labels(RUN, {})), record(RunState.FAILED), "left by a run that is over"),
        (listed(SERVICE, **expiry(HOUR)), record(RunState.DEPLOYING), ""),
        (listed(SERVICE, **expiry(-HOUR)), record(RunState.DEPLOYING), EXPIRED),
        (listed(SERVICE, **expiry(-HOUR)), None, EXPIRED),
        (listed(SERVICE, **expiry(-2 * HOUR)), record(RunState.SUCCEEDED), SURVIVES),
        (listed(SERVICE, **expiry(HOUR)), record(RunState.SUCCEEDED, endpoint=endpoint()), ""),
        (listed(SERVICE, expires="never"), record(RunState.SUCCEEDED, endpoint=endpoint()), ""),
        (listed(SERVICE, **expiry(HOUR)), record(RunState.SUCCEEDED, endpoint=endpoint(-HOUR)), EXPIRED),
        (listed(SERVICE, **expiry(HOUR)), record(RunState.SUCCEEDED, endpoint=endpoint(-2 * HOUR)), SURVIVES),
        (listed(SERVICE, **expiry(HOUR)), record(RunState.SUCCEEDED), "left by a run that is over"),
        (
            listed(SERVICE, **expiry(HOUR)),
            record(RunState.SUCCEEDED, endpoint=endpoint(ended=NOW)),
            "left by a run that is over",
        ),
        (
            listed(SERVICE, **expiry(HOUR)),
            record(RunState.FAILED, endpoint=endpoint()),
            "left by a run that is over",
        ),
        # A machine that has trained and serves: it is known by the name of the endpoint's service.
        (listed(**expiry(HOUR), attempt="1"), record(RunState.SUCCEEDED, endpoint=endpoint(service=JOB)), ""),
        (listed(), record(RunState.SUCCEEDED, endpoint=endpoint()), "left by a run that is over"),
    ],
)  # fmt: skip
def test_what_is_deleted_and_why(found: Listed, of: Record | None, why: str) -> None:
    assert judge(found, of, SETTINGS, NOW) == why


@pytest.mark.parametrize(
    ("gone", "doomed"),
    [
        (None, True),
        (NOW - SECOND, True),  # and made again since, by a call that had stalled
        (NOW + SECOND, False),  # listed before it was deleted; by the record read after that, its run is over
    ],
)
def test_what_its_run_has_deleted_since_it_was_listed_is_nobody_s_fault(
    gone: datetime | None, doomed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ResourceState.GONE if gone else ResourceState.CREATED
    entry = LedgerEntry(kind="kind", name=JOB, attempt=1, state=state, intended=NOW - HOUR, gone=gone)
    deleted: list[Orphan] = []

    def delete(_: Any, doomed: list[Orphan]) -> Deletions:
        deleted.extend(doomed)
        return Deletions([], [], [])

    monkeypatch.setattr(orphans, "delete_orphans", delete)
    look = object.__new__(Look)
    look.context, look.now, look.problems, look.marks, look.live = context_with(SETTINGS), NOW, [], {}, None
    look.resources, look.records = [listed()], {RUN: record(RunState.FAILED)}
    vars(look.context)["store"] = Mock(RunStore, ledger=lambda _: Ledger(run=RUN, entries=[entry]))
    look.delete()
    assert [orphan.resource.name for orphan in deleted] == [JOB] * doomed
    assert look.problems == []


def test_only_what_is_made_for_runs_of_this_deployment_is_looked_at() -> None:
    ours = {names.MANAGED_BY: "dropforge", names.RUN_LABEL: RUN, names.DEPLOYMENT_LABEL: SETTINGS.deployment}
    assert is_of_deployment(ours, SETTINGS)
    for key, value in ((names.MANAGED_BY, "somebody"), (names.RUN_LABEL, "any"), (names.DEPLOYMENT_LABEL, "other")):
        assert not is_of_deployment({**ours, key: value}, SETTINGS)


def test_a_place_that_cannot_be_listed_spares_the_others_and_is_told() -> None:
    def look(place: str) -> Any:
        yield listed(place)
        if place == "half":
            yield CloudError(ErrorClass.TRANSIENT, "half is incomplete")
        if place == "forbidden":
            raise CloudError(ErrorClass.PERMISSION, "forbidden is forbidden")

    found: list[Listed] = []
    with pytest.raises(Unlisted, match="half is incomplete; forbidden is forbidden"):
        found.extend(list_places(CLOUD, ["one", "half", "forbidden", "two"], look))
    assert [one.name for one in found] == ["one", "half", "forbidden", "two"]
    with pytest.raises(Unlisted, match=r"^half is incomplete$"):  # of a kind that the deployment does not use
        list(list_places(CLOUD, ["half", "forbidden"], look, is_used=False))
    assert [one.name for one in list_places(CLOUD, ["forbidden"], look, is_used=False)] == ["forbidden"]


def test_what_nobody_has_foreseen_of_one_spares_the_others_and_is_told() -> None:
    def of_a_new_shape(_: Cloud) -> Any:
        yield listed()
        raise KeyError("createTime")

    def delete(cloud: Cloud, kind: str, name: str) -> bool:
        assert name == SERVICE, "a name of another make"
        return True

    odd: Any = SimpleNamespace(listed=of_a_new_shape, teardown=delete)
    even: Any = SimpleNamespace(listed=lambda _: [listed(SERVICE)])
    context = context_with(SETTINGS, platforms=Platforms(owner=lambda _: odd, all=lambda: [odd, even]))
    vars(context)["store"] = Mock(RunStore)
    found, [problem] = list_all(context.cloud, context.platforms)
    assert [one.name for one in found] == [JOB, SERVICE]
    assert "createTime" in problem

    deletions = orphans.delete_orphans(context, [Orphan(one, "left") for one in found])
    assert [one.name for one in deletions.gone] == [SERVICE]
    assert "of another make" in deletions.problems[0]


def test_an_execution_that_was_superseded_never_owns_the_run_again() -> None:
    run = record(RunState.TRAINING).claimed("first")
    assert run.claimed("second").execution == "first"
    released = run.released("first")
    assert released.claimed("first").execution is None
    assert released.claimed("second").execution == "second"
    assert run.released("second") is run
    over = record(RunState.FAILED, execution="first")
    assert over.released("first") is over
