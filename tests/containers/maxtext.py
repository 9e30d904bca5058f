"""The MaxText container as a process, and a training that several files of tests compare theirs with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.patience import TRAIN_SECONDS

from containers.train_maxtext.stages import OFFLINE
from dropforge.run.artifacts import COMPLETE, checkpoints, upload_directory
from dropforge_local import tiny
from dropforge_local.containers.images import ImageStore, Process

from .names import DATA, ROOT, RUN_KEY, RUNS, attempt_environment, changed
from .quick import MAXTEXT, Zygote

BASE = f"gs://{DATA}/tiny-qwen3"
CANARY = "canary-7b2e-not-a-known-prefix"
STEPS, PERIOD = 60, 20
POLL_SECONDS = 0.3  # a question to the emulated storage costs this process milliseconds

# For models of this size, compiling takes longer than training: XLA hardly optimises, and build/ keeps all programs.
# Without any optimisation, each step takes twice as long. Programs without fusion emitters compile in 70 % of the time.
XLA_PROGRAMS = ROOT / "build" / "xla"
QUICK_XLA = {
    "XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

SECRET = {"MY_KEY": CANARY}


@dataclass
class Attempt:
    """A process of the driver, and its output."""

    run: str
    process: subprocess.Popen[str]
    output: str = ""

    def wait(self, timeout: float = TRAIN_SECONDS) -> int:
        self.output = self.process.communicate(timeout=timeout)[0]
        return self.process.returncode

    def kill(self) -> None:
        """Kill all processes, as the kernel does when a container's first process is killed."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            process.kill()
        self.wait()


class Driver:
    """Starts attempts: with an image's `command`, `environment` and `directory`, by default with the repository's."""

    def __init__(
        self,
        cloud: Any,
        command: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        directory: Path = ROOT,
    ) -> None:
        self.cloud = cloud
        self.directory = directory  # `python -m` imports from it first
        self.command = command or (sys.executable, "-P", "-m", "containers.train_maxtext.driver")
        self.environment = environment or {"PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}
        self.started: list[Attempt] = []

    def start(self, spec: dict[str, Any], run: str = "", attempt: int = 1, **environment: str) -> Attempt:
        run = run or f"test-{uuid.uuid4().hex[:12]}"
        self.cloud.put(RUNS, f"runs/{run}/spec.json", json.dumps(spec))
        values = {
            **self.cloud.environment(),
            **QUICK_XLA,
            **self.environment,
            **attempt_environment(run, attempt),
            **environment,
        }
        if "DROPFORGE_WORK_DIRECTORY" in values:
            use_compiled_programs(Path(values["DROPFORGE_WORK_DIRECTORY"]) / run)
        process = subprocess.Popen(
            self.command,
            env=values,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(Attempt(run, process))
        return self.started[-1]

    def end(self) -> None:
        for attempt in self.started:
            if attempt.process.poll() is None:
                attempt.kill()


def use_compiled_programs(work: Path) -> None:
    """Give an attempt the programs that earlier test runs compiled, as on a machine that trained before."""
    XLA_PROGRAMS.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (work / "xla").symlink_to(XLA_PROGRAMS)


@pytest.fixture(scope="session")
def base_qwen3(cloud: Any) -> Path:
    """The base model, uploaded to the bucket. Made once, in about 20 s, and kept in build/tiny."""
    directory = tiny.base_model(ROOT / "build" / "tiny", "qwen3")
    upload_directory(cloud.client, directory, BASE)
    return directory


def job_spec(**changes: Any) -> dict[str, Any]:
    """A job spec that this container trains in seconds; `changes` replace or extend its parts."""
    document: dict[str, Any] = {
        "api_version": "dropforge/v1",
        "name": "tiny",
        "model": {"source": BASE},
        "dataset": {
            "source": f"gs://{DATA}/rows.jsonl",
            "columns": {"prompt": tiny.PROMPT, "completion": "{answer}"},
        },
        "training": {
            "adapter": {"type": "none"},
            "max_steps": STEPS,
            "learning_rate": 3e-3,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_length": 128,
            "checkpoint_steps": PERIOD,
        },
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "evaluation": {"holdout_fraction": 0.05, "max_rows": 16, "max_new_tokens": 40},
        "serve": None,
    }
    return changed(document, changes)


@pytest.fixture(scope="session")
def maxtext_image(maxtext_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """The container as the local stack starts it: the image's own files and command, and MaxText's environment."""
    directory = tmp_path_factory.mktemp("maxtext")
    store = ImageStore(ROOT, directory / "images", Path(sys.executable))
    return store.resolve("train-maxtext").unpack(directory / "rootfs")


@pytest.fixture(scope="session")
def maxtext_zygote(maxtext_environment: Path, cloud: Any, maxtext_image: Process) -> Iterator[Zygote]:
    """Forks the programs that import MaxText or Ray (quick.py)."""
    with tempfile.TemporaryDirectory(prefix="df-") as short:
        own = {**cloud.environment(), **QUICK_XLA, **maxtext_image.env, **OFFLINE, "PYTHONPATH": ""}
        zygote = Zygote(maxtext_environment / "bin" / "python", Path(short) / "zygote", own, MAXTEXT)
        yield zygote
        zygote.end()


@pytest.fixture(scope="session")
def image_driver(cloud: Any, maxtext_image: Process, maxtext_zygote: Zygote) -> Iterator[Driver]:
    """Starts the container. The stages that MaxText's interpreter runs are forked."""
    driver = Driver(cloud, maxtext_image.argv, maxtext_zygote.given(maxtext_image.env), maxtext_image.workdir)
    yield driver
    driver.end()


@pytest.fixture
def slow_driver(cloud: Any, maxtext_image: Process) -> Iterator[Driver]:
    """Starts the container with the interpreters and the imports of a real one."""
    driver = Driver(cloud, maxtext_image.argv, dict(maxtext_image.env), maxtext_image.workdir)
    yield driver
    driver.end()


@dataclass(frozen=True)
class Uninterrupted:
    """A run whose first attempt trained to the end on one device, and was killed before it had saved that."""

    run: str
    document: dict[str, Any]
    attempt: Attempt
    work: Path  # of the attempt
    result: dict[str, Any]  # of the train stage
    saved: int  # the step of the newest checkpoint in the bucket


@pytest.fixture(scope="session")
def uninterrupted_maxtext(
    image_driver: Driver, cloud: Any, base_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Uninterrupted:
    disk, document = tmp_path_factory.mktemp("disk"), job_spec(secrets={"MY_KEY": "my-key"})
    attempt = image_driver.start(document, "", 1, DROPFORGE_WORK_DIRECTORY=str(disk), **SECRET)
    run, work = attempt.run, disk / attempt.run
    wait_for_object(cloud, f"checkpoints/{run}/step-{PERIOD:08d}/{COMPLETE}", attempt)
    os.kill(attempt.process.pid, signal.SIGSTOP)  # it uploads no more; the trainer continues
    result = wait_for_result(work, "train", attempt)
    attempt.kill()
    saved = checkpoints(cloud.client, RUNS, run, RUN_KEY)[0].step
    return Uninterrupted(run, document, attempt, work, result, saved)


def start_line(step: int, total: int) -> dict[str, Any]:
    """The line of progress with which a trainer starts after a step."""
    size = {"rows_per_step": 8, "tokens_per_step": 800.0}
    return {"step": step, "total_steps": total, "loss_before": None, "judged_before": None, **size}


def step_line(step: int, since: int = 0) -> dict[str, Any]:
    """The line of progress of a step; the trainer counts tokens and seconds since its start."""
    return {"step": step, "loss": 9.0 - step, "tokens": 100 * (step - since), "seconds": float(step - since)}


def append_lines(progress: Path, *lines: dict[str, Any]) -> None:
    with progress.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def wait_for_object(cloud: Any, name: str, attempt: Attempt, timeout: float = TRAIN_SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while not cloud.client.bucket(RUNS).blob(name).exists():
        assert attempt.process.poll() is None, attempt.process.communicate()[0]
        assert time.monotonic() < deadline, f"no {name} in {timeout} s"
        time.sleep(POLL_SECONDS)


def wait_for_step(progress: Path, step: int, attempt: Attempt, timeout: float = TRAIN_SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while not (progress.exists() and f'"step": {step},' in progress.read_text()):
        assert attempt.process.poll() is None, attempt.process.communicate()[0]
        assert time.monotonic() < deadline, f"no step {step} in {timeout} s"
        time.sleep(0.05)


def wait_for_result(directory: Path, stage: str, attempt: Attempt, timeout: float = TRAIN_SECONDS) -> dict[str, Any]:
    """The result of a stage, once it is there."""
    path, deadline = directory / "stages" / f"{stage}.json", time.monotonic() + timeout
    while not path.exists():
        assert attempt.process.poll() is None, attempt.process.communicate()[0]
        assert time.monotonic() < deadline, f"no {path} in {timeout} s"
        time.sleep(0.1)
    return dict(json.loads(path.read_text()))
