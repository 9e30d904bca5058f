"""Checks the permissions that a method needs before the method is called. Each emulator has its own table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from dropforge_local.iam.policy import Account, current

from .routing import Call, Handler

Need = tuple[str, Callable[[Any], str]]
"""A permission, and the name of the resource on which a request needs it."""
Needs = Mapping[str, tuple[Need, ...]]
Further = Callable[[Any], Iterable[tuple[str, str]]]
"""The permissions that depend on a request's content, each with its resource."""

NO_FURTHER: Mapping[str, Further] = {}


def table(text: str) -> Needs:
    """Needs by method, from a line for each permission: `get_topic pubsub.topics.get topic`.

    The last word is the field of the request that names the resource; `-` is the project. A line with the method only
    says that the method needs no permission.
    """
    needs: dict[str, tuple[Need, ...]] = {}
    for method, *need in (line.split() for line in text.strip().splitlines()):
        needs[method] = needs.get(method, ()) + ((_need(*need),) if need else ())
    return needs


class Guarded:
    """The methods of an API, each after the check of what it needs. A method without an entry raises KeyError."""

    def __init__(self, implementation: object, needs: Needs, further: Mapping[str, Further] = NO_FURTHER) -> None:
        self._implementation = implementation
        self._needs = needs
        self._further = further

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        handler = getattr(self._implementation, method)
        needs, further = self._needs[method], self._further.get(method)

        def call(request: Any) -> Any:
            if (account := current.get()) is not None:
                _require(account, needs, request)
                for permission, resource in further(request) if further else ():
                    account.require(permission, resource)
            return handler(request)

        return call


def guarded(handler: Handler, needs: tuple[Need, ...]) -> Handler:
    """A route's handler after the check of what it needs; the resources are variables of the path."""

    def serve(call: Call) -> Any:
        if (account := current.get()) is not None:
            _require(account, needs, _Names(call))
        return handler(call)

    return serve


def acts_as(email: str, project: str) -> tuple[str, str]:
    """What attaching an account to a resource needs; without an e-mail it is Compute Engine's default account."""
    email = email or f"{project}-compute@developer.gserviceaccount.com"
    return "iam.serviceAccounts.actAs", f"projects/{project}/serviceAccounts/{email}"


class _Names:
    """The variables of a call's path as attributes, for `attrgetter`."""

    def __init__(self, call: Call) -> None:
        self.__dict__.update(call.names)


def _need(permission: str, field: str) -> Need:
    return permission, (lambda request: "") if field == "-" else attrgetter(field)


def _require(account: Account, needs: tuple[Need, ...], request: Any) -> None:
    for permission, resource_of in needs:
        account.require(permission, resource_of(request))
