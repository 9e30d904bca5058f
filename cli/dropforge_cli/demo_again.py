"""`dropforge demo --again`: two specs put their models behind one URL, the second a better one, and a rollback."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dropforge.base.figures import duration
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec

from . import report
from .callee import callee_of
from .deployment import Deployment
from .display import titled
from .endpoints import token_of
from .follow import show_until_terminal
from .named import PAGE, change, find_endpoint
from .problems import CliError
from .specs import upload_spec

DRAFT_ROWS = 256  # the first model has seen too few rows to be good
DRAFT_HELD_OUT = 32


def check_names(spec: JobSpec) -> None:
    """Raise CliError unless models of the spec can be behind a name."""
    if spec.serve is None or not spec.serve.takes_names:
        found = "no `serve`" if spec.serve is None else f"serve.type {spec.serve.type}"
        raise CliError(f"--again puts two models behind one URL; the spec has {found}", f"{PAGE} says where URLs last")


def demonstrate(deployment: Deployment, spec: JobSpec, path: Path, out: Console) -> bool:
    """Put a hastily trained model behind a name, and then a better one; go back; retire. Whether all succeeded."""
    name, data = spec.name, json.loads(path.read_bytes())
    messages: list[Any] = []
    answers: list[str] = []
    record: Record | None = None
    for word, content in (("first", draft(data, name)), ("second", behind(data, name))):
        run = upload_spec(deployment, json.dumps(content).encode(), f"{word}-{path.name}", again=True)
        out.print(f"dropped the {word} spec into gs://{deployment.settings.specs_bucket}/specs/")
        record = show_until_terminal(deployment, run, out)
        if record.state is not RunState.SUCCEEDED:
            report.show_failure(deployment, deployment.store, record, out)
            return False
        sample = report.held_out_sample(deployment, record)
        messages = messages or (sample["prompt"] if sample else [{"role": "user", "content": "Hello"}])
        answers.append(_ask(deployment, name, messages))
    assert record is not None, "there are two specs"
    report.show_metrics(record, out)
    report.show_parity(record, out)
    out.print()
    out.print(titled("one URL", f"{find_endpoint(deployment, name).base_url}, model {name}"))
    for message in messages:
        out.print(message["content"])
    for word, answer in zip(("first spec", "second spec"), answers, strict=True):
        out.print(f"{word:<14}{answer}", soft_wrap=True)
    began = time.monotonic()
    change(deployment, name, rollback=name)
    after = _ask(deployment, name, messages)
    out.print(f"{'rolled back':<14}{after}", soft_wrap=True, style="green" if after == answers[0] else "yellow")
    out.print(f"the rollback took {duration(time.monotonic() - began)}")
    change(deployment, name, retire=name)
    report.show_stages(record, out)
    report.show_slack(deployment, out)
    return True


def draft(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The spec of the first model: few rows, no gate, and a name."""
    dataset = {**data["dataset"], "limit": min(DRAFT_ROWS, data["dataset"].get("limit") or DRAFT_ROWS)}
    evaluation = {key: value for key, value in (data.get("evaluation") or {}).items() if key != "gate"}
    if "max_rows" in evaluation:
        evaluation["max_rows"] = min(DRAFT_HELD_OUT, evaluation["max_rows"])
    return {**behind(data, name), "dataset": dataset, **({"evaluation": evaluation} if evaluation else {})}


def behind(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The spec, whose model gets behind a name. `$schema` is for editors, and relative to the spec's own place."""
    kept = {key: value for key, value in data.items() if key != "$schema"}
    return {**kept, "serve": {**data["serve"], "endpoint": name}}


def _ask(deployment: Deployment, name: str, messages: list[Any]) -> str:
    called = callee_of(deployment, name)
    return report.ask(called.endpoint, messages, token_of(deployment, called.spec)).strip()
