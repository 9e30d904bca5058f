"""`submit`, `runs`, `status`, `logs` and `cancel`, on buckets and topics without functions behind them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud import pubsub_v1

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.run.record import RunError, RunState
from dropforge.run.series import Progress

from ..deployments import clients
from .conftest import CREATED, EXAMPLE, Deployed, attempt, entry, served

FUTURE = datetime(2100, 1, 1, tzinfo=UTC)
RUN, OTHER = "job-0123456789ab", "job-0123ffffffff"


def test_submit_prints_the_run_of_the_uploaded_object(deployed: Deployed) -> None:
    result = deployed.run("submit", EXAMPLE)
    [blob] = clients.storage().list_blobs("p-specs")
    assert blob.name == "specs/cloud-run-gemma-2b-qlora.json"
    assert blob.download_as_bytes() == EXAMPLE.read_bytes()
    assert result.stdout.strip() == names.run_id_of_object("p-specs", blob.name, blob.generation)


def test_the_same_spec_dropped_again_is_another_run(deployed: Deployed) -> None:
    first, second = (deployed.run("submit", EXAMPLE, "--again", "--name", "team/a.json").stdout for _ in range(2))
    assert first != second
    assert [blob.name for blob in clients.storage().list_blobs("p-specs")] == ["specs/team/a.json"]


def test_an_invalid_spec_is_dropped_only_with_unchecked(deployed: Deployed) -> None:
    Path("bad.json").write_text("{}")
    result = deployed.run("submit", "bad.json")
    assert result.exit_code == 1
    assert "error: the job spec is refused\n/api_version: a required field is missing" in result.stderr
    assert not list(clients.storage().list_blobs("p-specs"))
    assert deployed.run("submit", "--unchecked", "bad.json").exit_code == 0
    assert [blob.name for blob in clients.storage().list_blobs("p-specs")] == ["specs/bad.json"]


def test_an_object_name_that_starts_no_run_is_refused(deployed: Deployed) -> None:
    result = deployed.run("submit", EXAMPLE, "--name", "notes.txt")
    assert result.exit_code == 1
    assert "'specs/notes.txt'; only specs/….json starts a run" in result.stderr


def test_a_missing_bucket_is_an_error_of_one_line(deployed: Deployed) -> None:
    clients.storage().bucket("p-specs").delete()
    result = deployed.run("submit", EXAMPLE)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: config: ")
    assert "p-specs" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_runs_the_output_says_so(deployed: Deployed) -> None:
    assert deployed.run("runs").output == "no runs yet; start a run with `dropforge submit SPEC`\n"
    assert json.loads(deployed.run("runs", "--json").stdout) == []


def test_status_shows_the_whole_record(deployed: Deployed) -> None:
    error = RunError(error_class=ErrorClass.PREEMPTED, message="the machine was taken away at step 40")
    deployed.record(
        RUN,
        RunState.SUCCEEDED,
        **served(ended=None, expires=FUTURE, limit="max_cost_usd") | {"attempts": [attempt(error=error), attempt(2)]},
        metrics={"exact_match": 0.9567, "exact_match_before": 0.125, "tokens": 1234567.0, "loss": None},
    )
    deployed.ledger(RUN, entry("run.googleapis.com/Service", "projects/p/locations/us-central1/services/s"))
    output = deployed.run("status", RUN).output
    for expected in (
        f"{RUN}  job  SUCCEEDED",
        "accepted 30 min",
        "preempted",
        "(training $2.00, endpoint at most $",
        "result   exact_match 0.125 → 0.9567\ntraining tokens 1,234,567\n",
        "endpoint https://e.run.app/v1\n",
        "model job, until 2100-01-01 00:00 UTC, when the budget is spent\n",
        "created   projects/p/locations/us-central1/services/s\n",
    ):
        assert expected in output, output
    told = json.loads(deployed.run("status", RUN, "--json").stdout)
    assert told["stage_seconds"] == {"ACCEPTED": 1800.0, "DEPLOYING": 0.0}
    assert told["ledger"][0]["state"] == "created"


def test_status_of_a_training_run_has_its_newest_progress(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    steps = [Progress(attempt=1, time=CREATED, step=n, total_steps=40, loss=1.5, eta_seconds=9) for n in (10, 20)]
    deployed.series(RUN, *steps)
    output = deployed.run("status", RUN).output
    assert "step 20 of 40, loss 1.5, 9.0 s left" in output
    assert "step 10" not in output


def test_status_of_a_failed_run_has_the_reason_and_the_hint(deployed: Deployed) -> None:
    error = RunError(error_class=ErrorClass.DATA, message="line 3 is not JSON", hint="correct the data set")
    deployed.record(RUN, RunState.FAILED, error=error)
    deployed.record(OTHER, RunState.REJECTED, problems=[{"pointer": "/name", "message": "bad [bold]", "found": '"X"'}])
    assert "data: line 3 is not JSON\nhint: correct the data set\n" in deployed.run("status", RUN).output
    assert '/name: bad [bold]; found "X"' in deployed.run("status", OTHER).output


def test_a_run_may_be_named_by_a_prefix(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.SUCCEEDED)
    deployed.record(OTHER, RunState.FAILED)
    assert deployed.run("status", "job-01234").output.startswith(RUN)
    ambiguous = deployed.run("status", "job-0123")
    assert ambiguous.exit_code == 1
    assert "error: 'job-0123' could be any of 2 runs:\n" in ambiguous.stderr
    assert f"  {RUN}  job, SUCCEEDED, " in ambiguous.stderr
    assert f"  {OTHER}  job, FAILED, " in ambiguous.stderr
    for unknown in ("nothing", "nothing-0123456789ab"):
        assert "`dropforge runs` lists them" in deployed.run("status", unknown).stderr


def test_latest_and_a_name_are_the_newest_run(deployed: Deployed) -> None:
    """Also if the name is the beginning of the ids of other runs."""
    assert "there are no runs yet" in deployed.run("status").stderr
    deployed.record(RUN, RunState.SUCCEEDED, name="job-0123")
    deployed.record(OTHER, RunState.SUCCEEDED, name="job-0123", created=CREATED + timedelta(hours=1))
    deployed.record("other-0123456789ab", RunState.REJECTED, name="other", created=CREATED + timedelta(hours=2))
    assert deployed.run("status", "job-0123").output.startswith(OTHER)
    for latest in (("status",), ("status", "latest")):
        assert deployed.run(*latest).output.startswith("other-0123456789ab")


def test_a_cancel_by_name_never_guesses(deployed: Deployed) -> None:
    """A newer run of the name has finished and serves; the older one works, and costs."""
    deployed.record(RUN, RunState.PROVISIONING, name="pair")
    deployed.record(OTHER, RunState.SUCCEEDED, name="pair", created=CREATED + timedelta(hours=1))
    assert f"requested the end of {RUN}" in deployed.run("cancel", "pair").output
    refused = deployed.run("cancel", "latest")
    assert (refused.exit_code, f"  {OTHER}  pair, SUCCEEDED, " in refused.stderr) == (1, True)
    deployed.record("third-0123456789ab", RunState.TRAINING, name="pair")
    refused = deployed.run("cancel", "pair")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "'pair' could be any of 2 runs" in refused.stderr
    assert RUN in refused.stderr
    assert OTHER not in refused.stderr


def test_the_endpoint_of_a_finished_run_ends_by_its_id_alone(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.SUCCEEDED, name="pair")
    refused = deployed.run("cancel", "pair")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert f"no run 'pair' works:\n  {RUN}  pair, SUCCEEDED, " in refused.stderr
    assert "hint: give the id of the run" in refused.stderr
    for given in (RUN, RUN[:-3]):
        assert f"{RUN} is already SUCCEEDED" in deployed.run("cancel", given).output


def test_a_name_that_several_models_have_is_not_served(deployed: Deployed) -> None:
    ended = attempt(ended=CREATED)
    for run in (RUN, OTHER):
        deployed.record(run, RunState.SUCCEEDED, name="pair", attempts=[ended])
    refused = deployed.run("serve", "pair", "--as", "prod")
    assert refused.exit_code == 1
    assert "'pair' could be any of 2 runs" in refused.stderr
    deployed.record("third-0123456789ab", RunState.FAILED, name="none")
    assert "no run 'none' has a model" in deployed.run("serve", "none", "--as", "prod").stderr


def test_status_says_who_ended_a_run(deployed: Deployed) -> None:
    deployed.record(
        RUN, RunState.CANCELLED, cancel_requested=CREATED, cancel_cause="the deletion of gs://s/specs/a.json"
    )
    assert "by the deletion of gs://s/specs/a.json" in deployed.run("status", RUN).output
    error = RunError(error_class=ErrorClass.BUDGET, message="m")
    deployed.record(OTHER, RunState.FAILED, error=error)
    assert "ended by limits.max_cost_usd" in deployed.run("status", OTHER).output
    assert json.loads(deployed.run("status", OTHER, "--json").stdout)["ended_by"] == "limits.max_cost_usd"


def test_many_meanings_are_listed_in_part(deployed: Deployed) -> None:
    for number in range(12):
        deployed.record(f"job-{number:012x}", RunState.REJECTED)
    lines = deployed.run("status", "job-").stderr.splitlines()
    assert lines[0] == "error: 'job-' could be any of 12 runs:"
    assert lines[11:] == ["  and 2 more", "hint: give more of the id, or the name of a run, or `latest`"]


def test_an_unreadable_record_hides_no_other_run(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.SUCCEEDED)
    deployed.store.put_new(names.record_object(OTHER), b"{}")
    result = deployed.run("runs")
    assert RUN in result.stdout
    assert f"left out: gs://p-runs/runs/{OTHER}/record.json is not a record" in result.stderr


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({}, "success"),
        ({"cancelled": True}, "cancelled"),
        ({"error": RunError(error_class=ErrorClass.CONFIG, message="m")}, "config"),
    ],
)
def test_status_says_how_an_attempt_ended(deployed: Deployed, changes: dict[str, Any], ending: str) -> None:
    deployed.record(RUN, RunState.CANCELLED, attempts=[attempt(**changes)])
    assert f"30 min  {ending}" in deployed.run("status", RUN).output


@pytest.mark.parametrize(("state", "code"), [(RunState.SUCCEEDED, 0), (RunState.FAILED, 1), (RunState.CANCELLED, 1)])
def test_watching_a_finished_run_exits_with_its_result(deployed: Deployed, state: RunState, code: int) -> None:
    deployed.record(RUN, state)
    assert deployed.run("status", RUN, "--watch").exit_code == code


def test_cancel_publishes_the_request_and_prints_its_effect(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING)
    deployed.record(OTHER, RunState.FAILED)
    with pubsub_v1.SubscriberClient() as subscriber:
        name = subscriber.subscription_path("p", "test")
        subscriber.create_subscription(name=name, topic="projects/p/topics/dropforge-operations")
        assert "requested the end of" in deployed.run("cancel", RUN).output
        [message] = subscriber.pull(subscription=name, max_messages=5, timeout=60).received_messages
    assert json.loads(message.message.data) == {"cancel": RUN}
    assert message.message.attributes["requested_with"].startswith("`dropforge cancel` of user ")
    assert "is already FAILED and has no endpoint" in deployed.run("cancel", OTHER).output
    assert deployed.run("cancel", "job-aaaaaaaaaaaa").exit_code == 1


def test_logs_of_a_real_project_use_gcloud(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    deployed.record(RUN, RunState.SUCCEEDED)
    assert "no resources yet" in deployed.run("logs", RUN).stderr
    deployed.ledger(
        RUN,
        entry("run.googleapis.com/Job", f"projects/p/locations/us-central1/jobs/df-{RUN}-a1"),
        entry("run.googleapis.com/Service", f"projects/p/locations/us-central1/services/df-{RUN}-serve"),
    )
    result = deployed.run("logs", RUN)
    assert result.exit_code == 1
    assert "gcloud logging read" in result.stderr
    assert f'resource.labels.job_name="df-{RUN}-a1"' in result.stderr
    assert f'resource.labels.service_name="df-{RUN}-serve"' in result.stderr
    assert "--project=p" in result.stderr
    assert "gcloud is not installed here" in result.stderr


def test_logs_of_tpu_vms_are_filtered_by_node(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    deployed.record(RUN, RunState.SUCCEEDED)
    name = f"df-{RUN}-serve"
    deployed.ledger(
        RUN,
        entry("compute.googleapis.com/Disk", f"projects/p/zones/us-west1-c/disks/df-{RUN}-a1"),
        entry("tpu.googleapis.com/QueuedResource", f"projects/p/locations/us-west1-c/queuedResources/{name}"),
        entry("tpu.googleapis.com/Node", f"projects/p/locations/us-west1-c/nodes/{name}"),
    )
    shown = deployed.run("logs", RUN).stderr
    wanted = f'resource.type="tpu_worker" AND resource.labels.zone="us-west1-c" AND resource.labels.node_id="{name}"'
    assert f"gcloud logging read '({wanted})'" in shown


def test_logs_of_pods_are_filtered_by_their_owner(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    deployed.record(RUN, RunState.SUCCEEDED)
    cluster = "projects/p/locations/us-central1/clusters/c"
    objects = f"{cluster}/k8s/namespaces/n"
    deployed.ledger(
        RUN,
        entry("container.googleapis.com/Cluster", cluster),
        entry("batch.k8s.io/Job", f"{objects}/batch/jobs/df-{RUN}-a1"),
        entry("apps.k8s.io/Deployment", f"{objects}/apps/deployments/df-{RUN}-serve"),
        entry("k8s.io/Service", f"{objects}/services/df-{RUN}-serve"),
    )
    shown = deployed.run("logs", RUN).stderr
    for owner in ("a1", "serve"):
        assert f'resource.labels.pod_name=~"^df-{RUN}-{owner}-"' in shown
    assert shown.count('resource.type="k8s_container"') == shown.count('resource.labels.cluster_name="c"') == 2
