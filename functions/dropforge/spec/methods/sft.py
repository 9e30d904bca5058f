"""Supervised fine-tuning: the model learns the answers of conversations, or whole plain texts."""

from __future__ import annotations

from . import Method

METHOD = Method(
    title="supervised fine-tuning",
    trainers=("trl", "maxtext"),
    data="rows",
    starts_from_base=True,
    metrics=("exact_match", "loss"),
)
