"""Code that the tests of targets and endpoints share: stages as the workflow calls them, runs, fault switches."""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.patience import until

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.cloud.resource import Resource
from dropforge.platforms import get_server, get_target
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Launch, Phase, Status, launch_of
from dropforge.run.record import Attempt, Record, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge.stages.sweep import lost_work, orphans

from .. import stage_calls as stages
from ..deployments import forget, here

ME = "the-execution-of-this-test"
ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "tests" / "images" / "containers"
TRAIN_DOCKERFILE = """
FROM python:3.12
WORKDIR /app
COPY containers/train_x/main.py /app/main.py
ENTRYPOINT ["python", "-S", "/app/main.py"]
"""
SERVE_DOCKERFILE = (
    'FROM python:3.11\nWORKDIR /app\nCOPY containers/{name}/serve.py /app/\nENTRYPOINT ["python", "-S", "serve.py"]\n'
)
BROKEN_SERVERS = {
    "serve_crash": "import sys\nprint('the weights do not fit', file=sys.stderr)\nsys.exit(70)\n",
    "serve_deaf": "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\ntime.sleep(600)\n",
}
_numbers = itertools.count()


def write_trainer(home: Path, main_py: str) -> None:
    """Write the image `train-x`, which runs `main_py`, to the image repository at home/repo."""
    folder = home / "repo" / "containers" / "train_x"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(TRAIN_DOCKERFILE)
    (folder / "main.py").write_text(textwrap.dedent(main_py))


def write_servers(home: Path) -> None:
    """Write the images `serve-noop`, `serve-crash` and `serve-deaf` to the image repository at home/repo."""
    containers = home / "repo" / "containers"
    shutil.copytree(IMAGES / "serve_noop", containers / "serve_noop")
    for name, code in BROKEN_SERVERS.items():
        (containers / name).mkdir()
        (containers / name / "serve.py").write_text(code)
        (containers / name / "Dockerfile").write_text(SERVE_DOCKERFILE.format(name=name))


def write_chips(home: Path) -> None:
    """Write the image `serve-chips` to home/repo: the serving container, with a stand-in for vLLM on a TPU."""
    repository, generated = home / "repo", shutil.ignore_patterns("__pycache__")
    for part in ("functions/dropforge", "containers/serve_vllm"):
        shutil.copytree(ROOT / part, repository / part, ignore=generated)
    shutil.copy(ROOT / "containers" / "__init__.py", repository / "containers")
    shutil.copytree(IMAGES / "serve_chips", repository / "containers" / "serve_chips")


def switch_faults(url: str, emulator: str, **switches: Any) -> None:
    """Set the fault switches of `emulator` on the server at `url`."""
    request = urllib.request.Request(f"{url}/_local/{emulator}/faults", json.dumps(switches).encode(), method="POST")
    urllib.request.urlopen(request, timeout=60).close()


def forget_clients() -> None:
    """Drop the context and the clients, so that the next use creates them for the current environment."""
    forget()


def eventually(stage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call the stage until its answer is no longer "call again"; return the last answer."""
    return dict(until(stage, lambda answer: answer["status"] not in ("PENDING", "WAITING")))


def contains(stored: Any, sent: Any) -> bool:
    """Return whether the stored object has every field that was sent; the server may have added fields."""
    if isinstance(sent, dict):
        return all(key in stored and contains(stored[key], value) for key, value in sent.items())
    if isinstance(sent, list):
        return len(stored) >= len(sent) and all(contains(*pair) for pair in zip(stored, sent, strict=False))
    return bool(stored == sent)


@dataclass(frozen=True)
class Stages:
    """Call the methods of a target repeatedly, as the workflow does."""

    target: Any  # a Target, bound to a cloud

    def provision(self, attempt: Launch) -> None:
        until(lambda: self.target.provision(attempt), lambda waits: waits is None)

    def ended(self, attempt: Launch) -> Status:
        phases = (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)
        status: Status = until(lambda: self.target.inspect(attempt), lambda status: status.phase in phases)
        return status

    def wait_for(self, attempt: Launch, phase: Phase) -> Status:
        status: Status = until(lambda: self.target.inspect(attempt), lambda status: status.phase is phase)
        return status

    def tear_down(self, resources: Iterable[Resource]) -> None:
        """Delete the resources until the target confirms that all are gone."""
        pending = list(resources)
        until(lambda: [r for r in pending if not self.target.teardown(r.kind, r.name)], lambda remaining: not remaining)


def make_run(store: RunStore, spec: dict[str, Any], state: RunState = RunState.TRAINING) -> str:
    """Store a run in `state`. The test acts as its execution; no workflow knows this run."""
    run = names.run_id_of_message(f"{time.time_ns()}-{next(_numbers)}")
    states = [RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING]
    history = [Transition(state=passed, time=utc_now()) for passed in states[: states.index(state) + 1]]
    parsed = JobSpec.model_validate_json(json.dumps(spec))
    region, now = get_target(parsed.target.type).regions(parsed)[0], utc_now()
    attempt = Attempt(number=1, placement=0, region=region, started=now, deadline=now + timedelta(hours=1))
    record = Record(
        run=run,
        name="noop",
        source="test",
        state=state,
        created=now,
        history=history,
        execution=ME,
        attempts=[attempt],
    )
    store.put_new(names.spec_object(run), parsed.model_dump_json(by_alias=True).encode())
    store.create(record)
    return run


def is_there(store: RunStore, run: str) -> bool:
    """Return whether the cloud has the resource that serves a run, by the check that the sweep uses."""
    record, spec = store.record(run), store.spec(run)
    assert spec.serve is not None
    deployment = Deployment(run, spec, here().settings, utc_now(), launch_of(record, spec, here().settings, key=""))
    return get_server(spec.serve.type).exists(here().cloud, deployment)


def environment(http: str, grpc: str, **settings: str) -> dict[str, str]:
    """Return environment variables as the functions have them; `settings` replace or extend the deployment's."""
    variables = {
        "PROJECT": "p1",
        "LOCATION": "us-central1",
        "SPECS_BUCKET": "specs",
        "RUNS_BUCKET": "runs",
        "WORKFLOW": "w",
        "REQUESTS_TOPIC": "requests",
        "JOB_EVENTS_TOPIC": "job-events",
        "RUN_EVENTS_TOPIC": "run-events",
        "TRAIN_TRL_IMAGE": "t",
        "SERVE_VLLM_IMAGE": "s",
        "TRAINER_SERVICE_ACCOUNT": "trainer@p1.iam.gserviceaccount.com",
        "SERVER_SERVICE_ACCOUNT": "server@p1.iam.gserviceaccount.com",
        "EMULATOR_TOKEN": "good",
        **settings,
    }
    emulators = ("STORAGE", "GKE", "TPU", "COMPUTE")
    hosts = {**{f"{name}_EMULATOR_HOST": http for name in emulators}, "PUBSUB_EMULATOR_HOST": grpc}
    return {**{f"DROPFORGE_{name}": value for name, value in variables.items()}, **hosts}


def sweep_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the sweep to targets and endpoints of `kind`, in a project whose executions are all live."""
    adapters: list[Any] = [get_target(kind), get_server(kind)]
    monkeypatch.setattr(stages, "PLATFORMS", Platforms(all=lambda: adapters))
    monkeypatch.setattr(orphans, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr("dropforge.stages.sweep.sweep.live_executions", lambda _: frozenset())
    monkeypatch.setattr(lost_work, "state_of", lambda *_: "ACTIVE")
    monkeypatch.setattr(lost_work, "specs", lambda _: [])
