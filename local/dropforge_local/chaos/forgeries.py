"""The marks by which the checker recognises what a hostile trainer has forged."""

from __future__ import annotations

import json
import re
from typing import Any

NOBODY = "unknown-fedcba987654"  # a run that no user has submitted
FIRST_SEQUENCE = 10**14  # of forged job events, far above those of honest ones
BASE = {"uri": "forged", "revision": "0"}  # the base model of forged manifests
STEP = 987_654_321  # of forged series, far above those of honest ones

_EVENT = re.compile(r"runs/[^/]+/events/\d+-(\d+)-[^/]+")


def places(run: str) -> tuple[str, ...]:
    """The prefixes below which only containers of a run write."""
    return tuple(f"{prefix}/{run}/" for prefix in ("models", "checkpoints", "machines"))


def is_forged(manifest: dict[str, Any]) -> bool:
    """Whether a hostile trainer wrote a manifest."""
    return manifest.get("base") == BASE


def is_kept(name: str) -> bool:
    """Whether an object is a forged job event that a function kept, or is about a run that nobody has."""
    event = _EVENT.fullmatch(name)
    forged = event is not None and FIRST_SEQUENCE <= int(event[1]) < 2 * FIRST_SEQUENCE
    return forged or name.startswith(f"runs/{NOBODY}/") or name == f"runs/open/{NOBODY}"


def is_told(content: Any) -> bool:
    """Whether a text of the control plane has the step of a forged series."""
    return str(STEP) in json.dumps(content)
