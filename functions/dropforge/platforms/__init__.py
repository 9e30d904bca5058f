"""The platforms: where runs train and where models are served.

A platform is a folder: the classes of its part of the spec (spec.py), Google's offer there (catalog.py), training
(train.py), serving (serve.py), and the declaration that the rest of dropforge reads (PLATFORM in `__init__.py`). The
functions here search the declarations of all registered platforms.
"""

from __future__ import annotations

from dropforge.spec import registry

from .named import NamedServer
from .platform import Platform, Serving, Training, Usual
from .serving import Server
from .training import Target


def targets() -> dict[str, Training]:
    """How each target trains, by the `type` of its spec."""
    declared = [platform.training for platform in registry.platforms() if platform.training]
    return {training.spec.type_name(): training for training in declared}


def servers() -> dict[str, Serving]:
    """How each type of endpoint is served, by the `type` of its spec."""
    return {serving.spec.type_name(): serving for platform in registry.platforms() for serving in platform.serving}


def get_target(kind: str) -> Target:
    """The target of that type. Raises KeyError for an unknown type: specs are validated before."""
    return targets()[kind].load()


def get_server(kind: str) -> Server:
    """The endpoint of that type. Raises KeyError for an unknown type: specs are validated before."""
    return servers()[kind].load()


def get_named(kind: str) -> NamedServer:
    """The adapter of named endpoints of that type. Raises KeyError for an unknown type: specs are validated before."""
    return servers()[kind].load_named()


def owner_of(kind: str) -> Target | Server:
    """The adapter that deletes resources of that kind. Raises KeyError for a kind that no platform declares."""
    for platform in registry.platforms():
        for part in platform.parts:
            if kind in part.kinds:
                return part.load()
    raise KeyError(f"no platform declares resources of kind {kind!r}; expected it in a `kinds` of a PLATFORM")


def usual_of(kind: str) -> Usual:
    """How long the creation and the deletion of a resource of that kind usually take."""
    parts = (part for platform in registry.platforms() for part in platform.parts)
    return next((part.usual[kind] for part in parts if kind in part.usual), Usual())


def start_seconds_of(kind: str) -> float:
    """How long an endpoint of that type usually takes until it answers. Raises KeyError for an unknown type."""
    return servers()[kind].start_seconds


def platform_of(kind: str) -> Platform:
    """The platform that has a target or an endpoint of that type. Raises KeyError for an unknown type."""
    for platform in registry.platforms():
        if kind in [part.spec.type_name() for part in platform.parts]:
            return platform
    raise KeyError(kind)
