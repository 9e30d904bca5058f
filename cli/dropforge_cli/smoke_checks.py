"""What `dropforge smoke` checks: each line of docs/cloud-checklist.md that a program can look at from outside.

Each check gives a Result: passed, failed, or not checked with the reason, which is never taken for passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import requests

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import DropforgeError
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.listing import Listed
from dropforge.platforms import targets
from dropforge.run.artifacts import Manifest, checkpoints, model_prefix, read_manifest, verify_manifest
from dropforge.run.record import Endpoint, Ledger, Record, ResourceState, RunState
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge.stages.sweep.orphans import list_all

from .audit import compare
from .deployment import Deployment
from .display import usd
from .report import ANSWER_SECONDS, ANSWER_TOKENS, slack_texts

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
HASHED_BYTES = 64 << 20  # larger files are compared by the checksum that Cloud Storage computes
BLINK_LOOKS = 10  # what lasts for less may not be seen by any look

PROMISES = {
    "run-appears": "a dropped spec becomes a run",
    "run-states": "the record enters its states in order, and ends with success",
    "one-execution": "a run has one execution of the workflow, with the run's label",
    "training-labels": "the cloud lists the training resource, with the labels of its run and deployment",
    "execution-token": "a Cloud Run job has one execution, named after the job and its token",
    "executions-listed": "executions of the workflow are listed newest first, with labels",
    "job-events": "the container's events arrive: started, progress, success",
    "accelerator-seen": "the container says that it trains on an accelerator",
    "checkpoint": "a complete checkpoint is in the runs bucket",
    "manifest": "the manifest is there, and every file is what it says",
    "report": "report.json is there",
    "cost": "the run has cost no more than its limit",
    "endpoint-answers": "the endpoint answers a completion over the OpenAI API",
    "endpoint-refuses": "the endpoint refuses a call without a token",
    "cancel-ends": "a run that is cancelled while it trains ends, and leaves nothing",
    "ledger-gone": "every resource of the ledger was seen to be gone",
    "audit-clean": "the cloud lists nothing of the runs",
    "slack-told": "people were told in Slack how the run ended",
}
# What a check shows besides, in the cloud only: the check, and the target on which it must have passed (None: any).
IMPLIED: dict[str, tuple[str, str | None]] = {
    "functions-token": ("run-states", None),
    "service-triggers": ("job-events", None),
    **{shown: (check, target) for target, training in targets().items() for shown, check in training.smoke_shows},
}
# What no program can see that only drops specs; docs/cloud-checklist.md says what is expected.
BY_HAND = (
    "callback-again", "quota-refusal", "gpu-twelve-hours", "memory-estimate", "unknown-reservation",
    "flex-and-reservations", "new-cluster-rights", "node-account", "dns-endpoint", "spot-end", "internal-address",
    "no-machines", "pod-security", "queue-metric", "distributed-loading", "missing-object", "refused-insert",
    "job-rights", "execution-list-rights", "custom-roles", "dead-letter-topic", "internal-workflows", "alert-labels",
    "tpu-address", "tpu-tags", "tpu-chips", "tpu-vllm", "tpu-cache", "tpu-logs", "tpu-chips-freed", "tpu-boot-disk",
    "tpu-deleted", "quota-ids", "quota-units", "quota-places", "quota-flex-start", "quota-in-use",
    "troubleshooter-answers", "troubleshooter-rights", "troubleshooter-denies", "quota-project",
)  # fmt: skip
NEEDED_EVENTS = ("started", "progress", "succeeded")


class Result(NamedTuple):
    """What became of one promise, for one run; of the whole smoke test when `target` is empty."""

    status: str
    promise: str
    target: str
    message: str


@dataclass
class Seen:
    """What was seen of one run. `cancels`: it was to be cancelled as soon as it trained."""

    target: str
    spec: JobSpec
    limit_usd: float
    object_name: str
    cancels: bool = False
    run: str = ""
    record: Record | None = None
    ledger: Ledger = field(default_factory=lambda: Ledger(run=""))
    events: dict[str, Any] = field(default_factory=dict)  # the latest of each kind
    training: list[Listed] = field(default_factory=list)
    executions: list[str] = field(default_factory=list)  # of its Cloud Run job
    answers: list[Result] = field(default_factory=list)
    cancel_asked: bool = False

    @property
    def label(self) -> str:
        return f"{self.target} (cancelled)" if self.cancels else self.target

    @property
    def is_over(self) -> bool:
        return self.record is not None and self.record.state.is_terminal

    def says(self, promise: str, problem: str, fine: str) -> Result:
        """Failed with a problem, passed without."""
        return Result(FAILED if problem else PASSED, promise, self.label, problem or fine)

    def silent(self, promise: str, why: str) -> Result:
        return Result(NOT_CHECKED, promise, self.label, why)


def check_run(seen: Seen, store: RunStore, deployment: Deployment) -> list[Result]:
    """Everything that a run which is over shows."""
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
    """A check that Google or the network refuses has failed."""
    try:
        return check()
    except refusals() as error:
        return Result(FAILED, promise, target, f"{type(error).__name__}: {str(error)[:300]}")


def refusals() -> tuple[type[Exception], ...]:
    """What is raised when Google, the network or dropforge itself refuses a call."""
    return (*client_errors(), DropforgeError, OSError)


def implied(results: Iterable[Result], deployment: Deployment) -> Iterator[Result]:
    """What the other results show by the way. The local stack is no evidence of what Google does."""
    known = list(results)
    for promise, (base, target) in IMPLIED.items():
        found = [one for one in known if one.promise == base and (target is None or one.target.startswith(target))]
        if deployment.stack is not None:
            yield Result(NOT_CHECKED, promise, "", "only the cloud can show it")
        elif any(one.status == PASSED for one in found):
            yield Result(PASSED, promise, "", f"shown by {base}")
        else:
            yield Result(NOT_CHECKED, promise, "", f"{base} has not passed{f' on {target}' if target else ''}")


def run_states(seen: Seen) -> Result:
    assert seen.record is not None, "checked only of runs that have appeared"
    history = seen.record.history
    states = list(dict.fromkeys(entered.state for entered in history))  # another attempt enters some again
    between = [RunState.DEPLOYING] if seen.spec.serve else []
    expected = [RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING, *between]
    expected += [RunState.TEARING_DOWN, RunState.SUCCEEDED]
    way = " → ".join(entered.state.lower() for entered in history)
    problem = "" if states == expected else f"{way}; expected {' → '.join(state.lower() for state in expected)}"
    if any(later.time < earlier.time for earlier, later in pairwise(history)):
        problem = f"the times of {way} do not grow"
    if seen.record.problems:
        problem += "; " + "; ".join(f"{one['pointer']}: {one['message']}" for one in seen.record.problems)
    if seen.record.error is not None:
        problem += f"; {seen.record.error.error_class}: {seen.record.error.message}"
    return seen.says("run-states", problem, way)


def one_execution(seen: Seen, deployment: Deployment) -> Result:
    found = [one for one in executions_of(deployment) if one.labels.get(names.RUN_LABEL) == seen.run]
    ids = [one.name.rpartition("/")[2] for one in found]
    return seen.says(
        "one-execution", "" if len(ids) == 1 else f"{len(ids)} executions {', '.join(ids)}", ", ".join(ids)
    )


def executions_listed(deployment: Deployment) -> Result:
    """Whether the list is as executions.py takes it to be."""
    found = executions_of(deployment)
    starts = [one.start_time for one in found if one.start_time]
    problem = "" if starts == sorted(starts, reverse=True) else "they are not listed newest first"
    if not any(names.RUN_LABEL in one.labels for one in found):
        problem = "none has the label of a run"
    return Result(FAILED if problem else PASSED, "executions-listed", "", problem or f"{len(found)} executions")


def executions_of(deployment: Deployment) -> list[Any]:
    """The newest executions of the workflow."""
    from google.cloud.workflows import executions_v1

    request = executions_v1.ListExecutionsRequest(
        parent=deployment.settings.workflow_name, view=executions_v1.ExecutionView.FULL, page_size=100
    )
    pages = deployment.clients.workflow_executions().list_executions(request, timeout=TIMEOUT_SECONDS).pages
    return list(next(iter(pages)).executions)


def training_labels(seen: Seen, deployment: Deployment) -> Result:
    assert seen.record is not None, "checked only of runs that have appeared"
    if not seen.training:
        lasted = seen.record.stage_seconds(utc_now()).get(RunState.TRAINING, 0.0)
        if lasted < BLINK_LOOKS * deployment.look_seconds:
            return seen.silent("training-labels", "it was gone before it was looked for")
        return seen.says("training-labels", f"the cloud listed none in {lasted:.0f} s of training", "")
    wanted = {names.RUN_LABEL: seen.run, names.DEPLOYMENT_LABEL: deployment.settings.deployment, **seen.spec.labels}
    lacking = [one.name for one in seen.training if not wanted.items() <= one.labels.items() or one.attempt is None]
    problem = f"without their labels: {', '.join(lacking)}" if lacking else ""
    return seen.says("training-labels", problem, ", ".join(one.name for one in seen.training))


def execution_token(seen: Seen) -> Result:
    if not seen.executions:
        return seen.silent("execution-token", "the job was gone before its executions were listed")
    jobs = {name.partition("/executions/")[0] for name in seen.executions}
    named = all(name.rpartition("/")[2].startswith(f"{job_of(name)}-") for name in seen.executions)
    problem = "" if named and len(jobs) == len(seen.executions) else ", ".join(seen.executions)
    return seen.says("execution-token", problem, ", ".join(name.rpartition("/")[2] for name in seen.executions))


def job_of(execution: str) -> str:
    """The short name of an execution's job."""
    return execution.partition("/executions/")[0].rpartition("/")[2]


def job_events(seen: Seen) -> Result:
    missing = [kind for kind in NEEDED_EVENTS if kind not in seen.events]
    problem = f"none of {', '.join(missing)}" if missing else ""
    return seen.says("job-events", problem, ", ".join(sorted(seen.events)))


def accelerator_seen(seen: Seen) -> Result:
    device = getattr(seen.events.get("started"), "device", "")
    if not device:
        return seen.silent("accelerator-seen", "the container named no device")
    problem = "it trained on its CPU" if "cpu" in device.lower() else ""
    return seen.says("accelerator-seen", problem, device)


def checkpoint(seen: Seen, deployment: Deployment) -> Result:
    found = checkpoints(deployment.clients.storage(), deployment.settings.runs_bucket, seen.run)
    told = f"steps {', '.join(str(one.step) for one in found)}"
    return seen.says("checkpoint", "" if found else "there is none", told)


def manifest(seen: Seen, deployment: Deployment) -> Result:
    """Every file by one listing, and those that are small by their bytes."""
    bucket = deployment.settings.runs_bucket
    found = read_manifest(deployment.clients.storage(), bucket, seen.run)
    if found is None:
        return seen.says("manifest", "there is none", "")
    problems = verify_manifest(deployment.clients.storage(), bucket, found)
    small = [file for file in found.files if file.size <= HASHED_BYTES]
    problems = problems or [file.path for file in small if sha256_of(deployment, found, file.path) != file.sha256]
    if not found.files:
        problems = ["it names no files"]
    counted = f"{len(found.files)} files, {len(small)} of them by their sha256"
    return seen.says("manifest", f"not as it says: {'; '.join(problems)}" if problems else "", counted)


def sha256_of(deployment: Deployment, manifest: Manifest, path: str) -> str:
    bucket = deployment.clients.storage().bucket(deployment.settings.runs_bucket)
    blob = bucket.blob(model_prefix(manifest.run) + path)
    return hashlib.sha256(blob.download_as_bytes(timeout=TIMEOUT_SECONDS)).hexdigest()


def report(seen: Seen, store: RunStore) -> Result:
    found = json.loads(store.read(names.report_object(seen.run)).data)
    problem = "" if found["run"] == seen.run else f"it is of {found['run']}"
    return seen.says("report", problem, f"total at most {usd(found['cost_usd']['total_at_most'])}")


def cost(seen: Seen) -> Result:
    assert seen.record is not None, "checked only of runs that have appeared"
    spent = seen.record.cost(utc_now())
    told = f"{usd(spent)} of {usd(seen.limit_usd)}"
    return seen.says("cost", "" if spent is not None and spent <= seen.limit_usd else told, told)


def cancel_ends(seen: Seen) -> Result:
    assert seen.record is not None, "checked only of runs that have appeared"
    if not seen.cancel_asked:
        return seen.silent("cancel-ends", f"it was {seen.record.state} before it was seen to train")
    left = [entry.name for entry in seen.ledger.remaining()]
    problem = "" if seen.record.state is RunState.CANCELLED else f"it is {seen.record.state}"
    return seen.says("cancel-ends", f"left: {', '.join(left)}" if left else problem, "CANCELLED, all gone")


def ledger_gone(seen: Seen) -> Result:
    left = [f"{entry.name} is {entry.state}" for entry in seen.ledger.remaining()]
    gone = sum(entry.state is ResourceState.GONE for entry in seen.ledger.entries)
    return seen.says("ledger-gone", "; ".join(left), f"{gone} resources")


def slack_told(seen: Seen, deployment: Deployment) -> Result:
    """Slack has no list that we may read: only the local stack's sink is asked."""
    if not (seen.spec.notify.slack or deployment.settings.slack_webhook_secret):
        return seen.silent("slack-told", "the deployment has no webhook")
    if deployment.stack is None:
        return seen.silent("slack-told", f"look for {seen.run} in the channel")
    messages = requests.get(f"{deployment.stack.http}/slack/messages", timeout=TIMEOUT_SECONDS).json()["messages"]
    mine = [slack_texts(one["payload"]) for one in messages if seen.run in json.dumps(one["payload"])]
    return seen.says("slack-told", "" if mine else "no message names it", f"{len(mine)} messages")


def check_endpoint(seen: Seen, endpoint: Endpoint, deployment: Deployment) -> list[Result]:
    """Asked as soon as the endpoint is ready: it lives for minutes."""
    return [
        safely("endpoint-refuses", seen.label, lambda: endpoint_refuses(seen, endpoint)),
        safely("endpoint-answers", seen.label, lambda: endpoint_answers(seen, endpoint, deployment)),
    ]


def endpoint_refuses(seen: Seen, endpoint: Endpoint) -> Result:
    answer = _complete(endpoint, {})
    problem = "" if answer.status_code in (401, 403) else f"it answered HTTP {answer.status_code}"
    return seen.says("endpoint-refuses", problem, f"HTTP {answer.status_code}")


def endpoint_answers(seen: Seen, endpoint: Endpoint, deployment: Deployment) -> Result:
    token = _identity_token(deployment)
    if not token:
        return seen.silent("endpoint-answers", "no identity token: `gcloud auth print-identity-token` gave none")
    answer = _complete(endpoint, {"Authorization": f"Bearer {token}"})
    if not answer.ok:
        return seen.says("endpoint-answers", f"HTTP {answer.status_code}: {answer.text[:200]}", "")
    text = answer.json()["choices"][0]["message"]["content"]
    return seen.says("endpoint-answers", "" if text else "the answer is empty", repr(text[:80]))


def _complete(endpoint: Endpoint, headers: dict[str, str]) -> requests.Response:
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": "Question: How many rows?\nContext: CREATE TABLE t (a INT)"}],
        "max_tokens": ANSWER_TOKENS,
    }
    url = f"{endpoint.url}/v1/chat/completions"
    return requests.post(url, json=body, headers=headers, timeout=ANSWER_SECONDS)


def _identity_token(deployment: Deployment) -> str:
    """What shows an endpoint who asks: google-auth gives people none, gcloud does."""
    if deployment.stack is not None:
        return os.environ["DROPFORGE_EMULATOR_TOKEN"]
    if shutil.which("gcloud") is None:
        return ""
    command = ["gcloud", "auth", "print-identity-token"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    return done.stdout.strip()


def audit_clean(runs: Iterable[str], store: RunStore, deployment: Deployment) -> Result:
    """The audit of these runs: what is listed of them, and what their ledgers say."""
    ledgers = {run: store.ledger(run) for run in runs}
    found, problems = list_all(deployment.context.cloud)
    differences = compare(store, ledgers, [one for one in found if one.run in ledgers])
    if differences:
        told = "; ".join(f"{one.difference} {one.name}" for one in differences)
        return Result(FAILED, "audit-clean", "", told)
    if problems:
        return Result(NOT_CHECKED, "audit-clean", "", f"could not be listed: {'; '.join(problems)}")
    return Result(PASSED, "audit-clean", "", f"{len(ledgers)} ledgers agree with the cloud")
