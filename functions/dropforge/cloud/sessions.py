"""HTTP sessions for Google's APIs and their emulators: `requests`, without the work that these calls do not need.

For each call, `requests` builds a request from the session's and its own settings, looks for proxies in the
environment, for a password in .netrc and for cookies. That takes half of a call's CPU. Here a call with a plain URL,
headers and bytes goes to the connection pool at once. The environment is read once for each host. `requests` itself
handles any other call, such as a call with cookies, files or a redirect.
"""

from __future__ import annotations

import re
from json import dumps
from typing import Any
from urllib.parse import urlencode, urlsplit

import requests
from google.auth.transport.requests import AuthorizedSession
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict

from dropforge.base.redact import cut

from .classify import is_passing
from .retrying import Retrying

# Connections that a session keeps: as many as a sweep has threads. The default of ten would make most of them again.
CONNECTIONS = 32
_LONGEST_ANSWER = 300  # of what an error quotes
PLAIN_URL = re.compile(r"https?://[\w.-]+(?::\d+)?/[\w.~!$&'()*+,;=:@/?%-]*", re.ASCII)


class LeanSession(requests.Session):
    """A session whose `request` has the parameters, the answers and the exceptions of `requests.Session.request`."""

    def __init__(self) -> None:
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
        self._settings: dict[str, dict[str, Any]] = {}

    def request(  # type: ignore[override]
        self,
        method: str,
        url: str,
        params: Any = None,
        data: Any = None,
        headers: Any = None,
        timeout: Any = None,
        stream: bool | None = None,
        allow_redirects: bool = True,
        json: Any = None,
        **others: Any,
    ) -> requests.Response:
        address, body, extra = url, data, {}
        if isinstance(params, list) and params:
            address = f"{url}{'&' if '?' in url else '?'}{urlencode(params, doseq=True)}"
        if json is not None and data is None:
            body, extra = dumps(json, allow_nan=False), {"Content-Type": "application/json"}
        if isinstance(body, str):
            body = body.encode()
        is_plain = isinstance(params, list | None) and isinstance(body, bytes | None) and not any(others.values())
        if is_plain and PLAIN_URL.fullmatch(address):
            response = self._send(method, address, body, {**extra, **(headers or {})}, timeout, bool(stream))
            if not (allow_redirects and response.is_redirect):
                return response
            response.close()
        return super().request(
            method,
            url,
            params=params,
            data=data,
            headers=headers,
            timeout=timeout,
            stream=stream,
            allow_redirects=allow_redirects,
            json=json,
            **others,
        )

    def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout: Any, stream: bool
    ) -> requests.Response:
        request = requests.PreparedRequest()
        request.method, request.url, request.body = method.upper(), url, body or None
        request.headers = CaseInsensitiveDict({**self.headers, **headers})  # type: ignore[arg-type]  # values may be bytes
        if body or request.method not in ("GET", "HEAD"):
            request.headers["Content-Length"] = str(len(body or b""))
        response = self.get_adapter(url).send(request, stream=stream, timeout=timeout, **self._settings_of(url))
        if not stream:
            response.content  # noqa: B018 - reads the body, so that the connection is free again
        return response

    def _settings_of(self, url: str) -> dict[str, Any]:
        """The proxies, the certificates and the client certificate for a URL's host."""
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        if origin not in self._settings:
            settings = self.merge_environment_settings(origin, {}, None, None, None)
            self._settings[origin] = {name: settings[name] for name in ("proxies", "verify", "cert")}
        return self._settings[origin]


class GoogleSession(AuthorizedSession, LeanSession):  # type: ignore[misc]
    """A lean session that sends the token of Google credentials, and renews the token when it must."""


class RetryingSession(GoogleSession):
    """A container's session: it repeats a request that failed for the moment, as long as `retrying` allows.

    The clients above it repeat for minutes only, and do not know which errors of credentials may pass.
    """

    def __init__(self, credentials: Any, retrying: Retrying, **options: Any) -> None:
        super().__init__(credentials, **options)  # type: ignore[call-arg]
        self._retrying = retrying

    def request(  # type: ignore[override]
        self, method: str, url: str, *arguments: Any, **options: Any
    ) -> requests.Response:
        """Raises google.api_core.exceptions.RetryError when the time is over."""
        send = super().request

        def once() -> requests.Response:
            response: requests.Response = send(method, url, *arguments, **options)
            if is_passing(response.status_code):
                # Without the query: the id of a resumable upload lets anybody write.
                said = f"{method} {url.partition('?')[0]}: {cut(response.text, _LONGEST_ANSWER)}"
                from google.api_core.exceptions import from_http_status

                raise from_http_status(response.status_code, said, response=response)
            return response

        return self._retrying(once)


def session_with(token: str) -> LeanSession:
    """A session that sends a bearer token."""
    session = LeanSession()
    session.headers["Authorization"] = f"Bearer {token}"
    return session


def loopback_session(token: str = "") -> LeanSession:
    """A session for emulators of this machine: it ignores proxies and other settings of the environment."""
    session = session_with(token) if token else LeanSession()
    session.trust_env = False
    return session
