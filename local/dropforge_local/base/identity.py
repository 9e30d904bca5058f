"""Bearer tokens of the local stack, in place of Google's: a call without a token, or with a token for another audience,
is refused as in the cloud.

Identity tokens are JWTs of Google's form (https://cloud.google.com/docs/authentication/token-types#id), so that a
receiver verifies them as in the cloud, with the stack's keys in place of Google's. Access tokens are opaque.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import crypt, jwt
from google.auth.exceptions import GoogleAuthError

from .lifetimes import TOKEN_SECONDS

CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
PREFIX = "dropforge-local"
BOUNDED = "bounded"  # the kind of an access token within a Credential Access Boundary, which is its audience, as JSON
ISSUER: Final = "https://accounts.google.com"
REUSE_SECONDS: Final = 300  # calls within this time get the same token, as from Google's metadata server
_CALLER: Final = "dropforge_caller"  # a claim that Google's tokens lack


class Claims(NamedTuple):
    """The content of a token. `caller` is a function or a container role; "" is the owner of the project."""

    kind: str
    audience: str
    caller: str


def new_identity() -> str:
    """The text of a new identity: a secret, and below it an RSA key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return f"{secrets.token_hex(32)}\n{pem.decode()}"


class Identity:
    """Signs and checks tokens with the secret and the key of a state directory: the text of `new_identity`.

    `lifetime`: seconds until an identity token, or a token within a boundary, expires.
    """

    def __init__(self, text: str, now: Callable[[], float] = time.time, lifetime: int = TOKEN_SECONDS) -> None:
        secret, _, self._pem = text.partition("\n")
        self._secret = secret.encode()
        self._now = now
        self.lifetime = lifetime
        self._period = min(REUSE_SECONDS, max(1, lifetime // 12))  # a token that is given again is nearly new
        self._reused = lru_cache(256)(self._identity_token)
        self._verified = lru_cache(256)(self._verify)

    def token(self, kind: str, audience: str, caller: str = "", email: str = "") -> str:
        """A token of `kind` OIDC (for one audience) or OAuth2 (for a scope), for the account of `caller`.

        `email` is the address of that account, which an identity token tells its receiver.
        """
        if kind == "OIDC":
            return self._reused(audience, caller, email, int(self._now()) // self._period)
        expiry = self._now() + self.lifetime if kind == BOUNDED else None  # no container renews the token of its start
        claims = base64.urlsafe_b64encode(json.dumps([kind, audience, caller, expiry]).encode()).decode()
        return f"{PREFIX}.{claims}.{self._sign(claims)}"

    def claims(self, headers: Mapping[str, str]) -> Claims | None:
        """The content of the request's token; None without a token of this stack, or with an expired token."""
        header = headers.get("Authorization") or headers.get("authorization") or ""  # gRPC's names are in lower case
        scheme, _, token = header.partition(" ")
        parts = token.split(".")
        if scheme.lower() != "bearer" or len(parts) != 3:
            return None
        if parts[0] != PREFIX:
            return self._claims_of_identity_token(token)
        if not hmac.compare_digest(parts[2], self._sign(parts[1])):
            return None
        kind, audience, caller, *expiry = json.loads(base64.urlsafe_b64decode(parts[1]))
        is_over = bool(expiry and expiry[0] and expiry[0] < self._now())
        return None if is_over else Claims(kind, audience, caller)

    def is_known(self, headers: Mapping[str, str]) -> bool:
        """Whether the request carries any token of this stack."""
        return self.claims(headers) is not None

    def is_for(self, headers: Mapping[str, str], audience: str) -> bool:
        """Whether the request carries an OIDC token for exactly this audience."""
        claims = self.claims(headers)
        return claims is not None and claims[:2] == ("OIDC", audience)

    def certificates(self) -> dict[str, str]:
        """The public key by its id, in PEM: the form of https://www.googleapis.com/oauth2/v1/certs."""
        pem = self._public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        return {self._key_id: pem.decode()}

    def key_set(self) -> dict[str, Any]:
        """The public key as a JWK Set: the form of https://www.googleapis.com/oauth2/v3/certs."""
        numbers = self._public.public_numbers()
        key = {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": self._key_id}
        return {"keys": [{**key, "n": _unsigned(numbers.n), "e": _unsigned(numbers.e)}]}

    def _sign(self, claims: str) -> str:
        return hmac.new(self._secret, claims.encode(), hashlib.sha256).hexdigest()

    def _identity_token(self, audience: str, caller: str, email: str, period: int) -> str:
        issued = period * self._period
        subject = str(int.from_bytes(hashlib.sha256((email or caller).encode()).digest()) % 10**21)
        claims = {"iss": ISSUER, "aud": audience, "sub": subject, "azp": subject, "iat": issued, _CALLER: caller}
        if email:
            claims |= {"email": email, "email_verified": True}
        claims["exp"] = issued + self.lifetime
        token: bytes = jwt.encode(self._signer, claims)
        return token.decode()

    def _claims_of_identity_token(self, token: str) -> Claims | None:
        try:
            claims, expiry = self._verified(token)
        except (GoogleAuthError, ValueError):
            return None
        return claims if time.time() <= expiry else None

    def _verify(self, token: str) -> tuple[Claims, float]:
        """The claims of a valid identity token, and when it expires. Callers send a token again for minutes."""
        claims = jwt.decode(token, certs=self.certificates())
        return Claims("OIDC", claims["aud"], claims[_CALLER]), float(claims["exp"])

    @cached_property
    def _signer(self) -> Any:
        return crypt.RSASigner.from_string(self._pem, self._key_id)

    @cached_property
    def _public(self) -> rsa.RSAPublicKey:
        key = serialization.load_pem_private_key(self._pem.encode(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        return key.public_key()

    @cached_property
    def _key_id(self) -> str:
        der = self._public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(der).hexdigest()[:40]


def _unsigned(number: int) -> str:
    """A number as JWKs write it: base64url without padding."""
    return base64.urlsafe_b64encode(number.to_bytes((number.bit_length() + 7) // 8)).decode().rstrip("=")
