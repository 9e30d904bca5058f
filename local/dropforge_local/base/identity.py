"""Bearer tokens of the local stack, in place of Google's identity tokens: a call without a token, or with a token for
another audience, is refused as in the cloud."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import NamedTuple

CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
PREFIX = "dropforge-local"


class Claims(NamedTuple):
    """The content of a token. `caller` is a function or a container role; "" is the owner of the project."""

    kind: str
    audience: str
    caller: str


class Identity:
    """Signs and checks tokens with one secret per state directory."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def token(self, kind: str, audience: str, caller: str = "") -> str:
        """A token of `kind` OIDC (for one audience) or OAuth2 (for a scope), for the account of `caller`."""
        claims = base64.urlsafe_b64encode(json.dumps([kind, audience, caller]).encode()).decode()
        return f"{PREFIX}.{claims}.{self._sign(claims)}"

    def claims(self, headers: Mapping[str, str]) -> Claims | None:
        """The content of the request's token; None without a token of this stack."""
        header = headers.get("Authorization") or headers.get("authorization") or ""  # gRPC's names are in lower case
        scheme, _, token = header.partition(" ")
        parts = token.split(".")
        if scheme.lower() != "bearer" or len(parts) != 3 or parts[0] != PREFIX:
            return None
        if not hmac.compare_digest(parts[2], self._sign(parts[1])):
            return None
        return Claims(*json.loads(base64.urlsafe_b64decode(parts[1])))

    def is_known(self, headers: Mapping[str, str]) -> bool:
        """Whether the request carries any token of this stack."""
        return self.claims(headers) is not None

    def is_for(self, headers: Mapping[str, str], audience: str) -> bool:
        """Whether the request carries an OIDC token for exactly this audience."""
        claims = self.claims(headers)
        return claims is not None and claims[:2] == ("OIDC", audience)

    def _sign(self, claims: str) -> str:
        return hmac.new(self._secret, claims.encode(), hashlib.sha256).hexdigest()
