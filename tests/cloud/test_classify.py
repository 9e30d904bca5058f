from __future__ import annotations

from typing import Any

import pytest
import requests
from google.api_core import exceptions

from dropforge.base.errors import ErrorClass
from dropforge.cloud.classify import classify, status_of


def over_rest(http: int, status: str, message: str) -> exceptions.GoogleAPICallError:
    response = requests.Response()
    response.status_code = http
    response._content = f'{{"error": {{"code": {http}, "message": "{message}", "status": "{status}"}}}}'.encode()
    error: exceptions.GoogleAPICallError = exceptions.from_http_status(http, message, response=response)
    return error


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
