"""Access to the console on Cloud Run, behind Google's Identity-Aware Proxy (IAP).

IAP lets in whom the deployment allows, and adds a signed assertion of who they are to each request. The console
verifies each assertion: whoever reaches the service in another way has none.
https://cloud.google.com/iap/docs/signed-headers-howto
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import requests
from starlette.datastructures import Headers
from starlette.types import Scope

from dropforge.base.names import is_email

from .access import Refusal, refusal_of_page
from .people import Members, Person, Role

ASSERTION = "x-goog-iap-jwt-assertion"
ISSUER = "https://cloud.google.com/iap"
ALGORITHM = "ES256"
KEYS_URL = "https://www.gstatic.com/iap/verify/public_key"
SKEW_SECONDS = 30  # that page allows it
MOST_CHARACTERS = 8192  # of an assertion: more is not one of Google's
KEPT_SECONDS = 3600.0
PAUSE_SECONDS = 60.0  # between two requests for the keys: unknown key ids in forged assertions cause no more
TIMEOUT_SECONDS = 10


class NoKeys(Exception):
    """The public keys cannot be read, so no assertion can be verified."""


class Keys:
    """The public keys of IAP, by key id. They are read when the first is needed, and again after an hour.

    Google may sign with a new key at any time: an unknown id makes them be read again, at most once a minute. If they
    cannot be read, the keys from before remain in use.
    """

    def __init__(self, url: str, now: Callable[[], float]) -> None:
        self._url = url
        self._now = now
        self._keys: dict[str, str] = {}
        self._read_at = self._tried_at = float("-inf")
        self._trouble = ""
        self._lock = threading.Lock()

    def has(self, key_id: str) -> bool:
        """Whether the key is here and not old: `find` then reads nothing."""
        return key_id in self._keys and self._now() - self._read_at < KEPT_SECONDS

    def find(self, key_id: str) -> str | None:
        """Return the key in PEM; None if Google has no such key. Raises NoKeys."""
        with self._lock:
            if not self.has(key_id) and self._now() - self._tried_at >= PAUSE_SECONDS:
                self._read()
            if not self._keys:
                raise NoKeys(self._trouble)
            return self._keys.get(key_id)

    def _read(self) -> None:
        self._tried_at = self._now()
        try:
            answer = requests.get(self._url, timeout=TIMEOUT_SECONDS)
            answer.raise_for_status()
            self._keys = {str(key_id): str(key) for key_id, key in answer.json().items()}
            self._read_at, self._trouble = self._now(), ""
        except (requests.RequestException, ValueError, AttributeError) as error:
            self._trouble = f"{self._url} cannot be read: {type(error).__name__}"


class Wrong(Exception):
    """An assertion that proves nothing; the text says why."""


class Behind(NamedTuple):
    """Where a console behind IAP is, and who may do more than look.

    `audience` is the service that IAP writes into an assertion:
    /projects/NUMBER/locations/REGION/services/SERVICE. `host` is the name in the address of the console. `ask_url` is
    the function that lends tokens of endpoints; "": nobody can ask a model here. `preflight_url` is the function that
    answers whether a spec could run; "": nobody can ask that here.
    """

    host: str
    audience: str
    submitters: Members
    admins: Members
    ask_url: str = ""
    preflight_url: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Behind:
        """Raises ValueError, which names what is missing or malformed."""
        url, audience = (environment.get(f"DROPFORGE_CONSOLE_{name}", "") for name in ("URL", "AUDIENCE"))
        scheme, _, host = url.rstrip("/").partition("://")
        if scheme != "https" or not host or "/" in host:
            raise ValueError(f"DROPFORGE_CONSOLE_URL is {url!r}; expected the address alone: https://HOST")
        if not audience.startswith("/projects/"):
            expected = "/projects/NUMBER/locations/REGION/services/SERVICE"
            raise ValueError(f"DROPFORGE_CONSOLE_AUDIENCE is {audience!r}; expected {expected}")
        ask_url, preflight_url = (environment.get(f"DROPFORGE_CONSOLE_{name}_URL", "") for name in ("ASK", "PREFLIGHT"))
        submitters, admins = (_members(environment, name) for name in ("SUBMITTERS", "ADMINS"))
        return cls(host, audience, submitters, admins, ask_url, preflight_url)


def _members(environment: Mapping[str, str], name: str) -> Members:
    text = environment.get(f"DROPFORGE_CONSOLE_{name}", "")
    try:
        return Members.of([member for member in text.split(",") if member])
    except ValueError as error:
        raise ValueError(f"DROPFORGE_CONSOLE_{name}: {error} (console_{name.lower()} in Terraform)") from None


class IapAccess:
    """Judges the requests to a console behind IAP. Satisfies access.Gate."""

    def __init__(self, behind: Behind, keys: Keys) -> None:
        self._behind = behind
        self._keys = keys

    async def judge(self, scope: Scope) -> Person | Refusal:
        headers = Headers(scope=scope)
        if refused := refusal_of_page(scope["method"], headers, self._behind.host, "https"):
            return refused
        assertion = headers.get(ASSERTION)
        if assertion is None:
            address = f"https://{self._behind.host}"
            return Refusal(401, f"this request did not pass Identity-Aware Proxy: open {address} in a browser")
        try:
            key_id = _key_id(assertion)
            if self._keys.has(key_id):
                return self._person(assertion, key_id)
            return await asyncio.to_thread(self._person, assertion, key_id)  # reads the keys
        except Wrong as wrong:
            return Refusal(401, f"the assertion of Identity-Aware Proxy is not valid: {wrong}; reload the page")
        except NoKeys as error:
            return Refusal(503, f"the console cannot verify who you are, because {error}; try again in a minute")

    def _person(self, assertion: str, key_id: str) -> Person:
        """Return who an assertion is about. Raises Wrong and NoKeys."""
        key = self._keys.find(key_id)
        if key is None:
            raise Wrong("Google has no key with its key id")
        claims = _verified(assertion, key_id, key, self._behind.audience)
        # Only Google's own accounts: an address of another identity provider keeps its prefix, and equals no member.
        email = str(claims.get("email", "")).removeprefix("accounts.google.com:")
        if not is_email(email):
            raise Wrong("it names no e-mail address")
        domain = str(claims.get("hd", ""))
        is_admin, is_submitter = (each.has(email, domain) for each in (self._behind.admins, self._behind.submitters))
        return Person(email, Role.ADMIN if is_admin else Role.SUBMITTER if is_submitter else Role.VIEWER)


def _key_id(assertion: str) -> str:
    """The key id in the head of an assertion that may be ES256. Raises Wrong."""
    from google.auth import jwt

    if len(assertion) > MOST_CHARACTERS:
        raise Wrong(f"it has more than {MOST_CHARACTERS} characters")
    try:
        head = jwt.decode_header(assertion)
    except (ValueError, RecursionError):  # google-auth's errors and binascii's are ValueErrors
        raise Wrong("it is no JSON web token") from None
    if head.get("alg") != ALGORITHM:  # a key of one algorithm must not verify another
        raise Wrong(f"it is not signed with {ALGORITHM}")
    if not isinstance(head.get("kid"), str) or not head["kid"]:
        raise Wrong("it has no key id")
    return str(head["kid"])


def _verified(assertion: str, key_id: str, key: str, audience: str) -> Mapping[str, Any]:
    """The claims of an assertion. Raises Wrong. google-auth checks neither the issuer nor the kind of a claim."""
    from google.auth import jwt

    try:
        claims: Mapping[str, Any] = jwt.decode(assertion, certs={key_id: key}, clock_skew_in_seconds=SKEW_SECONDS)
    except (ValueError, TypeError, RecursionError) as error:
        # Its texts quote the token.
        is_late = "expired" in str(error) or "too early" in str(error)
        raise Wrong(
            "it has expired, or is not valid yet" if is_late else "its signature or its claims do not fit"
        ) from None
    if claims.get("iss") != ISSUER:
        raise Wrong(f"its issuer is not {ISSUER}")
    if claims.get("aud") != audience:
        raise Wrong("it is for another service")
    return claims
