"""Access to the console. On a laptop, a browser gets it by the link that a command has printed; `iap` is the other way.

Any page of the web and any process of the machine can reach a port of 127.0.0.1. So a request must name this server as
its host (a name that an attacker points to 127.0.0.1 is another host), must carry the cookie of a session, and must
come from the console's own page if it changes anything.
"""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import NamedTuple, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .passes import ENTER, INVITATION, SECONDS, SESSION, Passes
from .people import OWNER, Person

OPEN_PATHS = (ENTER, "/static/")  # what a browser without the cookie may fetch
SAFE = ("GET", "HEAD")
HOW_TO_ENTER = "open the link that `dropforge open` prints, or that of a new `dropforge console`"
PERSON = "dropforge.person"  # the key of a scope with the Person who sent the request
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Refusal(NamedTuple):
    """The status and the text of the answer to a request that is not allowed."""

    code: int
    text: str


class Gate(Protocol):
    """Decides who gets in."""

    async def judge(self, scope: Scope) -> Person | Refusal:
        """Return who sends an HTTP request, or the refusal of the request."""
        ...


def refusal_of_page(method: str, headers: Headers, host: str, scheme: str) -> Refusal | None:
    """Refuse a request for another host, and a change that another page requests; None if the request is neither."""
    if headers.get("host") != host:
        return Refusal(421, f"this server is {scheme}://{host}, not {headers.get('host', '')[:200]!r}")
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_own = site == "same-origin" if site is not None else origin == f"{scheme}://{host}"
    if method not in SAFE and not is_own:
        return Refusal(403, "only the console's own pages may send this request")
    return None


class Access:
    """The invitations and the sessions of a console at `host`, which is a name and a port. Satisfies Gate."""

    def __init__(self, host: str, passes: Passes) -> None:
        self.host = host
        self.cookie = f"dropforge-console-{host.rpartition(':')[2]}"  # browsers send a cookie to every port
        self._passes = passes

    def link(self, path: str = "/runs") -> str:
        """Return a link that opens a page of the console, once, within ten minutes."""
        return self._passes.link(f"http://{self.host}", path)

    def spend(self, token: str) -> bool:
        """Whether the token of a link is valid. It is not valid again."""
        return self._passes.spend(INVITATION, token)

    def admit(self, response: Response) -> None:
        """Give the browser of a response a session."""
        token, seconds = self._passes.issue(SESSION), int(SECONDS[SESSION])
        response.set_cookie(self.cookie, token, max_age=seconds, httponly=True, samesite="lax", path="/")

    async def judge(self, scope: Scope) -> Person | Refusal:
        headers = Headers(scope=scope)
        if refused := refusal_of_page(scope["method"], headers, self.host, "http"):
            return refused
        if not scope["path"].startswith(OPEN_PATHS) and not self._has_cookie(headers):
            return Refusal(401, f"this browser has no session: {HOW_TO_ENTER}")
        return OWNER

    def _has_cookie(self, headers: Headers) -> bool:
        morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        return morsel is not None and self._passes.is_valid(SESSION, morsel.value)


class Guard:
    """ASGI middleware: refuses what `gate` refuses, and sets the headers that every response has."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

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

        judged = await self._gate.judge(scope)
        if isinstance(judged, Refusal):
            await PlainTextResponse(judged.text + "\n", judged.code)(scope, receive, guarded)
        else:
            scope[PERSON] = judged
            await self._app(scope, receive, guarded)
