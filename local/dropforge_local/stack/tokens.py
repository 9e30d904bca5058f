"""Tokens of the local stack, as Google's services give them: the Security Token Service, and the metadata server's
identity tokens.

A container on Cloud Run or in a cluster finds the metadata server by GCE_METADATA_HOST: it is the address of its
account's APIs. Each TPU VM has a metadata server of its own (emulators/tpu/metadata.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs, unquote

from aiohttp import web

from dropforge_local.base.errors import ApiError
from dropforge_local.base.identity import BOUNDED, Identity
from dropforge_local.base.recording import FUNCTIONS, HEADER
from dropforge_local.emulators.kit.emulator import PassiveEmulator
from dropforge_local.emulators.kit.routing import Call, Reply, Route, mount
from dropforge_local.iam.boundary import Boundary
from dropforge_local.iam.policy import current

EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
IDENTITY = "/computeMetadata/v1/instance/service-accounts/default/identity"


class Tokens(PassiveEmulator):
    """`caller_of` returns the caller whose account has an e-mail."""

    def __init__(self, identity: Identity, caller_of: Callable[[str], str]) -> None:
        self._identity = identity
        self._caller_of = caller_of

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount([Route("POST", "/v1/token", self._exchange), Route("GET", IDENTITY, self._identify)])

    def _exchange(self, call: Call) -> Reply:
        """https://cloud.google.com/iam/docs/reference/sts/rest/v1/TopLevel/token: downscope an access token."""
        form = {name: values[0] for name, values in parse_qs(call.body.decode()).items()}
        wanted = {"grant_type": EXCHANGE, "requested_token_type": ACCESS_TOKEN, "subject_token_type": ACCESS_TOKEN}
        for name, value in wanted.items():
            if form.get(name) != value:
                return _refusal("invalid_request", f"{name} is {form.get(name)!r}; expected {value}")
        claims = self._identity.claims({"authorization": f"Bearer {form.get('subject_token', '')}"})
        if claims is None or claims.kind != "OAuth2":
            return _refusal("invalid_grant", "subject_token is no access token of this local stack")
        try:
            options = json.loads(unquote(form.get("options", "")))
            Boundary(options)
        except (ValueError, AttributeError, TypeError) as error:
            return _refusal("invalid_request", f"options: {error}")
        caller = call.headers.get(HEADER, "") if claims.caller == FUNCTIONS else claims.caller
        token = self._identity.token(BOUNDED, json.dumps(options), caller)
        return Reply(
            {
                "access_token": token,
                "issued_token_type": ACCESS_TOKEN,
                "token_type": "Bearer",
                "expires_in": self._identity.lifetime,
            }
        )

    def _identify(self, call: Call) -> web.Response:
        """https://cloud.google.com/compute/docs/instances/verifying-instance-identity#request_signature"""
        if call.headers.get("Metadata-Flavor") != "Google":
            raise ApiError("PERMISSION_DENIED", "Missing required header: Metadata-Flavor: Google")
        if not (audience := call.text("audience")):
            raise ApiError("INVALID_ARGUMENT", "non-empty audience parameter required")
        account = current.get()
        email = account.email if account else ""
        caller = self._caller_of(email) or call.headers.get(HEADER, "")
        token = self._identity.token("OIDC", audience, caller, email)
        return web.Response(text=token, headers={"Metadata-Flavor": "Google"})


def _refusal(error: str, description: str) -> Reply:
    return Reply({"error": error, "error_description": description}, 400)
