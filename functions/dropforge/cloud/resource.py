"""A cloud resource: its name, the request that creates it, and its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass


@dataclass(frozen=True)
class Resource:
    """A cloud resource: its kind and name in the ledger, and the request that creates it."""

    kind: str
    name: str
    request: dict[str, Any] = field(default_factory=dict)


def check_owner(name: str, labels: Mapping[str, str], run: str) -> None:
    """Raise CloudError if the labels of the resource `name` do not name `run`."""
    if labels.get(names.RUN_LABEL) != run:
        raise CloudError(
            ErrorClass.CONFIG,
            f"{name} exists and belongs to {dict(labels)!r}",
            "delete it, or drop the spec again to get another run id",
        )
