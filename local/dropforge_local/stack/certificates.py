"""The keys of the stack's identity tokens, at the paths where www.googleapis.com serves Google's.

`google.oauth2.id_token.verify_token(token, request, audience, certs_url=f"{stack}/oauth2/v1/certs")` verifies a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from dropforge_local.base.identity import Identity
from dropforge_local.emulators.kit.emulator import PassiveEmulator
from dropforge_local.emulators.kit.routing import Route, mount


class Certificates(PassiveEmulator):
    """Serves public keys as a map of PEM texts (v1) and as a JWK Set (v3)."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount(
            [
                Route("GET", "/oauth2/v1/certs", lambda call: self._identity.certificates()),
                Route("GET", "/oauth2/v3/certs", lambda call: self._identity.key_set()),
            ]
        )
