"""What an endpoint kind is: three verbs on the served model of one run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ..catalog import HourlyPrice
from ..settings import Settings
from ..spec import JobSpec


@dataclass(frozen=True)
class Deployment:
    """The endpoint of one run, with all that its resources are made from."""

    run: str
    spec: JobSpec
    settings: Settings
    expires: datetime


class Server(Protocol):
    """A place where a model is served. Errors of the cloud are raised as CloudError."""

    def region(self, spec: JobSpec) -> str:
        """Where the endpoint runs."""

    def price(self, spec: JobSpec) -> HourlyPrice:
        """What one instance costs for an hour while it runs."""

    def resources(self, deployment: Deployment) -> list[Any]:
        """What `deploy` creates, in order; pure."""

    def deploy(self, deployment: Deployment) -> str | None:
        """Advance towards a ready endpoint; its URL once the platform calls it ready."""

    def teardown(self, kind: str, name: str) -> bool:
        """Delete one resource; True once it is seen not to exist. Gone already is success."""
