"""How a run ended: the reason of its failure, or its metrics and its endpoint. Every command prints it like this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from rich.console import Console

from dropforge.base.figures import number, usd
from dropforge.endpoints.record import EndpointRecord
from dropforge.run.record import Endpoint, Record

from .display import joined
from .endpoints import call_lines, named_lines

PAGE = "docs/faq.md#the-model-learnt-nothing"
EXPORT = (
    "adapter_to_merged",
    "adapter_to_saved",
    "trained_to_exported",
    "saved_to_reloaded",
)  # metrics of the export, not of the training


def show_result(
    record: Record, named: Iterable[EndpointRecord], now: datetime, out: Console, *, is_local: bool
) -> None:
    """Print why a run did not succeed, its metrics, its endpoints (`named`: the named ones), and its cost so far."""
    show_reason(record, out)
    for title, parts in _metrics(record.metrics).items():
        out.print(joined(f"{title:9}", parts, out), soft_wrap=True)
    if note := doubt(record.metrics):
        out.print(f"note: {note}", style="yellow", soft_wrap=True)
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
        prices = "cost so far" if not is_local else "cost so far, if it were on the cloud"
        out.print(f"{prices}: {usd(record.cost(now))} ({', '.join(parts)})")


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


def doubt(metrics: Mapping[str, float | None]) -> str:
    """Return what speaks against the trained model although its run succeeded; "" if nothing does."""
    exact, before = metrics.get("exact_match"), metrics.get("exact_match_before")
    loss, loss_before = metrics.get("loss"), metrics.get("loss_before")
    if loss is not None and loss_before is not None and loss >= loss_before:
        found = "the loss on the held-out rows is not lower than before the training"
    elif exact is not None and before is not None and max(exact, before) == 0:
        found = "the model answers none of the held-out rows exactly, as before the training"
    else:
        return ""
    return f"{found}: {PAGE} says what to change"


def _metrics(metrics: Mapping[str, float | None]) -> dict[str, list[str]]:
    """Return each metric as text, by what it is about. A metric from before and after the training is one text."""
    groups: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if value is None or (name.endswith("_before") and name.removesuffix("_before") in metrics):
            continue
        before = metrics.get(f"{name}_before")
        title = "result" if before is not None else "export" if name in EXPORT else "training"
        groups.setdefault(title, []).append(
            f"{name} {f'{number(before)} → ' if before is not None else ''}{number(value)}"
        )
    return {title: groups[title] for title in ("result", "training", "export") if title in groups}


def _lifetime(endpoint: Endpoint, now: datetime) -> str:
    if endpoint.ended:
        return f"ended {endpoint.ended:%Y-%m-%d %H:%M} UTC"
    spent = ", when the budget is spent" if endpoint.limit == "max_cost_usd" else ""
    return f"{'until' if now < endpoint.expires else 'expired'} {endpoint.expires:%Y-%m-%d %H:%M} UTC{spent}"
