"""The stack's bearer tokens, as their receivers see them."""

from __future__ import annotations

import base64
import json
import time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt

from dropforge_local.base.identity import BOUNDED, CLOUD_PLATFORM, Claims, Identity, new_identity

TEXT, OTHER = new_identity(), new_identity()
IDENTITY = Identity(TEXT)
URL = "http://127.0.0.1:1/receiver"
EMAIL = "pusher@local-project.iam.gserviceaccount.com"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_an_identity_token_has_the_claims_of_googles() -> None:
    now = time.time()
    identity = Identity(TEXT, now=lambda: now)
    token = identity.token("OIDC", URL, "events", EMAIL)
    claims = jwt.decode(token, certs=IDENTITY.certificates(), audience=URL)
    assert claims["iss"] == "https://accounts.google.com"
    assert (claims["aud"], claims["email"], claims["email_verified"]) == (URL, EMAIL, True)
    assert claims["sub"] == claims["azp"]
    assert claims["sub"].isdigit()
    assert claims["exp"] - claims["iat"] == 3600
    assert claims["iat"] == now // 300 * 300
    assert jwt.decode_header(token) == {"typ": "JWT", "alg": "RS256", "kid": next(iter(IDENTITY.certificates()))}
    assert identity.token("OIDC", URL, "events", EMAIL) == token  # as Google's metadata server does


def test_the_key_set_holds_the_key_of_the_certificates() -> None:
    (key,) = IDENTITY.key_set()["keys"]
    n, e = (int.from_bytes(base64.urlsafe_b64decode(key[part] + "==")) for part in ("n", "e"))
    public = rsa.RSAPublicNumbers(e, n).public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert IDENTITY.certificates() == {key["kid"]: pem.decode()}
    assert (key["kty"], key["alg"], key["use"]) == ("RSA", "RS256", "sig")


def test_both_kinds_of_tokens_are_recognised() -> None:
    oidc, oauth = IDENTITY.token("OIDC", URL, "events", EMAIL), IDENTITY.token("OAuth2", CLOUD_PLATFORM, "trainer")
    assert IDENTITY.claims(bearer(oidc)) == Claims("OIDC", URL, "events")
    assert IDENTITY.claims({"authorization": f"bearer {oauth}"}) == Claims("OAuth2", CLOUD_PLATFORM, "trainer")
    assert IDENTITY.is_for(bearer(oidc), URL)
    assert not IDENTITY.is_for(bearer(oidc), URL + "/")
    assert not IDENTITY.is_for(bearer(IDENTITY.token("OAuth2", URL)), URL)
    assert Identity(TEXT).is_known(bearer(oidc))
    assert Identity(TEXT).is_known(bearer(oauth))


def test_tokens_of_others_and_changed_tokens_are_refused() -> None:
    token = IDENTITY.token("OIDC", URL, "events", EMAIL)
    head, claims, signature = token.split(".")
    mine = json.loads(base64.urlsafe_b64decode(claims + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**mine, "dropforge_caller": ""}).encode()).decode().rstrip("=")
    unsigned = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "JWT"}).encode()).decode().rstrip("=")
    refused = [
        Identity(OTHER).token("OIDC", URL),
        Identity(OTHER).token("OAuth2", URL),
        f"{head}.{forged}.{signature}",
        f"{unsigned}.{claims}.",
        f"{head}.{claims}.",
        "a.b.c",
        "..",
        "ü.ü.ü",
        "token",
        "",
    ]
    assert [text for text in refused if IDENTITY.is_known(bearer(text))] == []


@pytest.mark.parametrize(("age", "known"), [(3000, True), (4000, False), (-1000, False)])
def test_an_identity_token_is_valid_for_an_hour(age: int, known: bool) -> None:
    token = Identity(TEXT, now=lambda: time.time() - age).token("OIDC", URL)
    assert IDENTITY.is_known(bearer(token)) is known


def test_a_token_that_was_valid_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Identity(TEXT)
    token = identity.token("OIDC", URL)
    assert identity.is_for(bearer(token), URL)
    expiry = jwt.decode(token, certs=identity.certificates())["exp"]
    monkeypatch.setattr(time, "time", lambda: float(expiry + 1))
    assert not identity.is_known(bearer(token))


@pytest.mark.parametrize(
    ("kind", "lifetime", "known"), [(BOUNDED, 60, False), (BOUNDED, 3600, True), ("OAuth2", 60, True)]
)
def test_a_token_within_a_boundary_is_valid_for_the_lifetime(kind: str, lifetime: int, known: bool) -> None:
    """The other access tokens are those of a container's start, which nothing renews."""
    token = Identity(TEXT, now=lambda: time.time() - 61, lifetime=lifetime).token(kind, URL)
    assert IDENTITY.is_known(bearer(token)) is known


def test_a_short_lifetime_gives_tokens_that_are_still_good() -> None:
    """The same token is given again for a part of its lifetime only."""
    now = 1_000_000_059.0
    identity = Identity(TEXT, now=lambda: now, lifetime=60)
    claims = jwt.decode(identity.token("OIDC", URL), certs=identity.certificates(), clock_skew_in_seconds=10**10)
    assert now + 50 < claims["exp"] <= now + 60
