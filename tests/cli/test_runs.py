"""`submit`, `runs`, `status`, `logs` and `cancel`, on buckets and topics without functions behind them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from google.cloud import pubsub_v1

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.run.events import Progress
from dropforge.run.record import Endpoint, RunError, RunState

from ..deployments import clients
from .conftest import CREATED, EXAMPLE, Deployed, attempt, entry

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


def test_runs_are_listed_newest_first_with_their_cost(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.SUCCEEDED, attempts=[attempt()])
    deployed.record(OTHER, RunState.REJECTED, created=CREATED + timedelta(hours=1))
    deployed.record("job-ffffffffffff", RunState.FAILED, attempts=[attempt(usd_per_hour=None)])
    lines = deployed.run("runs").output.splitlines()
    assert [line.split()[0] for line in lines] == ["run", OTHER, RUN, "job-ffffffffffff"]
    assert lines[2].split()[1:4] == ["job", "SUCCEEDED", "1"]
    assert lines[2].endswith("$1.00")
    assert lines[3].endswith("unknown")
    listed = json.loads(deployed.run("runs", "--json").stdout)
    assert [(run["run"], run["training_cost_usd"]) for run in listed][1:] == [(RUN, 1.0), ("job-ffffffffffff", None)]


def test_without_runs_the_output_says_so(deployed: Deployed) -> None:
    assert deployed.run("runs").output == "no runs yet; start a run with `dropforge submit SPEC`\n"
    assert json.loads(deployed.run("runs", "--json").stdout) == []


def test_status_shows_the_whole_record(deployed: Deployed) -> None:
    error = RunError(error_class=ErrorClass.PREEMPTED, message="the machine was taken away at step 40")
    endpoint = Endpoint(
        url="https://e",
        model="job",
        service="s",
        region="us-central1",
        ready=CREATED,
        expires=CREATED + timedelta(days=1),
        limit="max_cost_usd",
    )
    deployed.record(
        RUN,
        RunState.SUCCEEDED,
        attempts=[attempt(error=error), attempt(2)],
        metrics={"exact_match": 0.9567, "tokens": 1234567.0, "loss": None},
        endpoint=endpoint,
    )
    deployed.ledger(RUN, entry("run.googleapis.com/Service", "projects/p/locations/us-central1/services/s"))
    output = deployed.run("status", RUN).output
    for expected in (
        f"{RUN}  job  SUCCEEDED",
        "accepted 90.0 s",
        "preempted",
        "training cost so far: $2.00",
        "exact_match 0.9567, tokens 1,234,567\n",
        "endpoint https://e/v1, model job, until 2026-11-21 12:00 UTC, when the budget is spent",
        "services/s  created",
    ):
        assert expected in output, output
    told = json.loads(deployed.run("status", RUN, "--json").stdout)
    assert told["stage_seconds"] == {"ACCEPTED": 90.0}
    assert told["ledger"][0]["state"] == "created"


def test_status_of_a_training_run_has_its_newest_progress(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    for step in (10, 20):
        deployed.event(
            Progress(
                run=RUN, attempt=1, sequence=step, time=CREATED, step=step, total_steps=40, loss=1.5, eta_seconds=9
            )
        )
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
    deployed.record(OTHER, RunState.SUCCEEDED)
    assert deployed.run("status", "job-01234").output.startswith(RUN)
    ambiguous = deployed.run("status", "job-0123")
    assert ambiguous.exit_code == 1
    assert f"2 run ids begin with 'job-0123': {RUN}, {OTHER}" in ambiguous.stderr
    for unknown in ("nothing", "nothing-0123456789ab"):
        assert "`dropforge runs` lists them" in deployed.run("status", unknown).stderr


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
