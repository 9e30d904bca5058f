"""The checks of `dropforge smoke`: each line of docs/cloud-checklist.md that a program can check from outside.

A check returns a Result: passed, failed, or not checked with the reason. "Not checked" never counts as passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import requests

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import DropforgeError
from dropforge.base.figures import usd
from dropforge.base.redact import cut
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.listing import Listed
from dropforge.platforms import targets
from dropforge.run.artifacts import Manifest, checkpoints, model_prefix, read_manifest, verify_manifest
from dropforge.run.events import JobEvent
from dropforge.run.record import Endpoint, Ledger, Record, ResourceState, RunState
from dropforge.run.series import Progress
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge.stages.sweep.audit import compare
from dropforge.stages.sweep.orphans import list_all

from .deployment import Deployment
from .endpoints import token_of
from .problems import CliError
from .report import ANSWER_SECONDS, ANSWER_TOKENS

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
HASHED_BYTES = 64 << 20  # larger files are compared by the checksum that Cloud Storage computes
LONG_TASK_SECONDS = 3600  # longer tasks with a GPU are a preview of Cloud Run
MISSABLE_POLLS = 10  # a training shorter than this many polls may be missed

PROMISES = {
    "run-appears": "a dropped spec becomes a run",
    "run-states": "the record enters its states in order, and ends with success",
    "one-execution": "a run has one execution of the workflow, with the run's label",
    "training-labels": "the cloud lists the training resource, with the labels of its run and deployment",
    "execution-token": "a Cloud Run job has one execution, named after the job and its token",
    "gpu-long-task": "Cloud Run accepts a task with a GPU that may take more than an hour",
    "executions-listed": "executions of the workflow are listed newest first, with labels",
    "job-events": "the container's events and its series arrive: started, progress, success",
    "accelerator-seen": "the container reports that it trains on an accelerator",
    "checkpoint": "a complete checkpoint is in the runs bucket",
    "manifest": "the manifest exists, and every file matches it",
    "report": "report.json exists",
    "cost": "the run cost at most its limit",
    "endpoint-answers": "the endpoint answers a completion over the OpenAI API",
    "endpoint-refuses": "the endpoint refuses a call without a token",
    "cancel-ends": "a run that is cancelled while it trains ends, and leaves nothing",
    "ledger-gone": "every resource in the ledger was verified gone",
    "audit-clean": "the cloud lists nothing of the runs",
    "slack-told": "Slack received how the run ended",
}
# Promises that a program cannot check by dropping specs; docs/cloud-checklist.md has the expectations.
BY_HAND = (
    "callback-again", "request-source", "quota-refusal", "running-executions", "run-rates",
    "preview-stages", "ephemeral-disk", "memory-estimate",
    "image-installs", "unknown-reservation", "flex-and-reservations", "new-cluster-rights", "node-account",
    "dns-endpoint", "nccl-transport", "spot-end", "internal-address", "no-machines", "pod-security", "queue-metric",
    "name-on-tpu-vms", "driver-libraries", "kept-code", "ray-workers", "pod-sizes", "tpu-shutdown",
    "distributed-loading", "missing-object", "refused-insert", "job-rights", "execution-list-rights", "custom-roles",
    "dead-letter-topic", "internal-workflows", "alert-labels", "service-agents", "wait-reason",
    "data-buckets-elsewhere", "other-buckets", "dashboard",
    "iap-on-cloud-run", "iap-audience", "iap-host", "iap-stream", "iap-signed-out", "console-object-rights",
    "ask-audience", "logs-address", "dead-letter-count", "open-alerts",
    "ray-probes", "tpu-address", "tpu-tags", "tpu-chips", "tpu-vllm", "tpu-cache", "tpu-logs", "tpu-chips-freed",
    "tpu-boot-disk", "tpu-power-off", "tpu-deleted", "quota-ids", "quota-units", "quota-places", "quota-flex-start",
    "quota-in-use", "troubleshooter-answers", "troubleshooter-rights", "troubleshooter-denies", "quota-project",
    "quota-of-function", "base-images", "provider-hashes", "vllm-image", "build-results", "ray-token",
    "ray-worker-size", "ray-head-disk", "own-cluster-disk", "gpu-pod-storage", "network-policies",
    "ray-operator-policy", "access-token", "access-size", "access-address", "access-tensorstore", "access-streamer",
    "access-header", "rollout-egress", "adapters-on-a-gpu", "disabled-service",
    "trace-api", "trace-repeated", "log-trace", "traffic-by-name", "tag-address", "revision-quota",
    "latest-revision", "canary-counts", "selector-switch", "gateway-programmed", "gateway-settles", "gateway-paths",
    "gateway-streams", "gateway-counts", "gateway-policies", "drain-on-gke",
)  # fmt: skip
NEEDED_EVENTS = ("started", "succeeded")


class Result(NamedTuple):
    """The result of checking a promise for one run, or for the whole smoke test if `target` is empty."""

    status: str
    promise: str
    target: str
    message: str


@dataclass
class Seen:
    """The observations of one run. `cancels`: the test cancels the run as soon as it trains."""

    target: str
    spec: JobSpec
    limit_usd: float
    object_name: str
    cancels: bool = False
    run: str = ""
    record: Record | None = None
    ledger: Ledger = field(default_factory=lambda: Ledger(run=""))
    events: dict[str, JobEvent] = field(default_factory=dict)  # the latest event of each kind
    progress: Progress | None = None  # the latest point of the series
    training: list[Listed] = field(default_factory=list)
    executions: list[str] = field(default_factory=list)  # executions of its Cloud Run job
    answers: list[Result] = field(default_factory=list)
    task_seconds: float = 0.0  # of a cancelled Cloud Run job: how long its task may take
    cancel_asked: bool = False

    @property
    def label(self) -> str:
        return f"{self.target} (cancelled)" if self.cancels else self.target

    @property
    def is_over(self) -> bool:
        return self.record is not None and self.record.state.is_terminal

    def says(self, promise: str, problem: str, fine: str) -> Result:
        """Return FAILED with a problem, PASSED without."""
        return Result(FAILED if problem else PASSED, promise, self.label, problem or fine)

    def silent(self, promise: str, why: str) -> Result:
        return Result(NOT_CHECKED, promise, self.label, why)


def check_run(seen: Seen, store: RunStore, deployment: Deployment) -> list[Result]:
    """Return the results of every check of a finished run."""
    if seen.record is None:
        return [Result(FAILED, "run-appears", seen.label, f"there is no record of {seen.run or seen.object_name}")]
    checks: list[tuple[str, Callable[[], Result]]] = [
        ("one-execution", lambda: one_execution(seen, deployment)),
        ("ledger-gone", lambda: ledger_gone(seen)),
        ("cost", lambda: cost(seen)),
        ("report", lambda: report(seen, store)),
        ("slack-told", lambda: slack_told(seen, deployment)),
    ]
    if seen.cancels:
        checks.append(("cancel-ends", lambda: cancel_ends(seen)))
        if seen.target == "cloud_run":
            checks.append(("gpu-long-task", lambda: gpu_long_task(seen)))
    else:
        checks += [
            ("run-states", lambda: run_states(seen)),
            ("training-labels", lambda: training_labels(seen, deployment)),
            ("job-events", lambda: job_events(seen)),
            ("accelerator-seen", lambda: accelerator_seen(seen)),
            ("checkpoint", lambda: checkpoint(seen, deployment)),
            ("manifest", lambda: manifest(seen, deployment)),
        ]
        if seen.target == "cloud_run":
            checks.append(("execution-token", lambda: execution_token(seen)))
    appeared = Result(PASSED, "run-appears", seen.label, seen.run)
    return [appeared, *(safely(promise, seen.label, check) for promise, check in checks), *seen.answers]


def safely(promise: str, target: str, check: Callable[[], Result]) -> Result:
    """Run a check. A refusal by Google or the network makes the check fail."""
    try:
        return check()
    except refusals() as error:
        return Result(FAILED, promise, target, f"{type(error).__name__}: {cut(str(error), 300)}")


def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions of a call that Google, the network or dropforge refuses."""
    return (*client_errors(), DropforgeError, OSError)


def implied_promises() -> dict[str, tuple[str, str | None]]:
    """Promises that another check proves, in the cloud only: that check, and the target of its run (None: any)."""
    shown = {promise: (check, name) for name, part in targets().items() for promise, check in part.smoke_shows}
    return {"functions-token": ("run-states", None), "service-triggers": ("job-events", None), **shown}


def implied(results: Iterable[Result], deployment: Deployment) -> Iterator[Result]:
    """Yield the results of the promises that other checks prove. The local stack proves nothing about Google."""
    known = list(results)
    for promise, (base, target) in implied_promises().items():
        bases = [
            result
            for result in known
            if result.promise == base and (target is None or result.target.startswith(target))
        ]
        if deployment.stack is not None:
            yield Result(NOT_CHECKED, promise, "", "only the cloud can show it")
        elif any(result.status == PASSED for result in bases):
            yield Result(PASSED, promise, "", f"shown by {base}")
        else:
            yield Result(NOT_CHECKED, promise, "", f"{base} has not passed{f' on {target}' if target else ''}")


def run_states(seen: Seen) -> Result:
    assert seen.record is not None, "only runs that have appeared are checked"
    history = seen.record.history
    states = list(dict.fromkeys(entered.state for entered in history))  # another attempt enters some states again
    between = [RunState.DEPLOYING] if seen.spec.serve else []
    expected = [RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING, *between]
    expected += [RunState.TEARING_DOWN, RunState.SUCCEEDED]
    way = " → ".join(entered.state.lower() for entered in history)
    problem = "" if states == expected else f"{way}; expected {' → '.join(state.lower() for state in expected)}"
    if any(later.time < earlier.time for earlier, later in pairwise(history)):
        problem = f"the times of {way} are not in order"
    if seen.record.problems:
        problem += "; " + "; ".join(f"{problem['pointer']}: {problem['message']}" for problem in seen.record.problems)
    if seen.record.error is not None:
        problem += f"; {seen.record.error.error_class}: {seen.record.error.message}"
    return seen.says("run-states", problem, way)


def one_execution(seen: Seen, deployment: Deployment) -> Result:
    executions = [e for e in executions_of(deployment) if e.labels.get(names.RUN_LABEL) == seen.run]
    ids = [execution.name.rpartition("/")[2] for execution in executions]
    return seen.says(
        "one-execution", "" if len(ids) == 1 else f"{len(ids)} executions {', '.join(ids)}", ", ".join(ids)
    )


def executions_listed(deployment: Deployment) -> Result:
    """Check the order and the labels that functions/dropforge/cloud/executions.py relies on."""
    executions = executions_of(deployment)
    starts = [execution.start_time for execution in executions if execution.start_time]
    problem = "" if starts == sorted(starts, reverse=True) else "the executions are not listed newest first"
    if not any(names.RUN_LABEL in execution.labels for execution in executions):
        problem = "no execution has the label of a run"
    return Result(FAILED if problem else PASSED, "executions-listed", "", problem or f"{len(executions)} executions")


def executions_of(deployment: Deployment) -> list[Any]:
    """Return the newest executions of the workflow."""
    from google.cloud.workflows import executions_v1

    request = executions_v1.ListExecutionsRequest(
        parent=deployment.settings.workflow_name, view=executions_v1.ExecutionView.FULL, page_size=100
    )
    pages = deployment.clients.workflow_executions().list_executions(request, timeout=TIMEOUT_SECONDS).pages
    return list(next(iter(pages)).executions)


def training_labels(seen: Seen, deployment: Deployment) -> Result:
    assert seen.record is not None, "only runs that have appeared are checked"
    if not seen.training:
        lasted = seen.record.stage_seconds(utc_now()).get(RunState.TRAINING, 0.0)
        if lasted < MISSABLE_POLLS * deployment.poll_seconds:
            return seen.silent("training-labels", "the training ended before the resource could be listed")
        return seen.says("training-labels", f"the cloud listed no resource in {lasted:.0f} s of training", "")
    expected = {names.RUN_LABEL: seen.run, names.DEPLOYMENT_LABEL: deployment.settings.deployment, **seen.spec.labels}
    lacking = [r.name for r in seen.training if not expected.items() <= r.labels.items() or r.attempt is None]
    problem = f"without their labels: {', '.join(lacking)}" if lacking else ""
    return seen.says("training-labels", problem, ", ".join(resource.name for resource in seen.training))


def execution_token(seen: Seen) -> Result:
    if not seen.executions:
        return seen.silent("execution-token", "the job was deleted before its executions were listed")
    jobs = {name.partition("/executions/")[0] for name in seen.executions}
    named = all(name.rpartition("/")[2].startswith(f"{job_of(name)}-") for name in seen.executions)
    problem = "" if named and len(jobs) == len(seen.executions) else ", ".join(seen.executions)
    return seen.says("execution-token", problem, ", ".join(name.rpartition("/")[2] for name in seen.executions))


def job_of(execution: str) -> str:
    """Return the short name of an execution's job."""
    return execution.partition("/executions/")[0].rpartition("/")[2]


def job_events(seen: Seen) -> Result:
    missing = [kind for kind in NEEDED_EVENTS if kind not in seen.events] + ["progress"] * (not seen.progress)
    problem = f"missing: {', '.join(missing)}" if missing else ""
    return seen.says("job-events", problem, ", ".join(sorted(seen.events)))


def accelerator_seen(seen: Seen) -> Result:
    device = getattr(seen.events.get("started"), "device", "")
    if not device:
        return seen.silent("accelerator-seen", "the container named no device")
    problem = "the container trained on its CPU" if "cpu" in device.lower() else ""
    return seen.says("accelerator-seen", problem, device)


def checkpoint(seen: Seen, deployment: Deployment) -> Result:
    saved = checkpoints(deployment.clients.storage(), deployment.settings.runs_bucket, seen.run)
    steps = f"steps {', '.join(str(save.step) for save in saved)}"
    return seen.says("checkpoint", "" if saved else "there is no checkpoint", steps)


def manifest(seen: Seen, deployment: Deployment) -> Result:
    """Check every file by one listing, and small files also by their bytes."""
    bucket = deployment.settings.runs_bucket
    model = read_manifest(deployment.clients.storage(), bucket, seen.run)
    if model is None:
        return seen.says("manifest", "there is no manifest", "")
    problems = verify_manifest(deployment.clients.storage(), bucket, model)
    small = [file for file in model.files if file.size <= HASHED_BYTES]
    problems = problems or [file.path for file in small if sha256_of(deployment, model, file.path) != file.sha256]
    if not model.files:
        problems = ["it names no files"]
    counted = f"{len(model.files)} files, {len(small)} of them by sha256"
    return seen.says("manifest", f"differs from the files: {'; '.join(problems)}" if problems else "", counted)


def sha256_of(deployment: Deployment, manifest: Manifest, path: str) -> str:
    bucket = deployment.clients.storage().bucket(deployment.settings.runs_bucket)
    blob = bucket.blob(model_prefix(manifest.run) + path)
    return hashlib.sha256(blob.download_as_bytes(timeout=TIMEOUT_SECONDS)).hexdigest()


def report(seen: Seen, store: RunStore) -> Result:
    written = json.loads(store.read(names.report_object(seen.run)).data)
    problem = "" if written["run"] == seen.run else f"it is the report of {written['run']}"
    return seen.says("report", problem, f"total at most {usd(written['cost_usd']['total_at_most'])}")


def cost(seen: Seen) -> Result:
    assert seen.record is not None, "only runs that have appeared are checked"
    spent = seen.record.cost(utc_now())
    message = f"{usd(spent)} of {usd(seen.limit_usd)}"
    return seen.says("cost", "" if spent is not None and spent <= seen.limit_usd else message, message)


def cancel_ends(seen: Seen) -> Result:
    assert seen.record is not None, "only runs that have appeared are checked"
    if not seen.cancel_asked:
        return seen.silent("cancel-ends", f"the run was {seen.record.state} before its training was observed")
    left = [entry.name for entry in seen.ledger.remaining()]
    problem = "" if seen.record.state is RunState.CANCELLED else f"the run is {seen.record.state}"
    return seen.says("cancel-ends", f"left: {', '.join(left)}" if left else problem, "CANCELLED, all gone")


def gpu_long_task(seen: Seen) -> Result:
    if not seen.task_seconds:
        return seen.silent("gpu-long-task", "the job was gone before it was read")
    is_long = seen.task_seconds > LONG_TASK_SECONDS
    problem = "" if is_long else f"the task may take {seen.task_seconds:g} s, which needs no preview"
    return seen.says("gpu-long-task", problem, f"the task may take {seen.task_seconds:g} s")


def ledger_gone(seen: Seen) -> Result:
    left = [f"{entry.name} is {entry.state}" for entry in seen.ledger.remaining()]
    gone = sum(entry.state is ResourceState.GONE for entry in seen.ledger.entries)
    return seen.says("ledger-gone", "; ".join(left), f"{gone} resources")


def slack_told(seen: Seen, deployment: Deployment) -> Result:
    """Only the local stack lists messages; Slack has no list that dropforge may read."""
    if not (seen.spec.notify.slack or deployment.settings.slack_webhook_secret):
        return seen.silent("slack-told", "the deployment has no webhook")
    if deployment.stack is None:
        return seen.silent("slack-told", f"search the channel for {seen.run}")
    messages = requests.get(f"{deployment.stack.http}/slack/messages", timeout=TIMEOUT_SECONDS).json()["messages"]
    payloads = [message["payload"] for message in messages if seen.run in json.dumps(message["payload"])]
    return seen.says("slack-told", "" if payloads else "no message names the run", f"{len(payloads)} messages")


def check_endpoint(seen: Seen, endpoint: Endpoint, deployment: Deployment) -> list[Result]:
    """Call the endpoint. This happens as soon as it is ready, because it lives only for minutes."""
    return [
        safely("endpoint-refuses", seen.label, lambda: endpoint_refuses(seen, endpoint)),
        safely("endpoint-answers", seen.label, lambda: endpoint_answers(seen, endpoint, deployment)),
    ]


def endpoint_refuses(seen: Seen, endpoint: Endpoint) -> Result:
    answer = _complete(endpoint, {})
    problem = "" if answer.status_code in (401, 403) else f"the endpoint answered HTTP {answer.status_code}"
    return seen.says("endpoint-refuses", problem, f"HTTP {answer.status_code}")


def endpoint_answers(seen: Seen, endpoint: Endpoint, deployment: Deployment) -> Result:
    try:
        token = token_of(deployment, seen.spec)
    except CliError as error:
        return seen.silent("endpoint-answers", f"no token: {error.message}")
    answer = _complete(endpoint, {"Authorization": f"Bearer {token}"})
    if not answer.ok:
        return seen.says("endpoint-answers", f"HTTP {answer.status_code}: {cut(answer.text, 200)}", "")
    text = answer.json()["choices"][0]["message"]["content"]
    return seen.says("endpoint-answers", "" if text else "the answer is empty", repr(cut(text, 80)))


def _complete(endpoint: Endpoint, headers: dict[str, str]) -> requests.Response:
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": "Question: How many rows?\nContext: CREATE TABLE t (a INT)"}],
        "max_tokens": ANSWER_TOKENS,
    }
    url = f"{endpoint.url}/v1/chat/completions"
    return requests.post(url, json=body, headers=headers, timeout=ANSWER_SECONDS)


def audit_clean(runs: Iterable[str], store: RunStore, deployment: Deployment) -> Result:
    """Compare the ledgers of these runs with the cloud's list."""
    ledgers = {run: store.ledger(run) for run in runs}
    resources, problems = list_all(deployment.context.cloud)
    differences = compare(store, ledgers, [resource for resource in resources if resource.run in ledgers])
    if differences:
        message = "; ".join(f"{difference.difference} {difference.name}" for difference in differences)
        return Result(FAILED, "audit-clean", "", message)
    if problems:
        return Result(NOT_CHECKED, "audit-clean", "", f"cannot be listed: {'; '.join(problems)}")
    return Result(PASSED, "audit-clean", "", f"{len(ledgers)} ledgers agree with the cloud")
