"""A container's log for people: one line for each entry, with its local time, severity, message, step and loss.

The containers of dropforge write JSON lines (dropforge/base/log.py). Everything else, such as a traceback or the log of
vLLM, stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from .redact import redact

# In the order of the columns of `gcloud logging`, which prints an empty text for a missing field.
FIELDS = ("timestamp", "severity", "textPayload", "message", "step", "total_steps", "loss", "hint")
_PAYLOAD = FIELDS[3:]
GCLOUD_FORMAT = f"value({', '.join([*FIELDS[:3], *(f'jsonPayload.{name}' for name in _PAYLOAD)])})"
_USUAL = ("", "INFO", "DEFAULT", "NOTICE")  # severities that say nothing


def readable(line: str) -> str:
    """Return a line of a container's log for people, without credentials: the escapes of JSON may have hidden some."""
    entry = _json(line)
    return redact(line if entry is None else _text(entry))


def readable_gcloud(line: str) -> str:
    """Return a line that `gcloud logging` printed in GCLOUD_FORMAT for people; a further line of a text as it is."""
    entry = _columns(line)
    if entry is None:
        return redact(line.rstrip("\t"))
    # A container without Google's agent has its line of JSON in the text.
    inner = _json(str(entry["textPayload"] or entry["message"]))
    return redact(_text({**entry, **(inner or {}), "time": entry["timestamp"]}))


def entries(lines: Iterable[str]) -> Iterator[list[str]]:
    """Group the lines that `gcloud logging` printed: an entry begins with a time, and its text may have more lines."""
    entry: list[str] = []
    for line in lines:
        if entry and _columns(line) is not None:
            yield entry
            entry = []
        entry.append(line)
    if entry:
        yield entry


def _json(line: str) -> dict[str, Any] | None:
    """The entry in a line; None if the line does not begin an entry."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry.get("message"), str) else None


def _columns(line: str) -> dict[str, Any] | None:
    parts = line.split("\t")
    if len(parts) < 3 or not _local_time(parts[0]):
        return None
    # A text may have tabs. If it has more lines, the columns after it are at the end of its last line.
    after = len(parts) - len(_PAYLOAD) if len(parts) >= len(FIELDS) else len(parts)
    payload = dict(zip(_PAYLOAD, parts[after:], strict=False))
    return {
        "timestamp": parts[0],
        "severity": parts[1],
        "textPayload": "\t".join(parts[2:after]),
        "message": "",
        **payload,
    }


def _text(entry: dict[str, Any]) -> str:
    severity = str(entry.get("severity") or "")
    parts = [str(entry.get("message") or entry.get("textPayload") or "")]
    if (step := entry.get("step")) not in (None, ""):
        total = entry.get("total_steps")
        parts.append(f"step {step}" + (f" of {total}" if total not in (None, "") else ""))
    if (loss := entry.get("loss")) not in (None, ""):
        parts.append(f"loss {_short(loss)}")
    if hint := entry.get("hint"):
        parts.append(f"hint: {hint}")
    start = [_local_time(entry.get("time")), "" if severity in _USUAL else severity]
    return " ".join([*filter(None, start), ", ".join(parts)])


def _local_time(text: Any) -> str:
    """A time of RFC 3339 as month, day and time of day here; "" for anything else."""
    try:
        return f"{datetime.fromisoformat(text).astimezone():%m-%d %H:%M:%S}"
    except (TypeError, ValueError, OverflowError):
        return ""


def _short(number: Any) -> str:
    try:
        return f"{float(number):.4g}"
    except (TypeError, ValueError, OverflowError):
        return str(number)
