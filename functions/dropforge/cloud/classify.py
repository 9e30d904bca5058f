"""From an exception of a Google client or of the Kubernetes client to an ErrorClass, a message and a hint.

The same refusal is a different exception over REST and over gRPC, and Google uses one status for refusals that differ:
the reason and the words tell them apart. tests/cloud/refusals.toml has real texts, with their sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dropforge.base.errors import CloudError, ErrorClass

_BY_STATUS = {
    "PERMISSION_DENIED": ErrorClass.PERMISSION,
    "UNAUTHENTICATED": ErrorClass.PERMISSION,
    "INVALID_ARGUMENT": ErrorClass.CONFIG,
    "FAILED_PRECONDITION": ErrorClass.CONFIG,
    "OUT_OF_RANGE": ErrorClass.CONFIG,
    "NOT_FOUND": ErrorClass.CONFIG,
    "ALREADY_EXISTS": ErrorClass.CONFIG,
    "UNIMPLEMENTED": ErrorClass.CONFIG,
    "RESOURCE_EXHAUSTED": ErrorClass.STOCKOUT,
}
_BY_HTTP = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
}
# The status of an exception that carries none: of its nearest class in this table. By name, because not every process
# imports all of these libraries. Google's clients raise the exceptions of all but httpx, which the Hugging Face Hub's
# client uses (tests/cloud/test_every_exception.py).
_BY_TYPE = {
    "builtins.ConnectionError": "UNAVAILABLE",
    "builtins.TimeoutError": "UNAVAILABLE",
    "http.client.HTTPException": "UNAVAILABLE",
    "http.client.InvalidURL": "INVALID_ARGUMENT",
    "google.auth.exceptions.GoogleAuthError": "UNAUTHENTICATED",
    "google.auth.exceptions.DefaultCredentialsError": "UNAVAILABLE",  # the metadata server did not answer in seconds
    "google.auth.exceptions.MalformedError": "INVALID_ARGUMENT",
    "google.auth.exceptions.InvalidOperation": "INVALID_ARGUMENT",
    "google.auth.exceptions.InvalidResource": "INVALID_ARGUMENT",
    "google.auth.exceptions.InvalidType": "INVALID_ARGUMENT",
    "google.auth.exceptions.InvalidValue": "INVALID_ARGUMENT",
    "google.auth.exceptions.OAuthError": "UNAVAILABLE",  # it has lost its status (google.oauth2.utils)
    "google.auth.exceptions.ResponseError": "UNAVAILABLE",
    "google.auth.exceptions.TimeoutError": "UNAVAILABLE",
    "google.auth.exceptions.TransportError": "UNAVAILABLE",
    "google.api_core.exceptions.GoogleAPIError": "UNAVAILABLE",
    "google.api_core.exceptions.AsyncRestUnsupportedParameterError": "INVALID_ARGUMENT",
    "google.api_core.exceptions.DuplicateCredentialArgs": "INVALID_ARGUMENT",
    "google.cloud.storage.exceptions.DataCorruption": "UNAVAILABLE",
    "google.cloud.storage.exceptions.InvalidPathError": "INVALID_ARGUMENT",
    "google.cloud.storage.exceptions.InvalidResponse": "UNAVAILABLE",
    "google.resumable_media.common.DataCorruption": "UNAVAILABLE",
    "google.resumable_media.common.InvalidResponse": "UNAVAILABLE",
    "google.cloud.pubsub_v1.publisher.exceptions.FlowControlLimitError": "UNAVAILABLE",
    "google.cloud.pubsub_v1.publisher.exceptions.MessageTooLargeError": "INVALID_ARGUMENT",
    "google.cloud.pubsub_v1.publisher.exceptions.PublishToPausedOrderingKeyException": "UNAVAILABLE",
    "grpc.FutureCancelledError": "UNAVAILABLE",
    "grpc.FutureTimeoutError": "UNAVAILABLE",
    "grpc.RpcError": "UNAVAILABLE",
    "httpx.TransportError": "UNAVAILABLE",
    "requests.exceptions.RequestException": "UNAVAILABLE",
    "requests.exceptions.InvalidHeader": "INVALID_ARGUMENT",
    "requests.exceptions.InvalidSchema": "INVALID_ARGUMENT",
    "requests.exceptions.InvalidURL": "INVALID_ARGUMENT",
    "requests.exceptions.MissingSchema": "INVALID_ARGUMENT",
    "requests.exceptions.StreamConsumedError": "INVALID_ARGUMENT",
    "requests.exceptions.URLRequired": "INVALID_ARGUMENT",
    "requests.exceptions.UnrewindableBodyError": "INVALID_ARGUMENT",
    "urllib3.exceptions.HTTPError": "UNAVAILABLE",
    "urllib3.exceptions.LocationValueError": "INVALID_ARGUMENT",
    "urllib3.exceptions.ProxySchemeUnsupported": "INVALID_ARGUMENT",
    "urllib3.exceptions.UnrewindableBodyError": "INVALID_ARGUMENT",
}
_SPENT = "google.api_core.exceptions.RetryError"
_HINTS = {
    ErrorClass.QUOTA: "ask for quota in this region (IAM & Admin > Quotas), or add a placement in another region",
    ErrorClass.STOCKOUT: "Google has no capacity left there now; add placements in other regions",
    ErrorClass.PERMISSION: "grant the missing role to the service account that the message names",
    ErrorClass.CONFIG: "the request itself is wrong; correct the spec or the deployment's settings",
    ErrorClass.TRANSIENT: "this is temporary; dropforge tries again",
}


class _Rule(NamedTuple):
    """What words of a refusal mean. Without a class, the status decides it; without a hint, the class does."""

    words: re.Pattern[str]
    error_class: ErrorClass | None
    hint: str = ""


def _rule(words: str, error_class: ErrorClass | None, hint: str = "") -> _Rule:
    return _Rule(re.compile(words, re.I), error_class, hint)


# The first rule whose words are in the reason or in the message decides. A text about a quota may also name a rate, and
# a text about a lack of machines may also name a quota, so the order matters.
_RULES = (
    _rule(
        r"BILLING_(DISABLED|NOT_ENABLED)|PROJECT_BILLING_NOT|accountDisabled|billing (disabled|(must|to) be enabled)"
        r"|(billing account|billing state).{0,80}(disabled|absent|not found|closed)|(absent|closed) billing account"
        r"|inactive billing|not configured billing",
        ErrorClass.CONFIG,
        "link an open billing account to the project (Billing > Account management); some minutes later, submit again",
    ),
    _rule(
        r"SERVICE_DISABLED|accessNotConfigured|API has not been used in project|\bAPI\b.{0,40} not enabled",
        ErrorClass.CONFIG,
        "enable the API that the message names (`gcloud services enable`); some minutes later, submit again",
    ),
    _rule(
        r"CONSUMER_SUSPENDED|Consumer .{0,200}has been suspended",
        None,
        "Google has suspended the project; its owners have a message with the reason and the way to appeal",
    ),
    _rule(
        r"vpcServiceControls|VPC_SERVICE_CONTROLS|SECURITY_POLICY_VIOLATED|organization's policy",
        None,
        "a policy of the organization forbids it; ask its administrators for an exception",
    ),
    _rule(
        r"constraints?/\S+",
        ErrorClass.CONFIG,
        "a policy of the organization forbids it; ask its administrators for an exception, or use another region",
    ),
    _rule(
        r"IP_SPACE_EXHAUSTED|IP space of|available private IP space",
        ErrorClass.CONFIG,
        "the subnetwork has no addresses left; give it a larger range",
    ),
    _rule(r"reservation to be in READY state|RESERVATION_NOT_READY", ErrorClass.TRANSIENT),
    _rule(
        r"RESERVATION_NOT_FOUND|reservations? .{0,200}(do(es)?|must) (not )?exist|INVALID_RESERVATION",
        ErrorClass.CONFIG,
        "correct the reservation in the spec's placement: its name, its zone, and the projects that share it",
    ),
    _rule(
        r"no more capacity|insufficient ?(reserved )?capacity|out of (resources|capacity)|stock-?out"
        r"|resource_pool_exhausted|resource_availability|RESERVATION_(CAPACITY|INCOMPATIBLE)"
        r"|not (currently )?have (enough|sufficient|available)( available)? (resources|capacity)"
        r"|not enough (resources|capacity)|no available resources|currently unavailable in the"
        r"|not provision .{0,40}in the allocated time",
        ErrorClass.STOCKOUT,
    ),
    _rule(r"limit:? [\d.]+ (in (zone|region)|globally)|dailyLimit|daily limit", ErrorClass.QUOTA),
    _rule(
        r"per (\d+ )?(minute|second)|_per_minute_|rate[ _]?limit|rate.exceeded|concurrent.operations.quota"
        r"|too (many (requests|operations|queries)|frequent)",
        ErrorClass.TRANSIENT,
    ),
    _rule(r"quota|limit exceeded|exceeded limit|max instances", ErrorClass.QUOTA),
    _rule(r"MIN_COUNT_NOT_REACHED|minimum count of \d+ VMs", ErrorClass.STOCKOUT),
    _rule(
        r"allowlist|whitelist|by invitation|not authorized to use|not available (to|for) (your |this )?project"
        r"|LOCATION_POLICY_VIOLATED|'locations/[^']+' \(or it may|location \S+ is not found or access"
        r"|contact .{0,40}to gain",
        None,
        "Google gives this only to projects that it has admitted; ask Google for access, or use another region or "
        "accelerator",
    ),
)
# Whatever such an answer says, the request was wrong or its sender unknown.
_PLAIN = frozenset({"UNAUTHENTICATED", "NOT_FOUND", "ALREADY_EXISTS", "OUT_OF_RANGE", "UNIMPLEMENTED"})
# What google.api_core puts before the message of an answer: the method and the URL of the request.
_REQUEST = re.compile(r"^[A-Z]+ https?://\S+: ")
_KUBERNETES_PERMISSION = (
    "grant the control plane's service account roles/container.developer, or roles/container.clusterViewer and a Role "
    "in the namespace"
)


def client_errors() -> tuple[type[Exception], ...]:
    """The exceptions of Google clients for a failed call: catch them and pass them to `classify`."""
    import requests
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    return GoogleAPIError, GoogleAuthError, requests.RequestException


def classify(error: Exception) -> CloudError:
    """The CloudError for an exception of a Google client or of its connection."""
    message = getattr(error, "message", None) or str(error) or repr(error)
    return classify_text(status_of(error), _REQUEST.sub("", message), _reasons(error))


def classify_create(error: Exception) -> CloudError:
    """The CloudError for the exception of a request to create something: a refusal created nothing."""
    classified = classify(error)
    classified.did_nothing = is_refusal(_http_of(error))
    return classified


def classify_first_look(error: Exception) -> CloudError:
    """The CloudError for the exception of a read before any request to create something: nothing was created."""
    classified = classify(error)
    classified.did_nothing = True
    return classified


@contextmanager
def something_may_exist() -> Iterator[None]:
    """For the calls after a first request to create something: no error of theirs says that nothing was created."""
    try:
        yield
    except CloudError as error:
        error.did_nothing = False
        raise


def kubernetes_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the Kubernetes client for a failed call: catch them and pass them to `classify_kubernetes`."""
    from google.auth.exceptions import GoogleAuthError
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    return ApiException, HTTPError, GoogleAuthError


def classify_kubernetes(error: Exception) -> CloudError:
    """The CloudError for an exception of the Kubernetes client or of its connection.

    Its 429 never means a lack of machines, which the events of a pod report. A status without an entry is temporary: an
    overloaded server, a conflict with another writer, a TLS handshake with a restarting server.
    """
    http = getattr(error, "status", None) or 0
    status = "UNAVAILABLE" if http == 429 else _BY_HTTP.get(http, "UNAVAILABLE")
    classified = classify_text(status, _kubernetes_message(error))
    if classified.error_class is ErrorClass.PERMISSION:
        classified.hint = _KUBERNETES_PERMISSION
    return classified


def classify_text(status: str, message: str, reason: str = "") -> CloudError:
    """The CloudError for a canonical status (google.rpc.Code name), its message, and its machine-readable reason."""
    rule = _rule_for(status, f"{reason}: {message}" if reason else message)
    error_class = (rule.error_class if rule else None) or _BY_STATUS.get(status, ErrorClass.TRANSIENT)
    return CloudError(error_class, message, (rule.hint if rule else "") or _HINTS.get(error_class, ""))


def status_of(error: Exception) -> str:
    """The canonical status of a client's exception, over gRPC or REST; UNAVAILABLE for a broken connection."""
    if (code := _grpc_code(error)) is not None:
        return str(code.name)
    if (status := _status_in_body(error)) is not None:
        return status
    if (http := _http_of(error)) is not None:
        return _BY_HTTP.get(http, "UNAVAILABLE")
    if getattr(error, "retryable", False):  # of google.auth
        return "UNAVAILABLE"
    caught = error.args[0] if error.args else None  # by google.auth or requests
    if isinstance(caught, Exception) and is_client_error(caught):
        return status_of(caught)
    return next(_listed(error), "UNAVAILABLE")


def is_client_error(error: Exception) -> bool:
    """Whether a client of Google's APIs, or its connection, raises such an exception."""
    return next(_listed(error), None) is not None


def is_passing(http: int) -> bool:
    """Whether the same request may succeed soon, by the HTTP status of its answer.

    That is a time-out, too many requests, or a failure of the server. 501 is none: that server never does it.
    """
    return http in (408, 429) or (http >= 500 and http != 501)


def is_refusal(http: int | None) -> bool:
    """Whether an HTTP status says that the service itself refused a request, and so did nothing.

    A time-out, a gateway that lost the answer and a failure in the middle of the work say nothing of that kind.
    """
    return http is not None and ((400 <= http < 500 and http not in (408, 499)) or http in (501, 503))


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed soon. Not after a RetryError: a client has waited for that already."""
    if not is_client_error(error) or _SPENT in _names(error):
        return False
    if _grpc_code(error) is None and (http := _http_of(error)) is not None:
        return is_passing(http)
    return classify(error).error_class not in (ErrorClass.PERMISSION, ErrorClass.CONFIG)


def _grpc_code(error: Exception) -> Any:
    """The grpc.StatusCode of an exception of google.api_core or of grpc itself; None without one."""
    code = getattr(error, "code", None)
    return getattr(error, "grpc_status_code", None) or (code() if callable(code) else None)


def _status_in_body(error: Exception) -> str | None:
    """The status that a REST API writes into its answer; None without an answer of that form."""
    try:
        return str(error.response.json()["error"]["status"])  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _http_of(error: Exception) -> int | None:
    """The HTTP status of the answer, which is with the exception or among its arguments; None without an answer."""
    response = getattr(error, "response", None)
    found = [getattr(error, "code", None), getattr(response, "status_code", None)]
    found += [getattr(argument, "status", None) for argument in error.args]
    return next((int(status) for status in found if isinstance(status, int)), None)


def _listed(error: Exception) -> Iterator[str]:
    """The statuses of the exception's classes in the table, the nearest class first."""
    return (_BY_TYPE[name] for name in _names(error) if name in _BY_TYPE)


def _names(error: Exception) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]


def _rule_for(status: str, text: str) -> _Rule | None:
    return None if status in _PLAIN else next((rule for rule in _RULES if rule.words.search(text)), None)


def _reasons(error: Exception) -> str:
    """The machine-readable reasons of a Google API's answer: of its ErrorInfo, and of older APIs' `errors`."""
    errors = getattr(error, "errors", None)
    listed = [each.get("reason") for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    return " ".join(str(reason) for reason in (getattr(error, "reason", None), *listed) if reason)


def _kubernetes_message(error: Exception) -> str:
    """The message of the API's Status object; without one, the HTTP status and reason."""
    try:
        return str(json.loads(getattr(error, "body", None) or "")["message"])
    except (KeyError, TypeError, ValueError):
        http, reason = getattr(error, "status", None), getattr(error, "reason", None)
        return f"the Kubernetes API answered {http} {reason}" if http else f"the Kubernetes API: {reason or error!r}"
