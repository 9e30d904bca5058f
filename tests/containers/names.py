"""What all tests of containers share: the emulated cloud's project, buckets and topic, the key of the runs, and what an
attempt is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "test-project"
TOPIC = f"projects/{PROJECT}/topics/job-events"
RUNS, DATA = "runs-bucket", "data-bucket"
RUN_KEY = "5" * 64


def attempt_environment(run: str, attempt: int) -> dict[str, str]:
    """The variables by which every platform tells a training container what to train, and where."""
    return {
        "DROPFORGE_PROJECT": PROJECT,
        "DROPFORGE_RUN": run,
        "DROPFORGE_ATTEMPT": str(attempt),
        "DROPFORGE_RUNS_BUCKET": RUNS,
        "DROPFORGE_JOB_EVENTS_TOPIC": TOPIC,
        "DROPFORGE_RUN_KEY": RUN_KEY,
    }


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A job spec in which `changes` replace or extend the parts of `document`."""
    spec = dict(document)
    for name, change in changes.items():
        part = spec.get(name)
        spec[name] = {**part, **change} if isinstance(part, dict) and isinstance(change, dict) else change
    return spec
