"""Calls of the REST APIs for which the functions have no client library: Compute Engine and Cloud DNS."""

from __future__ import annotations

from typing import Any

from .clients import TIMEOUT_SECONDS


def call(
    api: tuple[Any, str], verb: str, path: str, query: dict[str, str] | None = None, body: Any = None
) -> dict[str, Any]:
    """The JSON answer of one request. `api` is a session and the URL below which the API is.

    Raises google.api_core's error for the status of a refusal.
    """
    from google.api_core.exceptions import from_http_response

    session, root = api
    response = session.request(verb, f"{root}/{path}", params=query, json=body, timeout=TIMEOUT_SECONDS)
    if not response.ok:
        raise from_http_response(response)
    answer: dict[str, Any] = response.json()
    return answer
