"""Names: the ids and labels that Google's APIs accept, resource names, and the names in a state file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dropforge_local.base.db import Database

# An id of at most 63 characters: https://google.aip.dev/122#resource-id-segments (RFC 1035)
ID = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
REGION = re.compile(r"[a-z]+-[a-z]+\d+")
ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")
# https://cloud.google.com/compute/docs/labeling-resources#requirements
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")


def invalid_label(labels: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The first label (key, value) that Google refuses; None when all are valid."""
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not isinstance(value, str) or not LABEL_VALUE.fullmatch(value):
            return key, value
    return None


def location_of(name: str) -> str:
    """projects/P/locations/L of a resource name, or projects/P/zones/Z."""
    return "/".join(name.split("/")[:4])


def parent_pattern(parent: str) -> str:
    """A parent for SQLite's GLOB; its last segment "-" stands for every location."""
    return f"{parent[:-1]}*" if parent.endswith("/-") else parent


class Named:
    """An emulator whose resources are in `tables`, by full resource name."""

    tables: tuple[str, ...]

    @classmethod
    def names_in(cls, db: Database) -> list[str]:
        """The sorted names of the resources in a state file, which may have none of the tables."""
        known = {row["name"] for row in db.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
        rows = [db.rows(f"SELECT name FROM {table}") for table in cls.tables if table in known]
        return sorted(row["name"] for table in rows for row in table)
