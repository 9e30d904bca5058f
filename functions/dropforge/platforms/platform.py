"""The declaration of a platform: everything that the rest of dropforge needs to know about it.

Each platform's folder has a declaration, PLATFORM in its `__init__.py`. The declaration imports the spec classes and
the catalog, which are light. The adapters that call Google APIs are imported when they are first needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from dropforge.base.errors import DropforgeError
from dropforge.base.settings import Settings
from dropforge.spec.job_spec import ServeSpec, TargetSpec

if TYPE_CHECKING:
    from .named import NamedServer
    from .serving import Server
    from .training import Target


class Permission(NamedTuple):
    """A permission that an account of the deployment needs; account and scope as in terraform/permissions.yaml."""

    account: str
    scope: str
    permission: str


class Usual(NamedTuple):
    """How many seconds the creation and the deletion of a resource usually take. Stages look again by this."""

    creation: float = 30
    deletion: float = 30


@dataclass(frozen=True)
class Training:
    """How a platform trains.

    `adapter` is "module:class"; the class implements `Target`. `kinds` are the kinds of the resources that it creates
    and deletes, as in the ledger. `needs` are the fields of Settings without which a deployment does not have the
    target. `permissions` are the permissions whose absence would fail a run only after its acceptance. `smoke_shows`
    are pairs of a check in docs/cloud-checklist.md and the check of `dropforge smoke` that shows it on this target.
    `usual` has the kinds that usually take minutes.
    """

    spec: type[TargetSpec]
    adapter: str
    kinds: tuple[str, ...]
    needs: tuple[str, ...] = ()
    permissions: tuple[Permission, ...] = ()
    smoke_shows: tuple[tuple[str, str], ...] = ()
    usual: Mapping[str, Usual] = field(default_factory=dict)

    def is_enabled(self, settings: Settings) -> bool:
        """Whether the deployment has everything that the target needs."""
        return all(getattr(settings, name) for name in self.needs)

    def load(self) -> Target:
        """The adapter, imported on use."""
        from .training import Target

        target: Target = _load(self.adapter, Target)
        return target


@dataclass(frozen=True)
class Serving:
    """How a platform serves a type of endpoint; see `Training` for the fields. The class implements `Server`.

    `start_seconds`: how long it usually takes until the endpoint answers. `named` is "module:class" of a `NamedServer`,
    if the platform has named endpoints: `takes_names` of the spec's class says the same.
    """

    spec: type[ServeSpec]
    adapter: str
    kinds: tuple[str, ...] = ()
    permissions: tuple[Permission, ...] = ()
    usual: Mapping[str, Usual] = field(default_factory=dict)
    start_seconds: float = 120
    named: str = ""

    def load(self) -> Server:
        """The adapter, imported on use."""
        from .serving import Server

        server: Server = _load(self.adapter, Server)
        return server

    def load_named(self) -> NamedServer:
        """The adapter of named endpoints, imported on use."""
        from .named import NamedServer

        server: NamedServer = _load(self.named, NamedServer)
        return server


@dataclass(frozen=True)
class Platform:
    """A platform. `services` are the Google APIs that it needs in addition to the APIs of every deployment."""

    name: str
    training: Training | None = None
    serving: tuple[Serving, ...] = ()
    services: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Training | Serving, ...]:
        """How the platform trains, if it does, and how it serves."""
        return (*((self.training,) if self.training else ()), *self.serving)


def _load(adapter: str, protocol: Any) -> Any:
    """An adapter by "module:class". Raises DropforgeError if its class lacks a member of the protocol."""
    module, _, name = adapter.partition(":")
    made = getattr(import_module(module), name)
    lacking = sorted(member for member in _abstract(protocol) if member in _abstract(made) or not hasattr(made, member))
    if lacking:
        where = f"{protocol.__module__}.{protocol.__name__}"
        raise DropforgeError(f"the adapter {adapter!r} lacks {', '.join(lacking)}; expected each member of {where}")
    return made()


def _abstract(cls: type) -> frozenset[str]:
    """The members of a class that a subclass must have."""
    return frozenset(getattr(cls, "__abstractmethods__", ()))
