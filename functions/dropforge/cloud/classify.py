"""From an exception of a Google client or of the Kubernetes client to an ErrorClass, a message and a hint.

The same refusal is a different exception over REST and over gRPC. Quota and stock-out share status codes: the text
tells them apart (reference: the errors that other schedulers match).
"""

from __future__ import annotations

import json
import re
from typing import Any

from dropforge.base.errors import CloudError, ErrorClass

_RATE = re.compile(r"per (minute|second)|rate ?limit|too many requests", re.I)
_QUOTA = re.compile(r"quota|limit exceeded|max instances", re.I)
_STOCKOUT = re.compile(
    r"no more capacity|insufficient (reserved )?capacity|out of resources|stock-?out|resource_pool_exhausted", re.I
)

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
# Compute Engine answers 403 (https://cloud.google.com/compute/docs/api-rate-limits).
_MAY_BE_RATE = frozenset({"RESOURCE_EXHAUSTED", "ABORTED", "PERMISSION_DENIED"})
_MAY_BE_QUOTA = frozenset({"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "PERMISSION_DENIED"})
_BY_HTTP = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
_HINTS = {
    ErrorClass.QUOTA: "ask for quota in this region (IAM & Admin > Quotas), or add a placement in another region",
    ErrorClass.STOCKOUT: "Google has no capacity left there now; add placements in other regions",
    ErrorClass.PERMISSION: "grant the missing role to the service account that the message names",
    ErrorClass.CONFIG: "the request itself is wrong; correct the spec or the deployment's settings",
    ErrorClass.TRANSIENT: "this is temporary; dropforge tries again",
}
# The Kubernetes API: its 429 never means a lack of machines, which the events of a pod report. A status that is not in
# this map is temporary: an overloaded server, a conflict with another writer, a TLS handshake with a restarting server.
_BY_KUBERNETES = {
    **_BY_HTTP,
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
}
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
    return classify_text(status_of(error), getattr(error, "message", None) or str(error) or repr(error))


def kubernetes_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the Kubernetes client for a failed call: catch them and pass them to `classify_kubernetes`."""
    from google.auth.exceptions import GoogleAuthError
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    return ApiException, HTTPError, GoogleAuthError


def classify_kubernetes(error: Exception) -> CloudError:
    """The CloudError for an exception of the Kubernetes client or of its connection."""
    http = getattr(error, "status", None)
    classified = classify_text(_BY_KUBERNETES.get(http or 0, "UNAVAILABLE"), _kubernetes_message(error))
    if classified.error_class is ErrorClass.PERMISSION:
        classified.hint = _KUBERNETES_PERMISSION
    return classified


def classify_text(status: str, message: str) -> CloudError:
    """The CloudError for a canonical status (google.rpc.Code name) and its message."""
    error_class = _class_of(status, message)
    return CloudError(error_class, message, _HINTS.get(error_class, ""))


def status_of(error: Exception) -> str:
    """The canonical status of a client's exception, over gRPC or REST; UNAVAILABLE for a broken connection."""
    code: Any = getattr(error, "grpc_status_code", None)
    if code is not None:
        return str(code.name)
    response: Any = getattr(error, "response", None)
    try:
        return str(response.json()["error"]["status"])
    except (AttributeError, KeyError, TypeError, ValueError):
        http: Any = getattr(error, "code", None)
        return _BY_HTTP.get(http, "RESOURCE_EXHAUSTED" if http == 429 else "UNAVAILABLE")


def _class_of(status: str, message: str) -> ErrorClass:
    if _STOCKOUT.search(message):
        return ErrorClass.STOCKOUT
    if status in _MAY_BE_RATE and _RATE.search(message):
        return ErrorClass.TRANSIENT
    if status in _MAY_BE_QUOTA and _QUOTA.search(message):
        return ErrorClass.QUOTA
    return _BY_STATUS.get(status, ErrorClass.TRANSIENT)


def _kubernetes_message(error: Exception) -> str:
    """The message of the API's Status object; without one, the HTTP status and reason."""
    try:
        return str(json.loads(getattr(error, "body", None) or "")["message"])
    except (KeyError, TypeError, ValueError):
        http, reason = getattr(error, "status", None), getattr(error, "reason", None)
        return f"the Kubernetes API answered {http} {reason}" if http else f"the Kubernetes API: {reason or error!r}"
