"""The sweep's decision about a resource and its run's record: every case that decides about a deletion."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, Unlisted, is_named_endpoint, is_of_deployment, list_places
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.named import owner_labels
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
    """Return a listed training job of attempt 1, or an endpoint's resource if an expiry is given."""
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
    ("resource", "owner", "why"),
    [
        (listed(), record(RunState.TRAINING), ""),
        (listed(), record(RunState.TEARING_DOWN), ""),
        (listed(), record(RunState.TRAINING, attempts=2), "left by an attempt that is over"),
        (listed(attempt="3"), record(RunState.TRAINING, attempts=2), ""),  # the record was read before attempt 3
        (listed(), record(RunState.SUCCEEDED), "left by a run that is over"),
        (listed(), record(RunState.CANCELLED), "left by a run that is over"),
        (listed(), None, "of a run that does not exist"),
        (listed(age=timedelta(seconds=30)), None, ""),
        (listed()._replace(created=None), None, ""),
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
        # A training machine that serves now: the endpoint's service has its name.
        (listed(**expiry(HOUR), attempt="1"), record(RunState.SUCCEEDED, endpoint=endpoint(service=JOB)), ""),
        (listed(), record(RunState.SUCCEEDED, endpoint=endpoint()), "left by a run that is over"),
    ],
)  # fmt: skip
def test_the_reason_for_a_deletion(resource: Listed, owner: Record | None, why: str) -> None:
    assert judge(resource, owner, SETTINGS, NOW) == why


def look_and_deleted(monkeypatch: pytest.MonkeyPatch, entries: list[LedgerEntry]) -> tuple[Look, list[Orphan]]:
    """A look of the sweep at a run with this ledger, and the list of what it deletes."""
    deleted: list[Orphan] = []

    def delete(_: Any, judged: list[Orphan]) -> Deletions:
        deleted.extend(judged)
        return Deletions([], [], [])

    monkeypatch.setattr(orphans, "delete_orphans", delete)
    look = object.__new__(Look)
    look.context, look.now, look.problems = context_with(SETTINGS), NOW, []
    vars(look.context)["store"] = Mock(RunStore, ledger=lambda _: Ledger(run=RUN, entries=entries))
    return look, deleted


@pytest.mark.parametrize(
    ("gone", "is_orphan"),
    [
        (None, True),
        (NOW - SECOND, True),  # a stalled call created the resource again later
        # The list is older than the deletion, and the run ended before the sweep read its record.
        (NOW + SECOND, False),
    ],
)
def test_a_resource_that_its_run_deleted_after_the_listing_is_no_orphan(
    gone: datetime | None, is_orphan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ResourceState.GONE if gone else ResourceState.CREATED
    entry = LedgerEntry(kind="kind", name=JOB, attempt=1, state=state, intended=NOW - HOUR, gone=gone)
    look, deleted = look_and_deleted(monkeypatch, [entry])
    look.resources, look.records = [listed()], {RUN: record(RunState.FAILED)}
    look.delete()
    assert [orphan.resource.name for orphan in deleted] == [JOB] * is_orphan
    assert look.problems == []


def test_a_resource_whose_record_cannot_be_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    look, deleted = look_and_deleted(monkeypatch, [])
    for records, count in (({}, 0), ({RUN: None}, 1)):
        look.resources, look.records = [listed()], records  # type: ignore[assignment]
        look.delete()
        assert len(deleted) == count


def test_only_resources_of_this_deployments_runs_and_endpoints_are_inspected() -> None:
    labels = {names.MANAGED_BY: "dropforge", names.RUN_LABEL: RUN, names.DEPLOYMENT_LABEL: SETTINGS.deployment}
    assert is_of_deployment(labels, SETTINGS)
    for key, value in ((names.MANAGED_BY, "another-tool"), (names.RUN_LABEL, "any"), (names.DEPLOYMENT_LABEL, "other")):
        assert not is_of_deployment({**labels, key: value}, SETTINGS)
    endpoint = owner_labels(SETTINGS, "e")
    assert is_named_endpoint(endpoint, SETTINGS)
    for key, value in ((names.MANAGED_BY, "any"), (names.ENDPOINT_LABEL, "No!"), (names.DEPLOYMENT_LABEL, "other")):
        assert not is_named_endpoint({**endpoint, key: value}, SETTINGS)


def test_a_place_that_cannot_be_listed_is_reported_and_the_other_places_are_listed() -> None:
    def list_place(place: str) -> Any:
        yield listed(place)
        if place == "half":
            yield CloudError(ErrorClass.TRANSIENT, "half is incomplete")
        if place == "forbidden":
            raise CloudError(ErrorClass.PERMISSION, "forbidden is forbidden")

    resources: list[Listed] = []
    with pytest.raises(Unlisted, match="half is incomplete; forbidden is forbidden"):
        resources.extend(list_places(CLOUD, ["first", "half", "forbidden", "last"], list_place))
    assert [resource.name for resource in resources] == ["first", "half", "forbidden", "last"]
    with pytest.raises(Unlisted, match=r"^half is incomplete$"):  # the deployment does not use this kind
        list(list_places(CLOUD, ["half", "forbidden"], list_place, is_used=False))
    assert [resource.name for resource in list_places(CLOUD, ["forbidden"], list_place, is_used=False)] == ["forbidden"]


def test_an_unforeseen_error_of_a_platform_is_reported_and_the_other_platforms_are_swept() -> None:
    def list_unknown_format(_: Cloud) -> Any:
        yield listed()
        raise KeyError("createTime")

    def delete(cloud: Cloud, kind: str, name: str) -> bool:
        assert name == SERVICE, "a name in an unknown format"
        return True

    failing: Any = SimpleNamespace(listed=list_unknown_format, teardown=delete)
    working: Any = SimpleNamespace(listed=lambda _: [listed(SERVICE)])
    context = context_with(SETTINGS, platforms=Platforms(owner=lambda _: failing, all=lambda: [failing, working]))
    vars(context)["store"] = Mock(RunStore)
    resources, [problem] = list_all(context.cloud, context.platforms)
    assert [resource.name for resource in resources] == [JOB, SERVICE]
    assert "createTime" in problem

    deletions = orphans.delete_orphans(context, [Orphan(resource, "left") for resource in resources])
    assert [resource.name for resource in deletions.gone] == [SERVICE]
    assert "in an unknown format" in deletions.problems[0]


def test_an_execution_that_was_superseded_never_owns_the_run_again() -> None:
    run = record(RunState.TRAINING).claimed("first")
    assert run.claimed("second").execution == "first"
    released = run.released("first")
    assert released.claimed("first").execution is None
    assert released.claimed("second").execution == "second"
    assert run.released("second") is run
    finished = record(RunState.FAILED, execution="first")
    assert finished.released("first") is finished


def test_a_takeover_loses_no_request_to_cancel() -> None:
    asked: dict[str, Any] = {"cancel_requested": NOW, "cancelled_by": "ann@example.com", "cancel_cause": "the console"}
    released = record(RunState.TRAINING, execution="first", **asked).released("first")
    assert released.execution is None
    assert {name: getattr(released, name) for name in asked} == asked
