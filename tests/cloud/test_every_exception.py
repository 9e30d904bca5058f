"""Every exception that a client of Google's APIs can raise has the same class in the functions and the containers."""

from __future__ import annotations

import http.client
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import google.api_core.exceptions
import google.auth.exceptions
import google.cloud.pubsub_v1.publisher.exceptions
import google.cloud.pubsub_v1.subscriber.exceptions
import google.cloud.storage.exceptions
import google.resumable_media.common
import grpc
import pytest
import requests.exceptions
import urllib3.exceptions

from containers.common.errors import classify as in_containers
from dropforge.base.errors import ErrorClass
from dropforge.cloud.classify import classify, is_client_error, may_pass

MODULES = (
    google.api_core.exceptions,
    google.auth.exceptions,
    google.cloud.pubsub_v1.publisher.exceptions,
    google.cloud.pubsub_v1.subscriber.exceptions,
    google.cloud.storage.exceptions,
    google.resumable_media.common,
    grpc,
    http.client,
    requests.exceptions,
    urllib3.exceptions,
)
PASSES, PERMISSION, CONFIG = "passes", ErrorClass.PERMISSION, ErrorClass.CONFIG
# The reactions that differ from "passes", by the qualified name of the class; of a call, not of a whole attempt.
FINAL = {
    "google.api_core.exceptions": {
        PERMISSION: "Forbidden PermissionDenied Unauthenticated Unauthorized",
        CONFIG: "AlreadyExists AsyncRestUnsupportedParameterError BadRequest DuplicateCredentialArgs "
        "FailedPrecondition InvalidArgument MethodNotAllowed MethodNotImplemented NotFound OutOfRange",
    },
    "google.auth.exceptions": {
        PERMISSION: "ClientCertError GoogleAuthError MutualTLSChannelError ReauthFailError "
        "ReauthSamlChallengeFailError RefreshError UserAccessTokenError",
        CONFIG: "InvalidOperation InvalidResource InvalidType InvalidValue MalformedError",
    },
    "google.cloud.pubsub_v1.publisher.exceptions": {CONFIG: "MessageTooLargeError"},
    "google.cloud.storage.exceptions": {CONFIG: "InvalidPathError"},
    "http.client": {CONFIG: "InvalidURL"},
    "requests.exceptions": {
        CONFIG: "InvalidHeader InvalidProxyURL InvalidSchema InvalidURL MissingSchema StreamConsumedError URLRequired "
        "UnrewindableBodyError",
    },
    "urllib3.exceptions": {
        CONFIG: "LocationParseError LocationValueError ProxySchemeUnknown ProxySchemeUnsupported URLSchemeUnknown "
        "UnrewindableBodyError",
    },
}
# Temporary failures for which the same call is not repeated: a client has waited, another writer was first, or the
# request must change. The run, or its next attempt, begins the work anew.
NOT_REPEATED = {
    "google.api_core.exceptions": "Conflict LengthRequired MovedPermanently NotModified "
    "PreconditionFailed RequestRangeNotSatisfiable ResumeIncomplete RetryError TemporaryRedirect",
}


def exceptions() -> Iterator[type[Exception]]:
    for module in MODULES:
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Exception) and not issubclass(kind, Warning) and kind.__module__ == module.__name__:
                yield kind


def made(kind: type[Exception]) -> Exception:
    """An exception of a class. Those of google.api_core have one constructor; the arguments of others all differ."""
    if kind.__module__ == google.api_core.exceptions.__name__:
        return kind("what happened", *([None] if kind.__name__ == "RetryError" else []))
    says = {"__init__": lambda self: None, "__str__": lambda self: "what happened", "__repr__": lambda self: "what"}
    error: Exception = type(kind.__name__, (kind,), {**says, "message": "what happened"})()
    return error


def expected(kind: type[Exception]) -> object:
    for error_class, names in FINAL.get(kind.__module__, {}).items():
        if kind.__name__ in names.split():
            return error_class
    return PASSES


def name_of(kind: type[Exception]) -> str:
    return f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize("kind", list(exceptions()), ids=name_of)
def test_an_exception_has_the_same_class_in_functions_and_containers(kind: type[Exception]) -> None:
    error = made(kind)
    assert is_client_error(error)
    found, theirs = classify(error).error_class, in_containers(error).error_class
    if found is ErrorClass.STOCKOUT:  # 429: a function asks for machines, and a container never does
        assert getattr(error, "code", None) == 429
        found = ErrorClass.TRANSIENT
    assert theirs is found
    assert (PASSES if found is ErrorClass.TRANSIENT else found) == expected(kind)


@pytest.mark.parametrize("kind", list(exceptions()), ids=name_of)
def test_a_call_is_repeated_if_its_failure_may_pass(kind: type[Exception]) -> None:
    is_spent = kind.__name__ in NOT_REPEATED.get(kind.__module__, "").split()
    assert may_pass(made(kind)) is (expected(kind) == PASSES and not is_spent)


def test_the_lists_name_classes_that_exist() -> None:
    names = {name_of(kind) for kind in exceptions()}
    listed = {f"{module}.{name}" for module, by in FINAL.items() for all in by.values() for name in all.split()}
    listed |= {f"{module}.{name}" for module, all in NOT_REPEATED.items() for name in all.split()}
    assert listed <= names
    assert len(names) > 120


def response(status: int) -> requests.Response:
    answered = requests.Response()
    answered.status_code = status
    answered._content = b"<html>"
    return answered


AUTH, STORAGE = google.auth.exceptions, google.cloud.storage.exceptions
DETAILS: list[tuple[Exception, object]] = [
    (AUTH.RefreshError("access answered 503", retryable=True), PASSES),
    (AUTH.RefreshError("access answered 403", retryable=False), PERMISSION),
    # google.auth.compute_engine: the metadata server failed, refused, or was not reached
    (AUTH.RefreshError(AUTH.TransportError("answered 503", SimpleNamespace(status=503))), PASSES),
    (AUTH.RefreshError(AUTH.TransportError("answered 403", SimpleNamespace(status=403))), PERMISSION),
    (AUTH.RefreshError(AUTH.TransportError(requests.ConnectionError("refused"))), PASSES),
    (AUTH.TransportError(requests.exceptions.InvalidURL("http:///")), CONFIG),
    (AUTH.MutualTLSChannelError(OSError("no certificate")), PERMISSION),
    (STORAGE.InvalidResponse(response(503), "not 200"), PASSES),
    (STORAGE.InvalidResponse(response(429), "not 200"), PASSES),
    (STORAGE.InvalidResponse(response(403), "not 200"), PERMISSION),
    (requests.HTTPError("408", response=response(408)), PASSES),
    (requests.HTTPError("401", response=response(401)), PERMISSION),
    (requests.HTTPError("501", response=response(501)), CONFIG),
    (ConnectionResetError("reset"), PASSES),
    (TimeoutError("slow"), PASSES),
]


@pytest.mark.parametrize(("error", "reaction"), DETAILS, ids=[repr(error) for error, _ in DETAILS])
def test_what_an_exception_carries_decides(error: Exception, reaction: object) -> None:
    assert may_pass(error) is (reaction == PASSES)
    found = in_containers(error).error_class
    assert (PASSES if found is ErrorClass.TRANSIENT else found) == reaction


class Refusal(grpc.RpcError):
    def __init__(self, code: Any) -> None:
        super().__init__()
        self._code = code

    def code(self) -> Any:
        return self._code


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_an_error_of_grpc_has_the_class_of_its_code(code: Any) -> None:
    wrapped = google.api_core.exceptions.from_grpc_status(code, "what happened")
    assert classify(Refusal(code)).error_class is classify(wrapped).error_class


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("x"), OSError("no space left"), MemoryError()])
def test_no_other_error_is_of_a_client(error: Exception) -> None:
    assert not is_client_error(error)
    assert not may_pass(error)
