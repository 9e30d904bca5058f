"""The sweep on a whole stack: it deletes orphans, keeps the resources of live runs, and restarts lost work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import requests
from click.testing import CliRunner, Result
from google.api_core.exceptions import ServiceUnavailable
from tests.patience import PATIENCE_SECONDS

from bench import crowd
from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.platforms import get_target
from dropforge.platforms.training import Launch, launch_of
from dropforge.run.record import Record, RunState
from dropforge.run.store import RunStore
from dropforge.stages import submit
from dropforge.stages.sweep import lost_work, orphans
from dropforge_cli.main import cli

from ..deployments import clients, here, intend
from ..stage_calls import submit_message, sweep
from .conftest import User
from .test_crash_windows import accepted
from .test_runs import assert_clean, states

Part = dict[str, Any]
SERVE = {"type": "cloud_run", "ttl": "1h"}


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the sweep's waiting times to zero: in these tests no other function works on the same runs."""
    monkeypatch.setattr(lost_work, "LOST_AFTER", timedelta(0))
    monkeypatch.setattr(lost_work, "UNACCEPTED_FOR", timedelta(0))
    monkeypatch.setattr(lost_work, "LATE_FOR", timedelta(0))
    monkeypatch.setattr(orphans, "LOOK_SECONDS", 0.2)


def make(user: User, launch: Launch) -> list[str]:
    """Create an attempt's resources through its adapter, in any state of the run; return the names that exist."""
    user.until(lambda: get_target(launch.spec.target.type).provision(here().cloud, launch) is None)
    wanted = {resource.name for resource in get_target(launch.spec.target.type).resources(launch)}
    user.until(lambda: wanted & set(user.resources(launch.run)))
    return sorted(wanted & set(user.resources(launch.run)))


def attempt_of(user: User, run: str) -> Launch:
    """Return the launch of a run's last attempt."""
    return launch_of(user.store.record(run), user.store.spec(run), user.settings, key="")


def end(user: User, *runs: str) -> None:
    """Cancel runs and check that they leave no resource."""
    for run in runs:
        user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    for run in runs:
        user.wait(run)
        assert_clean(user, run)


def end_execution(user: User, run: str) -> None:
    """Cancel the execution of a run, as a person may do in the console."""
    execution = user.store.record(run).execution
    name = f"{user.settings.workflow_name}/executions/{execution}"
    clients.workflow_executions().cancel_execution({"name": name})
    user.until(lambda: clients.workflow_executions().get_execution({"name": name}).state.name == "CANCELLED")


@contextmanager
def refused(user: User, method: str) -> Iterator[None]:
    """Make Cloud Run refuse a method inside the `with` block."""
    fault = {"method": method, "status": "UNAVAILABLE", "count": 10_000}
    requests.post(f"{user.info.http}/_local/cloudrun/faults", json={"fail_next": [fault]}, timeout=60)
    yield
    requests.post(f"{user.info.http}/_local/cloudrun/faults", json={"fail_next": []}, timeout=60)


def audit(*options: str) -> Result:
    return CliRunner().invoke(cli, ["audit", *options])


def differences(run: str) -> list[tuple[str, str]]:
    """Return (difference, resource) for each difference that the audit reports about a run."""
    result = audit("--json")
    reported = json.loads(result.stdout)["differences"]
    assert result.exit_code == (1 if reported else 0)
    return sorted((line["difference"], line["name"]) for line in reported if line["run"] == run)


def test_the_sweep_deletes_resources_created_after_teardown_and_keeps_those_of_a_live_run(
    user: User, target: Part, capsys: pytest.CaptureFixture[str]
) -> None:
    live, finished = user.drop(user.spec("hang", target=target)), user.drop(user.spec(target=target))
    assert user.wait(finished).state is RunState.SUCCEEDED
    user.wait(live, "TRAINING")
    kept = sorted(user.resources(live))
    # For attempt 2, because Compute Engine does not create a TPU VM's disk twice for the same request.
    late = make(user, replace(attempt_of(user, finished), attempt=2))
    assert {difference for difference, _ in differences(finished)} == {"unowned"}
    assert set(late) <= {name for _, name in differences(finished)}
    answer = sweep()
    assert set(late) <= set(answer["deleted"]), answer
    assert user.resources(finished) == []
    assert sorted(user.resources(live)) == kept
    assert differences(finished) == differences(live) == []
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    orphans = {line["resource"]: line["severity"] for line in logged if "left by a run that is over" in line["message"]}
    assert set(late) <= set(orphans)
    assert set(orphans.values()) == {"WARNING"}
    end(user, live)


def test_the_sweep_deletes_leftovers_of_an_earlier_attempt_of_a_live_run(user: User) -> None:
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    first = attempt_of(user, run)
    user.preempt(run)
    user.wait_for(run, lambda record: record.attempt == 2 and record.state is RunState.TRAINING)
    late = make(user, first)
    kept = sorted(set(user.resources(run)) - set(late))
    assert set(sweep()["deleted"]) >= set(late)
    assert sorted(user.resources(run)) == kept
    end(user, run)


def test_the_sweep_deletes_resources_of_unknown_runs_but_not_of_other_deployments(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = user.drop(user.spec())
    user.wait(run)
    launch = attempt_of(user, run)
    unknown = replace(launch, run="ghost-0123456789ab")
    other = replace(launch, run="other-0123456789ab", settings=replace(user.settings, runs_bucket="of-another"))
    began = utc_now()
    unowned, foreign = make(user, unknown), make(user, other)
    with monkeypatch.context() as patch:  # a slow machine must not make the resources old
        patch.setattr(Clock, "now", lambda _: began)
        assert not set(unowned) & set(sweep()["deleted"])  # a function may be about to write the record of the run
    later = timedelta(seconds=user.settings.check_interval_seconds + 1)
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + later)
    assert set(unowned) <= set(sweep()["deleted"])
    assert user.resources(unknown.run) == []
    assert user.resources(other.run) == foreign
    user.delete(foreign[0])


def test_a_run_continues_after_its_execution_ended_during_training(user: User, target: Part) -> None:
    run = user.drop(user.spec("slow", target=target))
    user.wait(run, "TRAINING")
    end_execution(user, run)
    with ThreadPoolExecutor(2) as pool:
        answers = [future.result() for future in [pool.submit(sweep), pool.submit(sweep)]]
    assert run in [restarted for answer in answers for restarted in answer["restarted"]]
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert len(record.superseded) == 1
    assert states(record)[-1:] == ["SUCCEEDED"]
    assert states(record).count("TRAINING") == 1
    user.until(lambda: not any(e.state.name == "ACTIVE" for e in user.executions(run)))
    results = [json.loads(e.result)["status"] for e in user.executions(run) if e.state.name == "SUCCEEDED"]
    assert sorted(set(results)) in (["SUCCEEDED"], ["SUCCEEDED", "SUPERSEDED"])
    assert results.count("SUCCEEDED") == 1
    assert_clean(user, run)
    assert run not in sweep()["restarted"]
    assert run not in user.store.marks().runs


@pytest.mark.parametrize(("behave", "error_class"), [("succeed", None), ("fail-data", "data")])
def test_a_run_keeps_its_outcome_after_its_execution_ended_during_teardown(
    user: User, behave: str, error_class: str | None
) -> None:
    with refused(user, "delete_job"):
        run = user.drop(user.spec(behave))
        user.wait(run, "TEARING_DOWN")
        end_execution(user, run)
    if sweep()["restarted"].count(run) != 1:  # a call of the ended execution may still end the run
        assert user.store.record(run).state.is_terminal
    record = user.wait(run)
    assert record.error == (record.outcome.error if record.outcome else None)
    assert (record.error.error_class if record.error else None) == error_class
    assert record.state is (RunState.FAILED if error_class else RunState.SUCCEEDED)
    assert_clean(user, run)


def test_a_run_is_served_after_its_execution_ended_during_deploy_and_a_deleted_endpoint_is_reported(user: User) -> None:
    with refused(user, "create_service"):
        run = user.drop(user.spec(serve=SERVE))
        user.wait(run, "DEPLOYING")
        end_execution(user, run)
    sweep()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert record.endpoint is not None
    assert record.endpoint.limit == "ttl"
    assert len(user.resources(run)) == 1
    assert differences(run) == []
    assert run in user.store.marks().runs  # the sweep inspects the endpoint until its expiry
    clients.run_services().delete_service(name=user.resources(run)[0]).result(timeout=PATIENCE_SECONDS)
    sweep()
    record = user.store.record(run)
    assert record.endpoint is not None
    assert record.endpoint.ended
    assert user.slack(run, "has lost its endpoint").count(":warning: noop has lost its endpoint") == 1
    assert differences(run) == []
    assert run not in user.store.marks().runs


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["by-its-ttl", "by-a-cancel"])
def test_the_end_of_an_endpoint_is_announced_once(user: User, is_cancelled: bool) -> None:
    run = user.drop(user.spec(serve=SERVE))
    assert user.wait(run).endpoint is not None
    if is_cancelled:
        user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
        user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    else:
        user.store.update(run, _expired)
    for _ in range(2):
        sweep()
    assert user.slack(run, "any more").count(":warning: noop is not served any more") == 1
    assert run not in user.store.marks().runs
    assert_clean(user, run)


def _expired(record: Record) -> Record:
    assert record.endpoint is not None
    return record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"expires": utc_now()})})


def test_the_sweep_starts_lost_specs_and_accepted_runs(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec without an upload event, a spec without a record, and an accepted run without an execution."""
    specs_bucket = clients.storage().create_bucket(f"specs-{time.time_ns()}")
    blob = specs_bucket.blob("specs/lost.json")
    blob.upload_from_string(json.dumps(user.spec()), "application/json")
    dropped = names.run_id_of_object(specs_bucket.name, blob.name, blob.generation)
    monkeypatch.setenv("DROPFORGE_SPECS_BUCKET", specs_bucket.name)
    here.cache_clear()

    key = f"unrecorded-{time.time_ns()}"
    with monkeypatch.context() as patch:
        patch.setattr(submit, "MAX_SPEC_IN_RECORD", 0)  # no event repeats this message
        patch.setattr(RunStore, "_write", _die_before_the_record(RunStore._write))
        with pytest.raises(ServiceUnavailable):
            submit_message(json.dumps(user.spec()).encode(), key)
    unrecorded = names.run_id_of_message(key)
    unstarted = accepted(user, "succeed", age=timedelta(minutes=1))
    user.store.update(unstarted, lambda record: record.model_copy(update={"execution": None}))

    with monkeypatch.context() as patch:
        patch.setattr(lost_work, "LOST_FOR", timedelta(0))
        assert dropped not in sweep()["resubmitted"]  # with LOST_FOR 0, the spec is too old
    answer = sweep()
    assert dropped in answer["resubmitted"]
    for run in (dropped, unrecorded, unstarted):
        record = user.wait(run)
        assert record.state is RunState.SUCCEEDED, record.error
        assert len(user.executions(run)) == 1
        assert_clean(user, run)
    assert not {dropped, unrecorded, unstarted} & {*sweep()["resubmitted"]}


def _die_before_the_record(write: Any) -> Any:
    def write_or_die(store: RunStore, name: str, *arguments: Any) -> Any:
        if name.endswith("/record.json"):
            raise ServiceUnavailable("killed")
        return write(store, name, *arguments)

    return write_or_die


def test_the_sweep_announces_an_unannounced_end(user: User) -> None:
    run = accepted(user, "succeed")
    user.store.update(run, lambda record: record.entered(RunState.TEARING_DOWN, utc_now()))
    user.store.update(run, lambda record: record.entered(RunState.FAILED, utc_now()))
    sweep()
    assert user.slack(run, "failed")
    assert user.store.read(names.report_object(run))
    count = len(user.slack(run, "failed"))
    sweep()
    assert len(user.slack(run, "failed")) == count


def test_a_crowd_of_marks_and_junk_specs_delays_no_end_of_an_endpoint(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep without any time for marks and specs deletes the endpoint; the next sweeps have the rest."""
    number = time.time_ns() % 10**9
    marks = [names.open_object(f"marked-{number + n:012x}") for n in range(100)]
    junk = [f"specs/junk-{number + n}.json" for n in range(10)]
    crowd.write(user.state, user.settings.runs_bucket, marks, b"")
    crowd.write(user.state, user.settings.specs_bucket, junk, b"{")
    run = f"served-{number:012x}"
    crowd.serve(clients, user.settings, run)
    with monkeypatch.context() as patch:
        patch.setattr("dropforge.stages.sweep.sweep.MARKS_UNTIL", -1.0)
        patch.setattr("dropforge.stages.sweep.sweep.SPECS_UNTIL", -1.0)
        assert any(run in name for name in sweep()["deleted"])
    assert set(marks) <= set(user.store.names(names.OPEN_PREFIX))
    resubmitted = sweep()["resubmitted"]
    blobs = clients.storage().list_blobs(user.settings.specs_bucket, prefix="specs/junk-")
    rejected = {names.run_id_of_object(user.settings.specs_bucket, blob.name, blob.generation) for blob in blobs}
    assert rejected <= set(resubmitted)
    assert set(marks).isdisjoint(user.store.names(names.OPEN_PREFIX))


def test_the_audit_reports_differences_between_ledgers_and_cloud(user: User) -> None:
    live = user.drop(user.spec("hang"))
    user.wait(live, "TRAINING")
    assert differences(live) == []
    job = user.training(live)
    finished = user.drop(user.spec())
    user.wait(finished)
    intend(user.store, finished, "run.googleapis.com/Job", missing := job.replace(live, finished), 1)
    assert differences(finished) == [("missing", missing), ("remaining", missing)]
    assert missing in audit().output
    sweep()
    assert differences(finished) == []  # the sweep verified that the job does not exist
    end(user, live)
