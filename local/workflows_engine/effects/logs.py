"""What executions log: `sys.log` entries, and calls when the execution's call log level asks for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import WorkflowError
from ..interpreter.waits import Wait
from ..values import NotJson, Value, to_json

call_log = logging.getLogger("workflows_engine.effects.calls")
sys_log = logging.getLogger("workflows_engine.effects.sys_log")

_LEVELS = {
    "DEBUG": logging.DEBUG,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "ALERT": logging.CRITICAL,
    "EMERGENCY": logging.CRITICAL,
}


def write_entry(execution: str, entry: Mapping[str, Value]) -> None:
    """Log a `sys.log` entry. The engine calls this after the commit that contains the entry."""
    level = _LEVELS.get(entry["severity"], logging.INFO)
    sys_log.log(level, "%s", _text(entry["data"]), extra={"execution": execution, "severity": entry["severity"]})


def write_call(execution: str, wait: Wait, error: WorkflowError | None) -> None:
    """Log a call that ended, with its error if it failed."""
    outcome = "ok" if error is None else f"failed: {error.context}"
    call_log.log(
        logging.INFO if error is None else logging.ERROR,
        "%s in step %s: %s",
        wait.call,
        wait.step,
        outcome,
        extra={"execution": execution},
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return to_json(value)
    except NotJson:
        return repr(value)
