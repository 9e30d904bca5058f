"""Settings of an imaginary deployment."""

from __future__ import annotations

from typing import Any

from dropforge.base.settings import Settings


def settings_with(**changes: Any) -> Settings:
    """Settings whose required values are all "x", but for the changes."""
    return Settings(**{**dict.fromkeys(REQUIRED, "x"), **changes})


REQUIRED = (
    "project",
    "location",
    "specs_bucket",
    "runs_bucket",
    "workflow",
    "requests_topic",
    "job_events_topic",
    "run_events_topic",
    "train_trl_image",
    "serve_vllm_image",
    "trainer_service_account",
    "server_service_account",
)
