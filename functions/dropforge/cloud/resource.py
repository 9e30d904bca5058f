"""A cloud resource: its name, its request, and whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass


@dataclass(frozen=True)
class Resource:
    """A cloud resource that would be, or is, created: its ledger name and the request that makes it."""

    kind: str
    name: str
    request: dict[str, Any] = field(default_factory=dict)


def check_owner(name: str, labels: Mapping[str, str], run: str) -> None:
    """Raise CloudError unless what was found under a name of a run's is the run's."""
    if labels.get(names.RUN_LABEL) != run:
        raise CloudError(
            ErrorClass.CONFIG,
            f"{name} exists and belongs to {dict(labels)!r}",
            "delete it, or drop the spec again to get another run id",
        )
