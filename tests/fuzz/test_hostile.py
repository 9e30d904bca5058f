"""Inputs that are made to crash or to exhaust a function: each is rejected or acknowledged, like other bad input."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import pytest

from dropforge.base import names
from dropforge.run.record import RunState
from dropforge.spec import MAX_SPEC_BYTES

from ..deployments import clients
from .conftest import EVENT, SPECS, App

RUN = {"run": "job-0123456789ab", "execution": "e-1"}
HUGE = b"[" + b"[]," * 3_300_000 + b"[]]"  # 9.9 MB, a little below the limit of Pub/Sub
MOST_MIB = 80  # of Python's objects: the envelope of that message in base64, as text and as bytes, and its data


def rejected(app: App, outcome: tuple[int, Any]) -> str:
    """Check that a spec was rejected as any other bad spec is, and return what people were told."""
    status, record = outcome
    assert status == 200
    assert record is not None, "the submitter is told nothing"
    assert record.state is RunState.REJECTED
    assert app.store.read(names.errors_object(record.run)).data
    assert app.executions(record.run) == 0
    return json.dumps(record.problems)


@pytest.mark.parametrize(
    "document",
    [
        b'{"name": "\\ud800"}',
        b'{"name": "\\udc00\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"name": "ok", "labels": {"a": "\\ud83d"}}',
        b'{"name": {"\\ud800": []}}',
    ],
)
def test_half_a_character_is_a_problem_of_the_spec(app: App, document: bytes) -> None:
    """One such file was once submitted again for seven days, because its rejection could not be written."""
    for outcome in (app.upload(document), app.message("on_spec_message", document)):
        assert "half of a surrogate pair" in rejected(app, outcome)


@pytest.mark.parametrize(
    "document",
    [
        b'{"limits": {"max_cost_usd": Infinity}}',
        b'{"limits": {"max_cost_usd": NaN}}',
        b'{"limits": {"max_cost_usd": 1e999}}',
        b'{"training": {"seed": ' + b"9" * 5000 + b"}}",
        b'{"training": {"epochs": ' + b"9" * 400 + b"}}",
        b'{"limits": {"max_attempts": 3.0e0}}',
        b"[" * 100_000,
        b"\x1f\x8b\x08 no gzip",
        gzip.compress(b"{}", mtime=0),  # otherwise the id of the case differs between processes
    ],
    ids=lambda document: repr(document[:40]),
)
def test_numbers_and_nesting_beyond_json_are_problems_of_the_spec(app: App, document: bytes) -> None:
    for outcome in (app.upload(document), app.message("on_spec_message", document)):
        rejected(app, outcome)


def test_the_largest_message_is_refused_before_it_is_parsed(app: App) -> None:
    """Parsed, this message takes more memory than a function has, twice."""
    tracemalloc.start()
    try:
        outcome = app.message("on_spec_message", HUGE)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "too large" in rejected(app, outcome)
    assert most < MOST_MIB * 2**20
    assert app.message("on_job_event", HUGE)[0] == 200


def test_an_upload_that_grows_when_it_is_decompressed_is_refused(app: App) -> None:
    name = "specs/bomb.json"
    blob = clients.storage().bucket(SPECS).blob(name)
    blob.content_encoding = "gzip"
    blob.upload_from_string(gzip.compress(b" " * 50_000_000 + b"{}"))
    assert blob.size < MAX_SPEC_BYTES
    body = {"bucket": SPECS, "name": name, "generation": str(blob.generation), "size": str(blob.size)}
    status = app.post("on_spec_uploaded", body, {"Content-Type": "application/json", **EVENT})
    run = names.run_id_of_object(SPECS, name, blob.generation)
    assert "too large" in rejected(app, (status, app.store.find(run)))


@pytest.mark.parametrize("name", ["on_spec_message", "on_job_event"])
@pytest.mark.parametrize(
    "change",
    [
        {"attributes": {"idempotency_key": "\ud800"}},
        {"attributes": {"\ud800": "x"}},
        {"messageId": "\ud800"},
        {"data": "A" * 20_000_000},
    ],
    ids=lambda change: repr(change)[:40],
)
def test_an_envelope_that_cannot_be_stored_is_acknowledged(app: App, name: str, change: dict[str, Any]) -> None:
    body = {"message": {"data": "e30=", "messageId": "1", "attributes": {}, **change}}
    assert app.post(name, body, {"Content-Type": "application/json", **EVENT}) == 200


@pytest.mark.parametrize("bucket", ["specs/a.json", "a", "../b", "b?x=1", "", "B-B-B", "b" * 300])
def test_a_bucket_that_cannot_exist_is_acknowledged(app: App, bucket: str) -> None:
    """A slash in the name once made another URL of the request, whose answer was an unhandled exception."""
    body = {"bucket": bucket, "name": "specs/a.json", "generation": "1", "size": "1"}
    for name in ("on_spec_uploaded", "on_spec_deleted"):
        assert app.post(name, body, {"Content-Type": "application/json", **EVENT}) == 200


def test_the_name_of_an_object_that_is_no_text_is_acknowledged(app: App) -> None:
    body = {"bucket": SPECS, "name": "specs/\ud800.json", "generation": "1", "size": "1"}
    for name in ("on_spec_uploaded", "on_spec_deleted"):
        assert app.post(name, body, {"Content-Type": "application/json", **EVENT}) == 200


@pytest.mark.parametrize("attempt", ["Infinity", "-Infinity", "NaN", "1e999", "1.5", "-1", "true", '"1"', "9" * 4000])
@pytest.mark.parametrize("stage", ["provision", "inspect"])
def test_an_attempt_that_is_no_number_is_a_bad_request(app: App, stage: str, attempt: str) -> None:
    body = json.dumps({**RUN, "callback_url": "http://127.0.0.1:1/", "attempt": 0}).replace(" 0}", f" {attempt}}}")
    assert app.post(stage, body.encode()) == 400


@pytest.mark.parametrize("stage", ["provision", "inspect", "deploy", "teardown", "rollout", "sweep"])
def test_a_request_larger_than_any_of_the_workflow_is_not_parsed(app: App, stage: str) -> None:
    assert app.post(stage, json.dumps({**RUN, "filler": "x" * 2_000_000}).encode()) == 400
