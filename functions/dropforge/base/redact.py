"""Removes credentials from text that leaves the process."""

from __future__ import annotations

import re

# Providers give credentials these prefixes so that scanners find leaked credentials.
TOKEN = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|https://hooks\.slack\.com/services/\S+|AKIA[A-Z0-9]{16})"
)


def redact(text: str) -> str:
    """`text` with each credential-like part replaced by `[redacted]`."""
    return TOKEN.sub("[redacted]", text)
