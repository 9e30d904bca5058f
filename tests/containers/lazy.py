"""Modules that are imported when a test first uses them, because each worker of the suite imports all test files."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module; the first use imports it. pytest asks all names of a file for private attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
