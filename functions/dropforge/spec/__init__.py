"""The job spec: its models, and `parse_spec`, the way in."""

from __future__ import annotations

from .job import Columns, Dataset, Evaluation, JobSpec, Limits, SyntheticDataset, job_spec_schema
from .parse import MAX_SPEC_BYTES, parse_spec
from .parts import redact, seconds
from .serving import CloudRunServe, GkeServe, TpuVmServe, TrainingVmServe, serving_seconds
from .targets import CloudRunTarget, GkePlacement, GkeTarget, RayTarget, TpuVmTarget, accelerators_of

__all__ = [
    "MAX_SPEC_BYTES",
    "CloudRunServe",
    "CloudRunTarget",
    "Columns",
    "Dataset",
    "Evaluation",
    "GkePlacement",
    "GkeServe",
    "GkeTarget",
    "JobSpec",
    "Limits",
    "RayTarget",
    "SyntheticDataset",
    "TpuVmServe",
    "TpuVmTarget",
    "TrainingVmServe",
    "accelerators_of",
    "job_spec_schema",
    "parse_spec",
    "redact",
    "seconds",
    "serving_seconds",
]
