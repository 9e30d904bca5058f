"""Tokens of endpoints for a console in a project: the function `ask` lends one for each endpoint.

The console's own account may call that function, and no endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dropforge.cloud.clients import Clients

from .asking import PAGE, Unanswered
from .functions import Function
from .playground import Callee

KEPT_SECONDS = 300.0  # Google's tokens are valid for an hour


class Lender:
    """Asks the function at `url` for tokens, and keeps each for a few minutes. Satisfies playground.TokenOf."""

    def __init__(self, url: str, clients: Clients, now: Callable[[], float] = time.monotonic) -> None:
        self._ask = Function("ask", url, clients)
        self._now = now
        self._kept: dict[str, tuple[float, str]] = {}  # by the URL of the endpoint: until when, and the token

    def __call__(self, callee: Callee) -> str:
        """The token for an endpoint. Raises Unanswered, also for an endpoint that the console cannot reach."""
        serve, name = callee.spec.serve, callee.name
        assert serve is not None, "only a spec with an endpoint has a token"
        if serve.credential != "identity_token":
            message = f"the endpoint of {name} ({serve.type}) is inside the network of the deployment, and this console"
            message += " is not: it asks only endpoints on Cloud Run"
            raise Unanswered(message, f"from inside of the network: {PAGE}#endpoints-inside-the-vpc")
        until, token = self._kept.get(callee.endpoint.url, (0.0, ""))
        if self._now() < until:
            return token
        token = self._lent(name)
        self._kept = {url: kept for url, kept in self._kept.items() if self._now() < kept[0]}
        self._kept[callee.endpoint.url] = self._now() + KEPT_SECONDS, token
        return token

    def _lent(self, name: str) -> str:
        answer = self._ask({"of": name}, name)
        try:
            return str(answer["token"])
        except (KeyError, TypeError) as error:
            raise Unanswered(f"the function ask lent no token for {name}: {type(error).__name__}") from error
