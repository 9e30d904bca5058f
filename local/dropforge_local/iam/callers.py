"""Tells which account a request acts as: by the token that it carries, or by the address that it reached.

Google's clients send no token to an emulator of Cloud Storage or Pub/Sub. So each container role has addresses of its
own, as each machine has its own metadata server; so have the functions, whose requests also name their function. A
request to the stack's common address without a token is the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dropforge_local.base.errors import ApiError
from dropforge_local.base.identity import BOUNDED, Identity
from dropforge_local.base.recording import FUNCTIONS, HEADER

from .boundary import boundary_of
from .policy import Account, Policy, current

OWN_PATHS = ("/_local/", "/slack/_", "/slack/messages", "/channels/_", "/channels/messages", "/telemetry/")
FOREIGN_PATHS = ("/slack/api/", "/channels/github/")  # services that are not Google's: a token there is their own


class Callers:
    """Satisfies server.Callers. `email_of` returns the e-mail of the account of a caller: a role or a function."""

    def __init__(self, policy: Policy, identity: Identity, email_of: Callable[[str], str]) -> None:
        self._policy = policy
        self._identity = identity
        self._email_of = email_of
        self._accounts: dict[str, Account] = {}

    def enter(self, headers: Mapping[str, str], address: str, path: str = "") -> None:
        """Let the rest of this request act as its account. Raises UNAUTHENTICATED for a token of another issuer.

        The switches of the stack itself are the owner's: for another account they raise PERMISSION_DENIED.
        """
        if path.startswith(FOREIGN_PATHS):
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        account = self.account(headers, address)
        if account is not None and path.startswith(OWN_PATHS):
            raise ApiError(
                "PERMISSION_DENIED", f"{path} belongs to the owner of the local stack, not to {account.email}"
            )
        current.set(account)

    def account(self, headers: Mapping[str, str], address: str) -> Account | None:
        """The account of a request; None for the owner. Raises UNAUTHENTICATED."""
        name = address
        if headers.get("authorization"):
            claims = self._identity.claims(headers)
            if claims is None:
                raise ApiError(
                    "UNAUTHENTICATED",
                    "Request had invalid authentication credentials: the token is not one of this local stack. Send no "
                    "token, or the one in DROPFORGE_EMULATOR_TOKEN.",
                )
            if claims.kind == BOUNDED:
                return self.named(claims.caller).within(boundary_of(claims.audience))
            name = claims.caller
        if name == FUNCTIONS:
            name = headers.get(HEADER) or FUNCTIONS
        return self.named(name) if name else None

    def named(self, name: str) -> Account:
        """The account of a caller: a function, a container role, or a part of the platform."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = self._policy.account(self._email_of(name))
        return account
