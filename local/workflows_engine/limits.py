"""The service's limits (cloud.google.com/workflows/quotas); the engine enforces them by default."""

from __future__ import annotations

from dataclasses import dataclass, fields

UNBOUNDED = 2**62


@dataclass(frozen=True)
class Limits:
    """The size of a workflow, and how much an execution may hold and do."""

    source_bytes: int = 128 * 1024
    argument_bytes: int = 32 * 1024
    variables_bytes: int = 512 * 1024
    string_bytes: int = 256 * 1024
    response_bytes: int = 2 * 1024 * 1024
    result_bytes: int = 512 * 1024
    expression_characters: int = 400
    assignments_per_step: int = 50
    conditions_per_switch: int = 50
    parameters: int = 10
    branches: int = 10
    parallel_depth: int = 2
    concurrent_branches: int = 20
    branch_errors: int = 100
    call_depth: int = 20
    steps: int = 100_000
    duration_seconds: int = 365 * 24 * 3600
    sleep_seconds: int = 31_536_000
    http_timeout_seconds: int = 1800
    labels: int = 64
    environment_variables: int = 20
    environment_variable_bytes: int = 4 * 1024
    active_executions: int = 10_000
    queued_executions: int = 100_000
    nodes: int = 200_000  # of a source after the expansion of YAML aliases

    @classmethod
    def lifted(cls) -> Limits:
        """Only the limits that keep the interpreter itself safe: call depth, nesting, alias expansion, int64."""
        kept = ("call_depth", "nodes")
        return cls(**{limit.name: UNBOUNDED for limit in fields(cls) if limit.name not in kept})
