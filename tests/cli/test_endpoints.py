"""`dropforge endpoints` beside an emulated Cloud Monitoring: requests and latency, at every width."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from dropforge.base.clock import Clock, utc_now
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.endpoints.store import EndpointStore
from dropforge.run.record import RunState
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.emulators.cloudrun.counts import Answered, Counts
from dropforge_local.emulators.monitoring import MonitoringEmulator
from dropforge_local.emulators.pubsub import PubSubEmulator

from .conftest import CREATED, Deployed, write_toml

SERVICE = "projects/p/locations/us-central1/services/{}"
CANARY = {"seconds": 60, "max_error_rate": 0.01, "max_latency_ratio": 2}
URL = "https://an-endpoint-with-a-long-address-abcdefghij-uc.a.run.app"


@pytest.fixture
def monitoring(deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cloud Monitoring has counted 1,000 requests to the first revision of `sql`, and 5 to its canary."""
    counts, now = Counts(), time.time()
    for revision, number, status in (("sql-1", 1000, 200), ("sql-2", 5, 500)):
        for request in range(number):
            counts.add(f"{SERVICE.format('sql')}/revisions/{revision}", Answered(now - 60, status, request / 1000))

    def emulators() -> list[Emulator]:
        return [MonitoringEmulator(counts, PubSubEmulator(Database(tmp_path / "monitoring.db"), SystemClock()))]

    with BackgroundServer(emulators) as server:
        monkeypatch.setenv("MONITORING_EMULATOR_HOST", server.url)
        yield


def serving(
    deployed: Deployed,
    name: str,
    kind: str = "cloud_run",
    canary: int | None = None,
    paid_since: datetime | None = None,
) -> None:
    """An endpoint that serves its first revision; `canary`: and gives this share to its second."""
    fixed = {"who": "me", "requested": CREATED, "digest": "0", "usd_per_hour": 2.0, "paid_since": paid_since}
    revisions = [{**fixed, "number": n, "run": f"job-{n:012x}", "revision": f"{name}-{n}"} for n in (1, 2)]
    watching = {"id": "r", "kind": "deploy", "who": "me", "requested": CREATED, "state": "WATCHING", "revision": 2}
    values = {
        "name": name,
        "source": "",
        "type": kind,
        "region": "us-central1",
        "service": SERVICE.format(name),
        "created": CREATED,
        "url": URL,
        "stable": 1,
        "revisions": revisions,
        "rollouts": [{**watching, "canary": {**CANARY, "percent": canary}}] if canary else [],
    }
    EndpointStore(deployed.store, Clock()).create(EndpointRecord.model_validate(values))


def listed(deployed: Deployed, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("dropforge_cli.named.stdout", lambda: Console(width=width, no_color=True))
    result = deployed.run("endpoints")
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("monitoring")
def test_requests_and_latency_of_the_last_hour_are_listed(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(deployed, "sql", canary=10)
    serving(deployed, "quiet")
    title, quiet, sql = listed(deployed, 240, monkeypatch)
    assert title.split()[-4:] == ["most", "expires", "base", "URL"]
    assert sql.split()[:5] == ["sql", "SERVING,", "canary", "10", "%"]
    assert ("1,005" in sql, "950 ms" in sql or "949 ms" in sql, sql.endswith(f"{URL}/v1")) == (True, True, True)
    assert quiet.split()[4:6] == ["0", "-"]


@pytest.mark.usefixtures("monitoring")
def test_80_columns_keep_requests_latency_and_cost_and_whole_urls(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(deployed, "sql")
    title, sql, _, url = listed(deployed, 80, monkeypatch)
    assert max(map(len, (title, sql, url))) <= 80
    assert {"requests/h", "p95", "expires"} <= set(title.split())
    assert url == f"sql  {URL}/v1"


@pytest.mark.usefixtures("monitoring")
def test_programs_get_every_count_and_why_there_is_none(deployed: Deployed) -> None:
    serving(deployed, "sql")
    serving(deployed, "inside", kind="gke")
    inside, sql = json.loads(deployed.run("endpoints", "--json").stdout)
    assert sql["last_hour_problem"] == ""
    assert sql["last_hour"]["sql-2"] == {"requests": 5, "errors": 5, "latency_ms": pytest.approx(4, abs=1)}
    assert (inside["last_hour"], sql["last_hour_problem"]) == (None, "")
    assert "vLLM does (docs/observability.md)" in inside["last_hour_problem"]


def test_a_refusal_of_cloud_monitoring_hides_no_endpoint(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITORING_EMULATOR_HOST", "http://127.0.0.1:9")
    serving(deployed, "sql")
    result = deployed.run("endpoints")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split()[0] == "sql"
    assert "the requests of sql are not counted: " in result.stderr


def test_a_change_that_the_function_would_refuse_is_refused_at_once(deployed: Deployed) -> None:
    """No function answers here: the commands would wait for two minutes for the effect of a message."""
    write_toml({**deployed.configuration, "rollout_workflow": "dropforge-rollout"})
    serving(deployed, "sql", canary=10)
    run = deployed.record("job-0123456789ab", RunState.SUCCEEDED).run
    deployed.spec(run)
    result = deployed.run("serve", run, "--as", "other")
    assert (result.exit_code, "cannot be served: it has no committed model" in result.output) == (1, True), (
        result.output
    )
    EndpointStore(deployed.store, Clock()).update("sql", lambda it: it.model_copy(update={"suspended": CREATED}))
    result = deployed.run("rollback", "sql")
    assert (result.exit_code, "error: endpoint sql is suspended" in result.output) == (1, True), result.output


def test_a_model_that_serves_already_needs_no_message(deployed: Deployed) -> None:
    """No function answers here: a message would wait for two minutes for its effect."""
    write_toml({**deployed.configuration, "rollout_workflow": "dropforge-rollout"})
    serving(deployed, "sql")
    run = deployed.record("job-000000000001", RunState.SUCCEEDED).run
    deployed.spec(run)
    result = deployed.run("serve", run, "--as", "sql")
    said = "endpoint sql serves this model already, as revision 1: nothing was changed; `dropforge serve RUN --as sql"
    assert (result.exit_code, result.stdout.startswith(said)) == (0, True), result.output
    again = deployed.run("serve", run, "--as", "sql", "--again")
    assert (again.exit_code, "cannot be served: it has no committed model" in again.stderr) == (1, True), again.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("serve", "RUN", "--as", "Prod"),
            "expected lower-case letters, digits and -; a letter first, no - at the end",
        ),
        (("serve", "RUN", "--as", "Prod"), "did you mean 'prod'?"),
        (("serve", "RUN", "--as", "latest"), "it is reserved, or the id of a run"),
        (("serve", "RUN", "--as", "sql", "--canary", "10"), "did you mean percent=10?"),
        (
            ("serve", "RUN", "--as", "sql", "--canary", "percent=10,for=30"),
            "canary/for: wrong type; found 30; expected",
        ),
        (("serve", "RUN", "--as", "sql", "--canary", "percent=90"), "expected less than or equal to 50"),
        (
            ("serve", "RUN", "--as", "sql", "--canary", "percentage=9"),
            "unknown field; found 9; did you mean 'percent'?",
        ),
        (("budget", "sql", "five/day"), 'budget/usd: wrong type; found "five"; expected a number'),
        (("budget", "sql", "5/week"), 'budget/per: unknown value; found "week"; expected one of day, month'),
        (("budget", "sql", "5/Day"), "did you mean 'day'? One of day, month"),
        (("extend", "sql", "2 days"), "expected a length of time such as 36h or 7d, or never; did you mean 2d?"),
    ],
)
def test_a_request_that_is_wrong_is_refused_in_words(deployed: Deployed, arguments: tuple[str, ...], told: str) -> None:
    serving(deployed, "sql")
    run = deployed.record("job-0123456789ab", RunState.SUCCEEDED).run
    result = deployed.run(*(run if each == "RUN" else each for each in arguments))
    assert (result.exit_code, told in result.stderr) == (1, True), result.stderr
    assert "Input should" not in result.stderr
    assert "permitted" not in result.stderr


def test_a_change_tells_each_state_once_without_a_terminal(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(deployed, "sql")
    asked = Rollout(id="r", kind="retire", who="me", requested=CREATED)
    states = iter([RolloutState.QUEUED] * 3 + [RolloutState.RETIRING] * 2 + [RolloutState.RETIRED] * 3)
    read = EndpointStore.record

    def moving(store: EndpointStore, name: str) -> EndpointRecord:
        return read(store, name).with_rollout(asked.model_copy(update={"state": next(states)}))

    monkeypatch.setattr(EndpointStore, "record", moving)
    monkeypatch.setattr("dropforge_cli.named.publish", lambda *_, **__: "r")
    result = deployed.run("retire", "sql")
    assert (result.exit_code, result.stdout) == (0, "endpoint sql is retired; nothing of it is left\n"), result.output
    assert result.stderr.splitlines() == [f"endpoint sql: SERVING, retire {state}" for state in ("QUEUED", "RETIRING")]


def test_a_longer_life_is_told_with_its_highest_cost(deployed: Deployed) -> None:
    serving(deployed, "sql", paid_since=utc_now())  # two revisions, each for 2 USD an hour
    result = deployed.run("extend", "sql", "999d")
    assert result.stderr.startswith("endpoint sql costs at most $95,904.00 until ")
    assert "`dropforge budget` limits it" in result.stderr
