"""The job spec: its models, and `parse_spec`, the way in."""

from __future__ import annotations

from .job import Columns, Dataset, Evaluation, JobSpec, Limits, SyntheticDataset, job_spec_schema
from .kinds import ServeSpec, TargetSpec, serving_seconds
from .parse import MAX_SPEC_BYTES, parse_spec
from .parts import seconds

__all__ = [
    "MAX_SPEC_BYTES",
    "Columns",
    "Dataset",
    "Evaluation",
    "JobSpec",
    "Limits",
    "ServeSpec",
    "SyntheticDataset",
    "TargetSpec",
    "job_spec_schema",
    "parse_spec",
    "seconds",
    "serving_seconds",
]
