"""What a run of the suite left untested because this machine has no Python 3.12, in one line for its end."""

from __future__ import annotations

from collections.abc import Iterable

NO_PYTHON_312 = "MaxText needs Python 3.12"  # tools/maxtext_env.py prints it
TARGETS = ("tpu_vm", "ray")  # MaxText trains on them


def untested_targets(reasons: Iterable[str]) -> str | None:
    """The line for these reasons of skipped tests; None if no test missed Python 3.12."""
    missed = sum(NO_PYTHON_312 in reason for reason in reasons)
    if not missed:
        return None
    targets = " and ".join(TARGETS)
    mend = "install Python 3.12 (as python3.12 in PATH, or with `pyenv install 3.12`) and run `make test-engines` again"
    return f"NOT TESTED: training on the targets {targets} (skipped tests: {missed}); {mend}"
