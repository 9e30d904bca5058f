"""Budget, time and progress on the stack: each notice is sent once, and each limit ends its run."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.platforms import get_target
from dropforge.platforms.training import Phase, launch_of
from dropforge.run.artifacts import MANIFEST, model_prefix
from dropforge.run.record import Record, RunState

from ..deployments import here
from ..stage_calls import deploy, inspect, provision
from .conftest import User
from .test_crash_windows import ME, URL, end, eventually, launched
from .test_runs import assert_clean

SERVE = {"type": "cloud_run", "ttl": "24h", "price_usd_per_hour": 2.0, "max_instances": 2}


def inspect_now(run: str) -> dict[str, Any]:
    return dict(inspect(run, ME, 1, URL))


def wait_until_training(user: User, run: str) -> None:
    user.until(lambda: inspect_now(run) and user.store.record(run).state is RunState.TRAINING)


def backdate_attempt(user: User, run: str, minutes: float) -> None:
    """Change the record of a run so that its attempt started `minutes` ago."""

    def change(record: Record) -> Record:
        since = utc_now() - timedelta(minutes=minutes)
        times = dict.fromkeys(("started", "launched", "running", "seen"), since)
        attempt = record.attempts[-1].model_copy(update=times)
        return record.model_copy(update={"attempts": [*record.attempts[:-1], attempt]})

    user.store.update(run, change)


def inspect_without_events(user: User, run: str) -> tuple[str, bool | None]:
    """Inspect a run whose trainer has reported nothing recently; return status and retry."""
    for name in user.store.names(names.events_prefix(run)):
        user.store.bucket.blob(name).delete()
    answer = inspect_now(run)
    return answer["status"], answer.get("retry")


def warnings_of(user: User, run: str, words: str) -> list[str]:
    """Wait until the last message about a run ends with `words`; return the headlines of its warnings."""
    return [headline for headline in user.slack(run, words) if headline.startswith(":warning:")]


def priced(user: User, usd_per_hour: float) -> dict[str, Any]:
    return {**user.spec()["target"], "price_usd_per_hour": usd_per_hour}


def test_the_budget_warnings_at_50_and_80_percent_are_sent_once_each(user: User) -> None:
    run = launched(user, "hang", target=priced(user, 10), limits={"max_cost_usd": 10, "max_duration": "9h"})
    wait_until_training(user, run)
    for minutes, notices in [
        (1, []),
        (31, ["budget-50"]),
        (32, ["budget-50"]),
        (49, ["budget-50", "budget-80"]),
        (50, ["budget-50", "budget-80"]),
    ]:
        backdate_attempt(user, run, minutes)
        assert inspect_now(run)["status"] == "WAITING"
        assert user.store.record(run).notices == ["training-a1", *notices]
    assert warnings_of(user, run, "80 % of its budget") == [
        ":warning: noop has used 50 % of its budget",
        ":warning: noop has used 80 % of its budget",
    ]
    end(user, run)


def test_the_cloud_ends_an_attempt_whose_budget_is_spent(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud ends the attempt without dropforge, and provision opens no further attempt."""
    monkeypatch.setattr("dropforge.stages.provision.MIN_ATTEMPT_SECONDS", 1)
    run = launched(user, "hang", target=priced(user, 3600), limits={"max_cost_usd": 3})
    record, spec = user.store.record(run), user.store.spec(run)
    assert record.attempts[0].limit == "max_cost_usd"
    target = get_target("cloud_run")
    user.until(
        lambda: target.inspect(here().cloud, launch_of(record, spec, user.settings, key="")).phase is Phase.FAILED
    )
    answer = eventually(lambda: inspect_now(run))
    assert (answer["error"]["error_class"], answer["retry"]) == ("budget", False)
    assert "max_cost_usd" in answer["error"]["hint"]
    answer = provision(run, ME, 2)
    assert (answer["status"], answer["error"]["error_class"]) == ("FAILED", "budget")
    end(user, run)


def has_manifest(user: User, run: str) -> bool:
    return bool(user.store.bucket.blob(f"{model_prefix(run)}{MANIFEST}").exists())


def test_the_endpoint_may_spend_the_rest_of_the_budget(user: User) -> None:
    limits = {"max_cost_usd": 5.0}
    run = launched(user, "silent", serve=SERVE, target=priced(user, 1), limits=limits)
    # An attempt that waits an hour for its machine ends; this attempt has trained.
    user.until(lambda: has_manifest(user, run))
    backdate_attempt(user, run, 60)
    assert eventually(lambda: inspect_now(run))["status"] == "SUCCEEDED"
    assert eventually(lambda: deploy(run, ME))["status"] == "READY"
    record = user.store.record(run)
    assert record.endpoint is not None
    assert record.endpoint.limit == "max_cost_usd"
    began = next(t.time for t in record.history if t.state is RunState.DEPLOYING)
    assert (record.endpoint.expires - began).total_seconds() == pytest.approx(3600, abs=30)  # 4 USD, 2 instances, 2 USD
    assert record.cost(record.endpoint.expires) == pytest.approx(5, abs=0.05)
    end(user, run)


def test_the_report_has_the_cost_of_each_part(user: User) -> None:
    run = user.drop(user.spec("preempted-once", serve=SERVE, target=priced(user, 100), limits={"max_cost_usd": 50}))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert record.endpoint is not None
    user.slack(run, "succeeded")
    cost = json.loads(user.store.read(names.report_object(run)).data)["cost_usd"]
    assert len(cost["attempts"]) == 2
    assert cost["training"] == pytest.approx(sum(cost["attempts"]), abs=1e-4)
    assert cost["endpoint_at_most"] < 1 < cost["endpoint_until_it_expires"]
    assert cost["total_at_most"] == pytest.approx(cost["training"] + cost["endpoint_until_it_expires"], abs=1e-4)
    assert cost["total_at_most"] <= 50
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    assert_clean(user, run)


@pytest.mark.parametrize(
    ("on_stuck", "answers"), [("notify", ("WAITING", None)), ("restart", ("FAILED", True)), ("fail", ("FAILED", False))]
)
def test_a_stuck_attempt_causes_one_notice_and_then_follows_the_spec(
    user: User, on_stuck: str, answers: tuple[str, bool | None]
) -> None:
    run = launched(user, "hang", limits={"max_duration": "9h", "stuck_after": "30m", "on_stuck": on_stuck})
    wait_until_training(user, run)
    user.until(lambda: user.store.names(names.events_prefix(run)))  # its only event, which may come after TRAINING
    backdate_attempt(user, run, 31)
    for _ in range(2):
        # On a slow machine, Pub/Sub delivers the event a second time, which is progress.
        user.until(lambda: inspect_without_events(user, run) == answers and len(user.store.record(run).notices) > 1)
    assert user.store.record(run).notices == ["training-a1", "stuck-a1"]
    assert warnings_of(user, run, "is stuck") == [":warning: noop is stuck"]
    end(user, run)


def test_a_forged_failure_event_does_not_end_a_run(user: User) -> None:
    """Any trainer may publish job events of any run. Training continues: the cloud does not confirm the failure."""
    run = user.drop(user.spec("slow"))
    user.wait(run, "TRAINING")
    forged = {"type": "failed", "run": run, "attempt": 1, "sequence": 10**15 - 1, "time": "2020-01-01T00:00:00Z"}
    user.publish("dropforge-job-events", json.dumps({**forged, "error_class": "config", "message": "forged"}).encode())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
