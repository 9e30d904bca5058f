from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import requests
from google.api_core import exceptions

from dropforge.base.errors import ErrorClass
from dropforge.cloud.classify import classify, classify_create, classify_text, status_of

REFUSALS = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))["refusal"]
URL = "https://run.googleapis.com/v2/projects/p/locations/us-central1/jobs?jobId=j&%24alt=json%3Benum-encoding%3Dint"


def over_rest(http: int, status: str, message: str, **more: Any) -> exceptions.GoogleAPICallError:
    """The exception of a Google client for an answer of a REST API; `more` is part of the answer's error, too."""
    response = requests.Response()
    response.status_code = http
    response.request = requests.Request("POST", URL).prepare()
    response._content = json.dumps({"error": {"code": http, "message": message, "status": status, **more}}).encode()
    error: exceptions.GoogleAPICallError = exceptions.from_http_response(response)
    return error


@pytest.mark.parametrize("row", REFUSALS, ids=[row["text"] for row in REFUSALS])
def test_a_refusal_in_the_words_of_google_has_its_class_and_its_remedy(row: dict[str, str]) -> None:
    classified = classify_text(row["status"], row["text"], row.get("reason", ""))
    assert classified.error_class == row["class"]
    assert row.get("hint", "") in classified.hint
    assert classified.message == row["text"]


def test_the_table_of_refusals_names_a_source_for_each_text() -> None:
    assert len(REFUSALS) >= 60
    assert len({row["text"] for row in REFUSALS}) == len(REFUSALS)
    assert all(row["source"] for row in REFUSALS)


def test_a_reason_tells_more_than_the_words() -> None:
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "SERVICE_DISABLED",
        "domain": "googleapis.com",
    }
    assert classify(over_rest(403, "PERMISSION_DENIED", "no", details=[info])).error_class is ErrorClass.CONFIG
    older = [{"message": "no", "domain": "usageLimits", "reason": "rateLimitExceeded"}]
    assert classify(over_rest(403, "PERMISSION_DENIED", "no", errors=older)).error_class is ErrorClass.TRANSIENT


def test_a_message_begins_with_the_words_of_the_cloud() -> None:
    error = over_rest(503, "UNAVAILABLE", "The service is currently unavailable.")
    assert error.message.startswith("POST https://")
    assert classify(error).message == "The service is currently unavailable."


CASES: list[tuple[Any, ErrorClass]] = [
    (over_rest(429, "RESOURCE_EXHAUSTED", "Quota exceeded for total allowable GPUs"), ErrorClass.QUOTA),
    (over_rest(400, "FAILED_PRECONDITION", "You do not have quota for using GPUs"), ErrorClass.QUOTA),
    (over_rest(429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone"), ErrorClass.STOCKOUT),
    (over_rest(429, "RESOURCE_EXHAUSTED", "Quota exceeded: 60 writes per minute"), ErrorClass.TRANSIENT),
    (over_rest(403, "PERMISSION_DENIED", "Permission run.jobs.create denied"), ErrorClass.PERMISSION),
    (
        over_rest(403, "PERMISSION_DENIED", "Quota exceeded for quota metric 'Queries' and limit 'per minute'"),
        ErrorClass.TRANSIENT,
    ),
    (over_rest(400, "INVALID_ARGUMENT", "unknown field"), ErrorClass.CONFIG),
    (over_rest(409, "ABORTED", "the resource is being changed"), ErrorClass.TRANSIENT),
    (over_rest(503, "UNAVAILABLE", "try again"), ErrorClass.TRANSIENT),
    (exceptions.ResourceExhausted("Insufficient reserved capacity"), ErrorClass.STOCKOUT),
    (exceptions.PermissionDenied("no"), ErrorClass.PERMISSION),
    (exceptions.DeadlineExceeded("slow"), ErrorClass.TRANSIENT),
    (requests.ConnectionError("refused"), ErrorClass.TRANSIENT),
]


@pytest.mark.parametrize(("error", "expected"), CASES)
def test_the_class_is_the_same_over_rest_and_grpc(error: Exception, expected: ErrorClass) -> None:
    classified = classify(error)
    assert classified.error_class is expected
    assert classified.message


def test_the_status_is_read_from_the_body_if_the_exception_has_none() -> None:
    assert status_of(over_rest(409, "ABORTED", "x")) == "ABORTED"
    assert status_of(over_rest(409, "ALREADY_EXISTS", "x")) == "ALREADY_EXISTS"


def test_an_error_answer_of_a_proxy_has_a_class() -> None:
    response = requests.Response()
    response.status_code = 502
    response._content = b"<html>bad gateway</html>"
    assert classify(exceptions.from_http_status(502, "bad", response=response)).error_class is ErrorClass.TRANSIENT


@pytest.mark.parametrize(
    ("error", "did_nothing"),
    [
        (over_rest(403, "PERMISSION_DENIED", "no"), True),
        (over_rest(429, "RESOURCE_EXHAUSTED", "no"), True),
        (over_rest(503, "UNAVAILABLE", "no"), True),
        (over_rest(500, "INTERNAL", "an internal error"), False),
        (over_rest(502, "UNAVAILABLE", "bad gateway"), False),
        (over_rest(504, "DEADLINE_EXCEEDED", "slow"), False),
        (over_rest(408, "DEADLINE_EXCEEDED", "slow"), False),
        (requests.ReadTimeout("timed out"), False),
        (requests.ConnectionError("reset"), False),
    ],
)
def test_only_an_answer_of_the_service_itself_proves_that_a_create_did_nothing(
    error: Exception, did_nothing: bool
) -> None:
    assert classify_create(error).did_nothing is did_nothing
    assert classify(error).did_nothing is False
