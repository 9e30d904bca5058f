"""What Cloud Run's front end refuses in any request, over REST and gRPC: malformed names and unknown regions."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from dropforge_local.base.errors import ApiError

from ..kit.routing import variable_of
from ..kit.rpc import snake_case
from . import rules
from .config import CloudRunConfig
from .methods import METHODS

NAMES = {snake_case(method.name): variable_of(method.http[0]) for method in METHODS}


class Admitted:
    """The methods of the API, each after a check of the name in its request."""

    def __init__(self, implementation: object, config: CloudRunConfig) -> None:
        self._implementation = implementation
        self._config = config

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        handler = getattr(self._implementation, method)
        field, pattern = NAMES[method]
        read = attrgetter(field)

        def call(request: Any) -> Any:
            name = read(request)
            if not pattern.fullmatch(name):
                raise ApiError("INVALID_ARGUMENT", f"{field} is {name!r}; expected a name such as {pattern.pattern!r}")
            rules.check_region(name.split("/")[3], self._config)
            return handler(request)

        return call
