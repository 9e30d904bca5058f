"""The requests of target `tpu_vm`, and the states that it reads from queued resources and nodes, without a cloud."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from google.api_core.exceptions import NotFound
from google.cloud import tpu_v2
from google.longrunning import operations_pb2

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import tpu
from dropforge.cloud.listing import Listed
from dropforge.fit.known import KNOWN_MODELS
from dropforge.fit.shape import shape_of
from dropforge.money.plan import make_plan
from dropforge.platforms.tpu_vm import serve
from dropforge.platforms.tpu_vm.serve import TpuVmServer
from dropforge.platforms.tpu_vm.train import STARTUP_SCRIPT, TpuVms, machine, status_of, status_of_node
from dropforge.platforms.training import Launch, Phase, Status, Waits
from dropforge.spec import parse_spec
from dropforge.stages.admission import deployment_problems, fit_problems
from dropforge_cli.deployment import placeholders

from ...deployments import cloud_with

EXAMPLE = Path(__file__).parents[3] / "examples" / "tpu-vm-qwen3-4b.json"
KEPT = Path(__file__).parents[3] / "schemas" / "examples" / "valid" / "tpu-vm-that-is-kept.json"
NAME = "projects/YOUR-PROJECT/locations/us-west1-c/nodes/n"
NOW = datetime(2026, 11, 20, tzinfo=UTC)
Node, Queued = tpu_v2.Node, tpu_v2.QueuedResourceState


def node(state: str) -> tpu_v2.Node:
    return Node(name="n", state=Node.State[state])


def queued(state: str, **fields: Any) -> tpu_v2.QueuedResource:
    return tpu_v2.QueuedResource(name="q", state={"state": Queued.State[state], **fields})


def test_one_spec_replaces_tutorial_002() -> None:
    """The spec replaces `gcloud compute disks create`, `tpus tpu-vm create` and the commands typed over SSH."""
    spec = parse_spec(EXAMPLE.read_bytes())
    plan = make_plan(spec, placeholders(), EXAMPLE.name, NOW)
    assert [placement.region for placement in plan.placements] == ["us-west1-c", "us-west4-a", "us-central1-a"]
    disk, request, _ = plan.placements[0].resources
    name = "df-tpu-vm-qwen3-4b-000000000000-a1"
    assert disk.request["disk"] == {
        "name": name,
        "sizeGb": "256",
        "type": "zones/us-west1-c/diskTypes/pd-balanced",
        "labels": {
            "team": "research",
            "managed-by": "dropforge",
            "dropforge-run": "tpu-vm-qwen3-4b-000000000000",
            "dropforge-attempt": "1",
            "dropforge-deployment": names.deployment_id("YOUR-RUNS-BUCKET"),
        },
    }
    queued_resource = request.request["queuedResource"]
    assert queued_resource["queueingPolicy"] == {"validUntilDuration": "1800s"}
    assert queued_resource["spot"] == {}
    [node_spec] = queued_resource["tpu"]["nodeSpec"]
    requested = node_spec["node"]
    assert (requested["acceleratorType"], requested["runtimeVersion"]) == ("v5litepod-8", "v2-alpha-tpuv5-lite")
    assert requested["networkConfig"]["enableExternalIps"] is False
    assert requested["dataDisks"] == [
        {"sourceDisk": f"projects/YOUR-PROJECT/zones/us-west1-c/disks/{name}", "mode": "READ_WRITE"}
    ]
    metadata = requested["metadata"]
    assert metadata.pop("startup-script") == STARTUP_SCRIPT.read_text()
    assert metadata == {
        "dropforge-role": "train",
        "dropforge-run": "tpu-vm-qwen3-4b-000000000000",
        "dropforge-attempt": "1",
        "dropforge-image": "YOUR-TRAIN-MAXTEXT-IMAGE",
        "dropforge-env": "\n".join(
            [
                "DROPFORGE_PROJECT=YOUR-PROJECT",
                "DROPFORGE_RUN=tpu-vm-qwen3-4b-000000000000",
                "DROPFORGE_ATTEMPT=1",
                "DROPFORGE_RUNS_BUCKET=YOUR-RUNS-BUCKET",
                "DROPFORGE_JOB_EVENTS_TOPIC=projects/YOUR-PROJECT/topics/YOUR-JOB-EVENTS-TOPIC",
                f"DROPFORGE_DEADLINE={metadata['dropforge-deadline']}",
                "DROPFORGE_GRACE_SECONDS=25",
                "DROPFORGE_WORK_DIRECTORY=/work",
                'DROPFORGE_SECRETS={"HF_TOKEN": "projects/YOUR-PROJECT/secrets/hf-token/versions/latest"}',
            ]
        ),
        "dropforge-deadline": str(int(datetime(2026, 11, 20, 6, tzinfo=UTC).timestamp())),
        "dropforge-runs-bucket": "YOUR-RUNS-BUCKET",
        "dropforge-job-events-topic": "projects/YOUR-PROJECT/topics/YOUR-JOB-EVENTS-TOPIC",
        "dropforge-data-disk": "persistent-disk-1",
    }
    assert sum(len(key) + len(value) for key, value in requested["metadata"].items()) < 2**18


def test_the_metadata_of_a_kept_machine_describes_its_server() -> None:
    spec = parse_spec(KEPT.read_bytes().replace(b"on_demand", b"guaranteed"))
    run = "kept-0123456789ab"
    training_vm = machine(Launch(run, 2, 0, spec, placeholders(), NOW, 600, key=""))
    latest = str(int((NOW + timedelta(hours=8, minutes=20)).timestamp()))
    assert training_vm.labels[names.EXPIRES_LABEL] == latest
    assert training_vm.tags == ("dropforge-server",)
    assert training_vm.use_seconds == 600 + 8 * 3600 + 20 * 60
    server_metadata = {key: value for key, value in training_vm.metadata.items() if "server" in key}
    assert server_metadata == {
        "dropforge-server-image": "YOUR-SERVE-VLLM-TPU-IMAGE",
        "dropforge-server-env": "\n".join(
            [
                "DROPFORGE_PROJECT=YOUR-PROJECT",
                f"DROPFORGE_MODEL_URI=gs://YOUR-RUNS-BUCKET/models/{run}",
                "DROPFORGE_SERVED_MODEL_NAME=qwen3-sql",
                "DROPFORGE_MAX_MODEL_LEN=1024",
                "DROPFORGE_MAX_NUM_SEQS=16",
                "DROPFORGE_SAMPLING=greedy",
                "DROPFORGE_TENSOR_PARALLEL_SIZE=8",
                "DROPFORGE_WORK_DIRECTORY=/work",
                "PORT=8000",
            ]
        ),
        "dropforge-server-deadline": latest,
    }
    documented = STARTUP_SCRIPT.read_text().split("set -Eeuo")[0]
    assert all(f"#   {key} " in documented for key in server_metadata)


@pytest.mark.parametrize(
    ("resource", "tpu_node", "phase", "error_class"),
    [
        (None, None, Phase.GONE, None),
        (queued("ACCEPTED"), None, Phase.PENDING, ErrorClass.STOCKOUT),
        (queued("WAITING_FOR_RESOURCES"), None, Phase.PENDING, ErrorClass.STOCKOUT),
        (queued("PROVISIONING"), node("CREATING"), Phase.PENDING, ErrorClass.STOCKOUT),
        (queued("ACTIVE"), node("READY"), Phase.RUNNING, None),
        (queued("ACTIVE"), node("RESTARTING"), Phase.RUNNING, None),
        (queued("ACTIVE"), node("REPAIRING"), Phase.RUNNING, None),
        (queued("ACTIVE"), node("PREEMPTED"), Phase.FAILED, ErrorClass.PREEMPTED),
        (queued("SUSPENDING"), node("PREEMPTED"), Phase.FAILED, ErrorClass.PREEMPTED),
        (queued("SUSPENDED"), None, Phase.FAILED, ErrorClass.INFRASTRUCTURE),
        (queued("SUSPENDED"), node("TERMINATED"), Phase.FAILED, ErrorClass.INFRASTRUCTURE),
        (queued("DELETING"), node("READY"), Phase.GONE, None),
        (queued("FAILED", failed_data={"error": {"code": 4, "message": "x"}}), None, Phase.FAILED, ErrorClass.STOCKOUT),
        (
            queued("FAILED", failed_data={"error": {"code": 8, "message": "Quota limit 'x' has been exceeded."}}),
            None,
            Phase.FAILED,
            ErrorClass.QUOTA,
        ),
        (
            queued("FAILED", failed_data={"error": {"code": 7, "message": "no"}}),
            None,
            Phase.FAILED,
            ErrorClass.PERMISSION,
        ),
    ],
)
def test_states_decide(resource: Any, tpu_node: Any, phase: Phase, error_class: ErrorClass | None) -> None:
    attempt = Launch("r", 1, 0, parse_spec(EXAMPLE.read_bytes()), placeholders(), NOW, 600, key="")
    status = status_of(resource, tpu_node, machine(attempt))
    assert (status.phase, status.error_class) == (phase, error_class)


def test_a_missing_node_is_gone() -> None:
    assert status_of_node(None, NAME).phase is Phase.GONE
    assert status_of_node(node("DELETING"), NAME).phase is Phase.GONE


def test_a_refusal_is_read_from_any_page_of_operations() -> None:
    """A busy zone has more operations than a page holds; an overlooked refusal would be requested again."""
    operation: dict[str, Any] = {"name": "o", "done": True, "error": {"code": 8, "message": "no more capacity"}}
    refusal = operations_pb2.Operation(**operation)
    refusal.metadata.Pack(tpu_v2.OperationMetadata.pb(tpu_v2.OperationMetadata(target=NAME)))
    pages = {
        "": operations_pb2.ListOperationsResponse(operations=[operations_pb2.Operation(name="p")], next_page_token="2"),
        "2": operations_pb2.ListOperationsResponse(operations=[refusal]),
    }
    client = Mock(list_operations=lambda request, timeout: pages[request.get("page_token", "")])
    with pytest.raises(CloudError, match="no more capacity") as refused:
        tpu._raise_if_refused(cloud_with(tpu=client), NAME)
    assert refused.value.error_class is ErrorClass.STOCKOUT


@pytest.mark.parametrize("is_held", [True, False])
def test_a_node_without_its_queued_resource_is_deleted_directly(is_held: bool) -> None:
    remaining_node = Node(name=NAME, state="READY", queued_resource=NAME.replace("nodes", "queuedResources"))
    client = Mock(get_node=Mock(return_value=remaining_node))
    if not is_held:
        client.get_queued_resource.side_effect = NotFound("deleted")
    assert not tpu.delete(cloud_with(tpu=client), tpu.NODE, NAME)
    assert client.delete_node.called is not is_held


def test_a_spec_that_does_not_fit_or_has_no_image_is_refused_early() -> None:
    spec = parse_spec(EXAMPLE.read_bytes())
    assert fit_problems(spec, shape_of(KNOWN_MODELS[spec.model.source].config)) == []
    assert deployment_problems(spec, placeholders()) == []
    without = replace(placeholders(), train_maxtext_image="")
    assert [problem.pointer for problem in deployment_problems(spec, without)] == ["/target/type"]
    large = parse_spec(EXAMPLE.read_bytes().replace(b"Qwen3-4B", b"Qwen3-32B"))
    [problem] = fit_problems(large, None)
    assert problem.expected is not None
    assert problem.expected.startswith("at most 128 GiB on 1 v5litepod-8")


def test_the_sweep_sees_training_and_serving_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter lists its own: the label of an attempt or of an expiry tells them apart."""
    training, serving = (
        Listed(tpu.NODE, f"nodes/{label}", names.labels("demo-0123456789ab", {label: "1"}), None)
        for label in (names.ATTEMPT_LABEL, names.EXPIRES_LABEL)
    )
    monkeypatch.setattr(tpu, "list_queued", lambda _: [])
    monkeypatch.setattr(tpu, "list_nodes", lambda _: [training, serving])
    monkeypatch.setattr("dropforge.platforms.tpu_vm.train.list_disks", lambda _: [])
    cloud = cloud_with()
    assert list(TpuVms().listed(cloud)) == [training]
    assert list(TpuVmServer().listed(cloud)) == [serving]


def test_a_machine_in_the_queue_says_its_state_and_what_it_means() -> None:
    attempt = Launch("r", 1, 0, parse_spec(EXAMPLE.read_bytes()), placeholders(), NOW, 600, key="")
    waiting = status_of(queued("WAITING_FOR_RESOURCES"), None, machine(attempt)).wait_reason
    assert waiting == "the queued resource is WAITING_FOR_RESOURCES: Cloud TPU has no capacity for it yet"
    assert status_of_node(node("CREATING"), NAME).wait_reason == "the node is being created"
    assert status_of_node(node("READY"), NAME).wait_reason == ""


@pytest.mark.parametrize(("node", "expected"), [(None, False), (Mock(), True)])
def test_an_endpoint_exists_as_long_as_its_node(node: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queued resource without its node does not answer."""
    monkeypatch.setattr(tpu, "find_machine", lambda *_: (Mock(), node))
    server = TpuVmServer()
    monkeypatch.setattr(server, "machine", lambda _: None)
    nothing: Any = None
    assert server.exists(cloud_with(), nothing) is expected


def test_a_server_that_does_not_answer_yet_says_what_its_machine_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script tries again what may pass; anything else is the end."""
    server, nothing = TpuVmServer(), cast("Any", None)
    for error_class, phase in ((ErrorClass.TRANSIENT, Phase.PENDING), (ErrorClass.CODE, Phase.RUNNING)):
        reported = CloudError(error_class, "the image cannot be pulled")
        looked = (Status(phase, "the node is being created"), None, reported)
        monkeypatch.setattr(serve, "_look", lambda *_, looked=looked: looked)
        if error_class is ErrorClass.TRANSIENT:
            assert server._ready(cloud_with(), nothing, nothing) == Waits("the image cannot be pulled")
        else:
            with pytest.raises(CloudError, match="the image cannot be pulled"):
                server._ready(cloud_with(), nothing, nothing)
    monkeypatch.setattr(serve, "_look", lambda *_: (Status(Phase.PENDING, "the node is being created"), None, None))
    assert server._ready(cloud_with(), nothing, nothing) == Waits("the node is being created")


def test_the_error_of_a_machine_that_has_ended_does_not_pass() -> None:
    error = serve._error(Status(Phase.FAILED, "the API answered 503", ErrorClass.TRANSIENT))
    assert (error.error_class, error.message) == (ErrorClass.INFRASTRUCTURE, "the API answered 503")
