"""How a run ended: the reason of its failure, or its metrics and its endpoint. Every command prints it like this."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Console

from dropforge.base.figures import number, usd
from dropforge.endpoints.record import EndpointRecord
from dropforge.run.record import Endpoint, Record

from .display import joined
from .endpoints import call_lines, named_lines


def show_result(record: Record, named: Iterable[EndpointRecord], now: datetime, out: Console) -> None:
    """Print why a run did not succeed, its metrics, its endpoints (`named`: the named ones), and its cost so far."""
    show_reason(record, out)
    if parts := _metrics(record.metrics):
        out.print(joined(parts, out.width))
    if record.endpoint is not None:
        out.print(f"endpoint {record.endpoint.base_url}", soft_wrap=True)
        out.print(f"  model {record.endpoint.model}, {_lifetime(record.endpoint, now)}")
        for line in call_lines(record):
            out.print(f"  {line}", soft_wrap=True)
    for endpoint in named:
        for line in named_lines(endpoint, record.run):
            out.print(line, soft_wrap=True)
    if record.attempts:
        training, serving = record.training_cost(now), record.serving_cost(now)
        parts = [f"training {usd(training)}"] + ([] if serving == 0 else [f"endpoint at most {usd(serving)}"])
        out.print(f"cost so far: {usd(record.cost(now))} ({', '.join(parts)})")


def show_reason(record: Record, out: Console) -> None:
    """Print the problems of a rejected spec, or the class, message and hint of the error of a failed run."""
    for problem in record.problems:
        values = [f"{key} {problem[key]}" for key in ("found", "expected") if problem.get(key)]
        text = "; ".join([str(problem["message"]), *values])
        out.print(f"{problem['pointer'] or '/'}: {text}", style="red", soft_wrap=True)
    if record.error is not None:
        out.print(f"{record.error.error_class}: {record.error.message}", style="red", soft_wrap=True)
        if record.error.hint:
            out.print(f"hint: {record.error.hint}", soft_wrap=True)


def _metrics(metrics: dict[str, float | None]) -> list[str]:
    """Return each metric as text; a metric that was measured before and after the training is one text."""
    parts = []
    for name, value in metrics.items():
        before = metrics.get(f"{name}_before")
        if value is not None and not (name.endswith("_before") and name.removesuffix("_before") in metrics):
            parts.append(f"{name} {f'{number(before)} → ' if before is not None else ''}{number(value)}")
    return parts


def _lifetime(endpoint: Endpoint, now: datetime) -> str:
    if endpoint.ended:
        return f"ended {endpoint.ended:%Y-%m-%d %H:%M} UTC"
    spent = ", when the budget is spent" if endpoint.limit == "max_cost_usd" else ""
    return f"{'until' if now < endpoint.expires else 'expired'} {endpoint.expires:%Y-%m-%d %H:%M} UTC{spent}"
