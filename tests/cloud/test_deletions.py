"""Deletions that take long, and deletions of what another call deletes already."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from google.api_core.exceptions import Aborted, FailedPrecondition, NotFound, PermissionDenied
from google.cloud import container_v1, tpu_v2

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import kubernetes, tpu

from ..deployments import TestClock, cloud_with

JOB = "projects/p/locations/us-central1/clusters/c/k8s/namespaces/df/batch/jobs/df-demo-0123456789ab-a1"
ZONE = "projects/p/locations/us-west4-a"
MACHINES = {tpu.QUEUED: f"{ZONE}/queuedResources/q", tpu.NODE: f"{ZONE}/nodes/n"}


class SlowApi:
    """A cluster's API in which a look takes longer than a function waits for a deletion, and an object stays."""

    def __init__(self) -> None:
        self.seconds, self.deleted = 0.0, list[tuple[str, str]]()

    def get(self, name: str) -> dict[str, Any]:
        self.seconds += kubernetes.GONE_WAIT_SECONDS + 1
        return {"metadata": {"name": name, "uid": "u-1"}}

    def delete(self, name: str, uid: str) -> None:
        self.deleted.append((name, uid))


def test_a_deletion_starts_even_if_the_first_look_takes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each call of a slow cluster would end before it deletes anything, and the object would stay."""
    api, clock = SlowApi(), TestClock()
    monkeypatch.setattr(clock, "monotonic", lambda: api.seconds)
    cluster = container_v1.Cluster(status="RUNNING", endpoint="192.0.2.1")
    monkeypatch.setattr(kubernetes, "find_cluster", lambda *_: cluster)
    monkeypatch.setattr(kubernetes, "connect", lambda *_: api)
    assert kubernetes.delete(replace(cloud_with(), clock=clock), JOB) is False
    assert api.deleted == [(JOB, "u-1")]


def machines(refusal: Exception) -> Any:
    """The client of a machine that exists and is ready at each look, and whose deletion is refused."""
    refused = Mock(side_effect=refusal)
    return SimpleNamespace(
        get_queued_resource=lambda **_: tpu_v2.QueuedResource(state={"state": "ACTIVE"}),
        get_node=lambda **_: tpu_v2.Node(state="READY"),
        delete_queued_resource=refused,
        delete_node=refused,
    )


@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("refusal", [NotFound, FailedPrecondition, Aborted])
def test_a_machine_that_another_call_deletes_is_waited_for(kind: str, refusal: type[Exception]) -> None:
    """The other deletion began between the look and the request."""
    assert tpu.delete(cloud_with(tpu=machines(refusal("it is being deleted"))), kind, MACHINES[kind]) is False


@pytest.mark.parametrize("kind", MACHINES)
def test_a_machine_that_may_not_be_deleted_is_an_error(kind: str) -> None:
    with pytest.raises(CloudError) as refused:
        tpu.delete(cloud_with(tpu=machines(PermissionDenied("no"))), kind, MACHINES[kind])
    assert refused.value.error_class is ErrorClass.PERMISSION
