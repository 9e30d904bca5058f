"""The job spec: its models, and `parse_spec`, the way in."""

from __future__ import annotations

from .job_spec import JobSpec, ServeSpec, TargetSpec, job_spec_schema, serving_seconds
from .parse import MAX_SPEC_BYTES, parse_spec
from .parts import seconds
from .sections import Columns, Dataset, Evaluation, Limits, SyntheticDataset

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
