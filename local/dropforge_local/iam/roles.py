"""The permissions of Google's predefined roles, as far as roles.yaml lists them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

ROLES_FILE = Path(__file__).with_name("roles.yaml")


@cache  # each rule of each boundary asks, and every run has a boundary of its own
def known_roles() -> dict[str, frozenset[str]]:
    """The permissions of each role."""
    listed = yaml.safe_load(ROLES_FILE.read_text())["roles"]
    return {role: frozenset(permissions) for role, permissions in listed.items()}
