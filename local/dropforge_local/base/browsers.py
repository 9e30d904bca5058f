"""Keeps web pages away from the local stack: a browser on this machine reaches 127.0.0.1 for every page that it shows.

A page of another site can send requests here, and cannot read the answers; with DNS rebinding, it can read them as
well. Browsers name the page in `Origin` and `Sec-Fetch-Site`, and the page's host in `Host`, and no page can change
these headers (https://fetch.spec.whatwg.org/#forbidden-request-header). Clients such as gcloud, kubectl and Google's
libraries send neither `Origin` nor `Sec-Fetch-Site`, and the loopback address as `Host`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from .errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OWN_SITES = ("same-origin", "none")  # a page of this server; an address that a person has typed


@web.middleware
async def refuse_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 403 to a request of a web page that this server did not send."""
    if problem := problem_of(request.headers):
        refusal = ApiError("PERMISSION_DENIED", problem)
        return web.json_response(refusal.to_json(), status=refusal.http_status)
    return await handler(request)


def problem_of(headers: Mapping[str, str]) -> str | None:
    """Why a request with these headers comes from a web page of another site; None if it does not."""
    host, origin, site = headers.get("Host", ""), headers.get("Origin"), headers.get("Sec-Fetch-Site")
    if not _is_loopback(host):
        return f"the host of this request is {host[:100]!r}; the local stack answers at 127.0.0.1 and localhost alone"
    if origin is not None and origin != f"http://{host}":
        return f"the local stack takes no request from the web page {origin[:100]!r}"
    if site is not None and site not in OWN_SITES:
        return f"the local stack takes no request from a web page of another site (Sec-Fetch-Site: {site[:100]})"
    return None


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
