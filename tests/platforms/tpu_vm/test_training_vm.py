"""Serving on the TPU VM that trained, stage by stage: provision, inspect, deploy, teardown, sweep, cancel."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from tests.patience import PATIENCE_SECONDS, until

from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.base.errors import RetryLater
from dropforge.cloud.disks import DISK
from dropforge.run.artifacts import Manifest, write_manifest
from dropforge.run.record import RunState

from ...deployments import clients, here
from ...stage_calls import cancel, inspect, provision, sweep, teardown
from ..shared import ME, eventually, is_there, make_run
from .test_serve import IMAGES, ZONE, Cloud, cloud, running, spec

__all__ = ["cloud", "running"]
URL = "http://127.0.0.1:1/callback"


def train(cloud: Cloud, image: str = "serve-noop", target: dict[str, Any] | None = None) -> str:
    """Train a run with its own container and the startup script until it succeeds; return its id."""
    images = {"SERVE_VLLM_TPU_IMAGE": f"{IMAGES}/{image}:test", "TRAIN_MAXTEXT_IMAGE": f"{IMAGES}/train-x:test"}
    os.environ.update({f"DROPFORGE_{name}": value for name, value in images.items()})
    here.cache_clear()
    parts = {
        **spec(),
        "training": {"adapter": {"type": "none"}},
        "target": {"type": "tpu_vm", "placements": [{"zone": ZONE}], **(target or {})},
        "serve": {"type": "training_vm", "ttl": "1h"},
    }
    run = make_run(cloud.store, parts, RunState.PROVISIONING)
    assert eventually(lambda: provision(run, ME, 1))["status"] == "RUNNING"
    until(lambda: names.machine_object(run, 1, "status.json") in cloud.store.names(f"{names.MACHINES_PREFIX}{run}/"))
    bucket = cloud.store.bucket
    write_manifest(bucket.client, bucket.name, manifest(run), cloud.store.key(run))
    answer = eventually(lambda: inspect(run, ME, 1, URL))
    assert (answer["status"], answer["serve"]) == ("SUCCEEDED", True)
    return run


def manifest(run: str) -> Manifest:
    source = {"uri": "noop", "revision": "main"}
    return Manifest.model_validate(
        {
            "run": run,
            "attempt": 1,
            "created": utc_now(),
            "base": source,
            "dataset": source,
            "spec_sha256": "0" * 64,
            "serve_path": "attempt-1/model",
            "metrics": {},
            "files": [],
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("queued", [True, False], ids=["queued", "at-once"])
def test_the_training_vm_serves_outlives_its_run_and_is_swept(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    run = train(cloud, target={"queued": queued})
    machines = ["queued", "node"] if queued else ["node"]
    assert teardown(run, ME, 1, True)["status"] == "GONE"  # as the workflow does before it deploys
    answer = cloud.deploy(run)
    assert answer["status"] == "READY", answer
    assert cloud.exists(run) == machines
    record = cloud.store.record(run)
    assert record.endpoint
    assert record.endpoint.service.endswith(f"/{'queuedResources' if queued else 'nodes'}/df-{run}-a1")
    assert record.endpoint.region == ZONE
    node = clients.tpu().get_node(name=f"projects/p1/locations/{ZONE}/nodes/df-{run}-a1")
    assert node.service_account.email == "trainer@p1.iam.gserviceaccount.com"
    latest = record.attempts[0].deadline + timedelta(minutes=30, hours=1)
    assert node.labels[names.EXPIRES_LABEL] == str(int(latest.timestamp()))

    for scope in (1, "run"):
        assert eventually(lambda scope=scope: teardown(run, ME, scope, True))["status"] == "GONE"  # type: ignore[misc]
    cloud.store.update(run, lambda record: record.entered(RunState.SUCCEEDED, utc_now()))
    assert sweep()["deleted"] == []  # it has not expired
    assert is_there(cloud.store, run)
    assert cloud.exists(run) == machines
    assert {entry.kind for entry in cloud.store.ledger(run).remaining()} > {DISK}
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + timedelta(hours=2))
    assert sweep()["deleted"]
    assert cloud.exists(run) == []
    assert not is_there(cloud.store, run)
    until(lambda: sweep() and cloud.store.ledger(run).remaining() == [])
    ended = cloud.store.record(run).endpoint
    assert ended
    assert ended.ended


def test_the_cancel_of_an_endpoint_deletes_machine_and_disk(cloud: Cloud) -> None:
    run = train(cloud)
    assert cloud.deploy(run)["status"] == "READY"
    assert eventually(lambda: teardown(run, ME, "run", True))["status"] == "GONE"
    cloud.store.update(run, lambda record: record.entered(RunState.SUCCEEDED, utc_now()))

    def is_ended() -> bool:
        try:
            cancel(run)
        except RetryLater:
            return False
        return True

    until(is_ended)
    assert cloud.exists(run) == []
    assert cloud.store.ledger(run).remaining() == []


@pytest.mark.parametrize(
    ("image", "expected", "text"),
    [
        ("serve-missing", "config", "serve-missing:test does not exist"),
        pytest.param(*("serve-crash", "code", "\nthe weights do not fit"), marks=pytest.mark.slow),
    ],
    ids=["no-image", "crash"],
)
def test_the_reason_that_the_endpoint_does_not_answer_is_reported(
    cloud: Cloud, image: str, expected: str, text: str
) -> None:
    run = train(cloud, image)
    answer = cloud.deploy(run)
    assert (answer["status"], answer["error"]["error_class"]) == ("FAILED", expected), answer
    assert text in answer["error"]["message"]
    cloud.clean_up(run)


@pytest.mark.parametrize(("loss", "expected"), [("preempted", "preempted"), ("deleted", "infrastructure")])
def test_a_machine_that_is_lost_before_it_serves_is_not_created_again(cloud: Cloud, loss: str, expected: str) -> None:
    run = train(cloud, target={"placements": [{"zone": ZONE, "capacity": "spot"}], "queued": loss == "preempted"})
    node = f"projects/p1/locations/{ZONE}/nodes/df-{run}-a1"
    if loss == "preempted":
        cloud.faults(preempt=node)
    else:
        clients.tpu().delete_node(name=node).result(timeout=PATIENCE_SECONDS)
    with patch.dict(os.environ, {"DROPFORGE_SERVE_VLLM_TPU_IMAGE": f"{IMAGES}/serve-deaf:test"}):
        answer = cloud.deploy(run)
    assert (answer["status"], answer["error"]["error_class"]) == ("FAILED", expected), answer
    assert answer["error"]["hint"]
    cloud.clean_up(run)
