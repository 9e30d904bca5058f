"""Asks an endpoint for a completion: only an answer shows that it serves."""

from __future__ import annotations

from dropforge.base.redact import cut
from dropforge.cloud.classify import client_errors
from dropforge.cloud.context import Cloud

COMPLETION_TIMEOUT_SECONDS = 120


def completion_problem(cloud: Cloud, url: str, model: str, key: str = "", audience: str = "") -> str:
    """Why the endpoint does not answer a completion of one token; "" if it answers. `key` is its API key.

    `audience` is the URL for which a token is valid, if not `url`.

    A health check is not enough: an engine can be healthy and fail every request.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    failures: tuple[type[Exception], ...] = (*client_errors(), ValueError, LookupError, TypeError)
    try:
        session = cloud.clients.endpoint(audience or url, key)
        response = session.post(f"{url}/v1/chat/completions", json=body, timeout=COMPLETION_TIMEOUT_SECONDS)
        if response.status_code != 200:
            return f"a completion was answered with {response.status_code}: {cut(response.text, 300)}"
        response.json()["choices"][0]["message"]
    except failures as error:
        return f"a completion failed: {cut(repr(error), 400)}"
    return ""
