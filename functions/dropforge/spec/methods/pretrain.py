"""Pre-training: random weights learn random tokens. It measures machines, and the model learns nothing useful."""

from __future__ import annotations

from . import Method

METHOD = Method(title="pre-training", trainers=("maxtext",), data="synthetic", starts_from_base=False, metrics=())
