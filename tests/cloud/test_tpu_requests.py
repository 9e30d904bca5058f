"""What a failed call for a TPU VM says: only a refusal, or no request at all, proves that there is no machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import GatewayTimeout, NotFound, ServiceUnavailable

from dropforge.base.errors import CloudError
from dropforge.cloud.tpu import Machine, ensure

from ..deployments import cloud_with, settings_with
from ..stages.test_promises import NOW

ZONE = "projects/p/locations/us-west4-a"


def machine(queued: bool) -> Machine:
    return Machine(
        settings=settings_with(),
        run="demo-0123456789ab",
        node=f"{ZONE}/nodes/n",
        queued=f"{ZONE}/queuedResources/n" if queued else "",
        accelerator_type="v5litepod-8",
        runtime_version="v2-alpha-tpuv5-lite",
        capacity="on_demand",
        reservation=None,
        wait_seconds=60,
        use_seconds=60,
        service_account="trainer@p.iam.gserviceaccount.com",
        labels={},
        metadata={},
    )


class Tpu:
    """The client of Cloud TPU: each call takes the next of its answers; without one, nothing exists."""

    def __init__(self, reads: list[Exception], creation: Exception | None) -> None:
        self.reads, self.creation = reads, creation

    def get(self, **_: Any) -> Any:
        raise self.reads.pop(0) if self.reads else NotFound("it does not exist")

    get_queued_resource = get_node = get

    def create(self, **_: Any) -> None:
        if self.creation:
            raise self.creation

    create_queued_resource = create_node = create

    def list_operations(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(operations=[], next_page_token="")


DOWN, LOST, ABSENT = ServiceUnavailable("down"), GatewayTimeout("lost"), NotFound("it does not exist")


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize(
    ("reads", "creation", "did_nothing"),
    [
        ([DOWN], None, True),  # nothing was requested
        ([LOST], None, True),
        ([], DOWN, True),  # refused
        ([], LOST, False),
    ],
)
def test_a_failed_request_did_nothing_unless_its_answer_was_lost(
    reads: list[Exception], creation: Exception | None, did_nothing: bool, queued: bool
) -> None:
    cloud = cloud_with(settings_with(), NOW, lambda *_, **__: None, tpu=Tpu(list(reads), creation))
    with pytest.raises(CloudError) as raised:
        ensure(cloud, machine(queued))
    assert raised.value.did_nothing is did_nothing


def test_a_look_after_a_request_says_nothing_about_the_request() -> None:
    cloud = cloud_with(settings_with(), NOW, lambda *_, **__: None, tpu=Tpu([ABSENT, DOWN], None))
    with pytest.raises(CloudError) as raised:
        ensure(cloud, machine(queued=True))
    assert raised.value.did_nothing is False
