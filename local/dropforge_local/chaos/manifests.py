"""The manifest that a simulated training container commits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def manifest(run: str, attempt: int, now: float, metric: float) -> dict[str, Any]:
    """The commit marker that an attempt writes last."""
    return {
        "version": 1,
        "run": run,
        "attempt": attempt,
        "created": iso(now),
        "spec_sha256": "0" * 64,
        "base": {"uri": "acme/tiny", "revision": "0"},
        "dataset": {"uri": "acme/rows", "revision": "0"},
        "serve_path": f"attempt-{attempt}/model",
        "metrics": {"exact_match": metric},
        "files": [],
    }


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
