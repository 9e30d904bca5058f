"""The sweep among forged and broken objects of the runs bucket: each is a finding, and harms nothing beside it.

The objects are those with which a training container once had the sweep delete other runs' resources. Today IAM keeps
containers out of these names (tests/contract/test_terraform_apply.py); these tests show that the readers do not rely on
that.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.cloud.listing import Listed
from dropforge.platforms.lookup import Platforms
from dropforge.run.record import Endpoint, LedgerEntry, Record, ResourceState, RunState, Transition
from dropforge.stages.answers import Swept
from dropforge.stages.sweep.sweep import sweep

from ...deployments import Memory, context_with, intend, settings_with

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)  # long after the objects in memory were written
HOUR = timedelta(hours=1)
SETTINGS = settings_with(project="p")
VICTIM, FORGER, EXPIRED = "victim-0123456789ab", "forger-0123456789ab", "expired-0123456789ab"
JOB = "run.googleapis.com/Job"


def job(run: str) -> str:
    return f"projects/p/locations/r/jobs/df-{run}-a1"


def service(run: str) -> str:
    return f"projects/p/locations/r/services/df-{run}-serve"


def record(run: str, state: RunState, **fields: Any) -> Record:
    history = [Transition(state=state, time=NOW - HOUR)]
    return Record(run=run, name="n", source="s", state=state, created=NOW - HOUR, history=history, **fields)


def failed(run: str, *entries: tuple[str, str]) -> bytes:
    """The record of a failed run whose ledger has these resources, by kind and name."""
    ledger = [
        LedgerEntry(kind=kind, name=name, attempt=1, state=ResourceState.CREATED, intended=NOW)
        for kind, name in entries
    ]
    return record(run, RunState.FAILED, resources=ledger).model_dump_json().encode()


class World:
    """A deployment with a live run, an endpoint past its ttl, and whatever a test forges beside them."""

    def __init__(self) -> None:
        self.storage = Memory()
        self.deleted: list[str] = []
        self.listed = [self.resource(EXPIRED, service(EXPIRED)), self.resource(VICTIM, job(VICTIM))]
        platform: Any = SimpleNamespace(listed=lambda _: self.listed, teardown=self.teardown)
        self.context = context_with(
            SETTINGS,
            now=NOW,
            platforms=Platforms(owner=self.owner, all=lambda: [platform], server=lambda _: platform),
            storage=self.storage,
            workflow_executions=SimpleNamespace(list_executions=self.executions, get_execution=self.execution),
            publisher=SimpleNamespace(publish=lambda *_, **__: SimpleNamespace(result=lambda timeout: None)),
        )
        self.platform = platform
        store = self.context.store
        store.create(record(VICTIM, RunState.TRAINING, execution="live"))
        intend(store, VICTIM, JOB, job(VICTIM), 1)
        times = {"ready": NOW - HOUR, "expires": NOW - timedelta(minutes=1)}
        endpoint = Endpoint(url="u", model="m", service=service(EXPIRED), region="r", **times)
        store.create(record(EXPIRED, RunState.SUCCEEDED, endpoint=endpoint))

    @staticmethod
    def resource(run: str, name: str) -> Listed:
        return Listed(JOB, name, names.labels(run, {}, **{names.DEPLOYMENT_LABEL: SETTINGS.deployment}), NOW - HOUR)

    def owner(self, kind: str) -> Any:
        if kind != JOB:
            raise KeyError(f"no platform declares resources of kind {kind!r}")
        return self.platform

    def teardown(self, cloud: Any, kind: str, name: str) -> bool:
        self.deleted.append(name)
        return True

    def execution(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(name="executions/live", state=SimpleNamespace(name="ACTIVE"))

    def executions(self, request: Any, **_: Any) -> Any:
        return [self.execution("live")]

    def forge(self, name: str, content: bytes) -> None:
        self.storage.objects[name] = (content, 1)

    def sweep(self) -> Swept:
        return sweep(self.context)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        (  # the review's first attack: a machine file that was a mark, whose name was a run
            {
                "runs/open/machine/machine/y": b"",
                "runs/machine/machine/y/record.json": failed("machine/machine/y", (JOB, job(VICTIM))),
            },
            "are not marks of runs",
        ),
        (  # the second: a record that names another run
            {names.open_object(FORGER): b"", names.record_object(FORGER): failed(VICTIM, (JOB, job(VICTIM)))},
            "expected the run in its name",
        ),
        (  # a ledger that names another run's resource
            {names.open_object(FORGER): b"", names.record_object(FORGER): failed(FORGER, (JOB, job(VICTIM)))},
            "is not deleted",
        ),
        (
            {names.open_object(FORGER): b"", names.record_object(FORGER): failed(FORGER, ("other/Kind", job(FORGER)))},
            "no platform declares",
        ),
        ({names.open_object(FORGER): b"", names.record_object(FORGER): b'{"run": 1}'}, "not a record"),
        ({names.open_object(FORGER): b"", names.record_object(FORGER): b"\xff\x00" * 99}, "not a record"),
        (
            {names.open_object(FORGER): b"\xff", names.spec_object(FORGER): b"{}"},
            "does not say where",
        ),
    ],
)
def test_a_forged_object_is_a_finding_and_stops_nothing(world: World, objects: dict[str, bytes], problem: str) -> None:
    for name, content in objects.items():
        world.forge(name, content)
    before = dict(world.storage.objects)

    swept = world.sweep()

    assert world.deleted == [service(EXPIRED)], "only the endpoint past its ttl is deleted"
    assert any(problem in found for found in swept.problems), swept.problems
    for name in (names.record_object(VICTIM), names.open_object(VICTIM)):
        assert world.storage.objects[name] == before[name]


def test_a_resource_with_the_labels_of_another_run_is_reported_and_stays(world: World) -> None:
    """Anybody who may label a resource of the project could otherwise have the sweep delete it."""
    other = "projects/p/locations/r/services/payroll"
    world.listed.append(world.resource(FORGER, other))
    swept = world.sweep()
    assert world.deleted == [service(EXPIRED)]
    assert any(other in problem and "is not deleted" in problem for problem in swept.problems)


def test_a_problem_never_repeats_the_text_of_an_object(world: World) -> None:
    text = json.dumps({"run": FORGER, "name": "secret-row-of-a-data-set"}).encode()
    world.forge(names.open_object(FORGER), b"")
    world.forge(names.record_object(FORGER), text)
    assert "secret-row" not in str(world.sweep().problems)
