"""The service's limits (cloud.google.com/workflows/quotas), enforced by default and lifted by one switch."""

from __future__ import annotations

from dataclasses import dataclass

UNBOUNDED = 2**62


@dataclass(frozen=True)
class Limits:
    """How much a workflow may be, hold and do. `Limits.lifted()` is the same without limits of size and number."""

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
    nodes: int = 200_000  # YAML aliases can make a small source mean a huge one

    @classmethod
    def lifted(cls) -> Limits:
        """No limits but those that keep the interpreter itself safe (nesting, alias expansion, int64)."""
        return cls(
            source_bytes=UNBOUNDED,
            argument_bytes=UNBOUNDED,
            variables_bytes=UNBOUNDED,
            string_bytes=UNBOUNDED,
            response_bytes=UNBOUNDED,
            result_bytes=UNBOUNDED,
            expression_characters=UNBOUNDED,
            assignments_per_step=UNBOUNDED,
            conditions_per_switch=UNBOUNDED,
            parameters=UNBOUNDED,
            branches=UNBOUNDED,
            parallel_depth=UNBOUNDED,
            concurrent_branches=UNBOUNDED,
            branch_errors=UNBOUNDED,
            steps=UNBOUNDED,
            duration_seconds=UNBOUNDED,
            sleep_seconds=UNBOUNDED,
            http_timeout_seconds=UNBOUNDED,
            labels=UNBOUNDED,
            environment_variables=UNBOUNDED,
            environment_variable_bytes=UNBOUNDED,
            active_executions=UNBOUNDED,
            queued_executions=UNBOUNDED,
        )
