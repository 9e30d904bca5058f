"""Who may see the console on a laptop: the browser that followed a link which this process has printed.

Any page of the web and any process of the machine can reach a port of 127.0.0.1. So a request must name this server as
its host (a name that an attacker points to 127.0.0.1 is another host), must carry a cookie of this start, and must come
from the console's own page if it changes anything.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http.cookies import SimpleCookie
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

INVITATION_SECONDS = 600.0
SESSION_SECONDS = 12 * 3600
ENTER = "/enter"
OPEN_PATHS = (ENTER, "/static/")  # what a browser without the cookie may fetch
SAFE = ("GET", "HEAD")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Access:
    """The invitations and the session of one start of the console."""

    def __init__(self, host: str, now: Callable[[], float]) -> None:
        self.host = host
        self.cookie = f"dropforge-console-{host.rpartition(':')[2]}"  # browsers send a cookie to every port
        self._session = secrets.token_urlsafe(32)
        self._invitations: dict[str, float] = {}
        self._now = now

    def link(self, path: str = "/runs") -> str:
        """Return a link that opens a page of the console, once, within ten minutes."""
        token = secrets.token_urlsafe(32)
        self._invitations[token] = self._now() + INVITATION_SECONDS
        return f"http://{self.host}{ENTER}?{urlencode({'token': token, 'next': path})}"

    def spend(self, token: str) -> bool:
        """Whether the token of a link is valid. It is not valid again."""
        ends = self._invitations.pop(token, None)
        return ends is not None and self._now() < ends

    def admit(self, response: Response) -> None:
        """Give the browser of a response the cookie of this start."""
        response.set_cookie(
            self.cookie, self._session, max_age=SESSION_SECONDS, httponly=True, samesite="lax", path="/"
        )

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and text of the refusal of a request; None if the request is allowed."""
        headers = Headers(scope=scope)
        if headers.get("host") != self.host:
            return 421, f"this server is {self.host}, not {headers.get('host', '')[:200]!r}"
        if scope["method"] not in SAFE and not self._is_own_page(headers):
            return 403, "only the console's own pages may send this request"
        if not scope["path"].startswith(OPEN_PATHS) and not self._has_cookie(headers):
            return 401, "this browser has no session: run `dropforge console` again, and open the link that it prints"
        return None

    def _is_own_page(self, headers: Headers) -> bool:
        site = headers.get("sec-fetch-site")
        return site == "same-origin" if site is not None else headers.get("origin") == f"http://{self.host}"

    def _has_cookie(self, headers: Headers) -> bool:
        morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self._session.encode())


class Guard:
    """ASGI middleware: refuses what `access` refuses, and sets the headers that every response has."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "private, no-store")
            await send(message)

        refused = self._access.refusal(scope)
        app = self._app if refused is None else PlainTextResponse(refused[1] + "\n", refused[0])
        await app(scope, receive, guarded)
