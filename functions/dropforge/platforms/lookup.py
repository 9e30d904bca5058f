"""How stages find the platforms. A simulation or a test passes other platforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import get_named, get_server, get_target, owner_of, servers, start_seconds_of, targets, usual_of
from .named import NamedServer
from .platform import Usual
from .serving import Server
from .training import Target


def all_adapters() -> list[Target | Server]:
    """Every target and every server: together they list all resources of a deployment."""
    return [*map(get_target, targets()), *map(get_server, servers())]


@dataclass(frozen=True)
class Platforms:
    """The platforms of a context: by the type in a spec, by the kind of a resource, and all of them.

    `usual` and `start_seconds` say how long a kind of resource and a type of endpoint usually take.
    """

    target: Callable[[str], Target] = get_target
    server: Callable[[str], Server] = get_server
    owner: Callable[[str], Target | Server] = owner_of
    all: Callable[[], Iterable[Target | Server]] = all_adapters
    usual: Callable[[str], Usual] = usual_of
    start_seconds: Callable[[str], float] = start_seconds_of
    named: Callable[[str], NamedServer] = get_named
