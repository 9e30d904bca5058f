"""Removes secrets from text that leaves the container."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dropforge.base.redact import TOKEN, redact

from . import redacted_output


class Redactor:
    """Replaces credentials in text: known token formats, the values of the spec's own secrets, and the run's key."""

    def __init__(self, run_key: str = "") -> None:
        self._values: list[str] = []
        self._forms: list[str] = [run_key] if run_key else []

    def learn(self, names: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
        """Remember the values of the environment variables in `names` (the spec's `secrets`)."""
        values = [environ[name] for name in names if environ.get(name)]
        self._values += values
        self._forms += [form for value in values for form in redacted_output.forms(value)]

    def guard_output(self) -> None:
        """From now on, also redact all that this process and its children print."""
        if self._values:
            redacted_output.start(self._values, TOKEN.pattern)

    def __call__(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, "[redacted]")
        return redact(text)
