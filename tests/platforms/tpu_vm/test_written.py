"""A machine's status file, which the container beside the startup script may write as well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.platforms.tpu_vm.written import MAX_MESSAGE, MAX_STATUS_BYTES, read_written
from dropforge.run.proof import with_proof

from ...deployments import Memory, cloud_with

RUN = "job-0123456789ab"
NAME = names.machine_object(RUN, 1, "status.json")
STATUS = {
    "run": RUN,
    "attempt": 1,
    "time": "2026-11-22T12:00:00+00:00",
    "step": "container",
    "exit_code": 1,
    "error_class": "code",
    "message": "the container failed",
}


def read(content: bytes | None, key: str = "") -> tuple[Any, list[str]]:
    """Return what the control plane reads of that content, and what it logs."""
    storage, logged = Memory(), list[str]()
    if content is not None:
        storage.objects[NAME] = (content, 1)
    cloud = cloud_with(storage=storage, write=lambda message, **_: logged.append(message))
    return read_written(cloud, "runs", NAME, RUN, 1, key), logged


def test_a_status_without_the_proof_of_its_run_is_none() -> None:
    key, other = "k" * 64, "o" * 64
    assert read(with_proof(key, NAME, STATUS), key)[0] is not None
    for forged in (json.dumps(STATUS).encode(), with_proof(other, NAME, STATUS), with_proof(key, "machines/x", STATUS)):
        written, [logged] = read(forged, key)
        assert (written, logged) == (None, "a machine's status is not readable")


def test_the_status_of_the_startup_script_is_read() -> None:
    written, logged = read(json.dumps(STATUS).encode())
    assert (written.error_class, written.exit_code, written.message) == (ErrorClass.CODE, 1, "the container failed")
    assert logged == []
    assert read(None) == (None, [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 60_000,
        json.dumps({**STATUS, "error_class": "none of ours"}).encode(),
        json.dumps({**STATUS, "time": "yesterday"}).encode(),
        json.dumps({**STATUS, "time": "2026-11-22T12:00:00"}).encode(),  # no comparison with a time in a zone
        json.dumps({**STATUS, "exit_code": "1e999"}).encode(),
        json.dumps({**STATUS, "exit_code": float("inf")}).encode(),
        json.dumps({**STATUS, "message": 7}).encode(),
        json.dumps({**STATUS, "message": "\ud800"}).encode(),
        json.dumps({**STATUS, "run": "other-0123456789ab"}).encode(),
        json.dumps({**STATUS, "attempt": 2}).encode(),
    ],
)
def test_any_other_text_counts_as_no_status_and_is_logged(content: bytes) -> None:
    assert read(content) == (None, ["a machine's status is not readable"])


def test_a_long_message_is_cut() -> None:
    written, _ = read(json.dumps({**STATUS, "message": "x" * 50_000}).encode())
    assert len(written.message) == MAX_MESSAGE < MAX_STATUS_BYTES
