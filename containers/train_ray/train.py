"""The train stage on a Ray cluster: JaxTrainer runs containers/train_maxtext's `train` on every host of the slice.

This process runs on the head. The workers read and write below checkpoints/<run>/maxtext in the bucket: the imported
weights, and Orbax's checkpoints, which later attempts and workers resume. The head downloads only the last step's
weights, for the later stages.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.common.attempt import exit_now
from containers.common.errors import INTERNAL, JobError, infrastructure_error
from containers.common.watchdog import Watchdog
from containers.train_maxtext.stages import classify_stage, stage_main
from containers.train_maxtext.work import Result, Work, write_json
from dropforge.cloud.clients import Clients

from .bucket_tokens import lend
from .shared_checkpoints import SharedCheckpoints
from .tpu_slice import Slice

WORKER_FAILURES = 3  # lost workers in one attempt; after each loss the workers resume the newest checkpoint
POLL_SECONDS = 0.5
# How long the remaining hosts wait for a lost host at the shutdown. It never answers. Ray waits 30 s by default.
SHUTDOWN_SECONDS = 5


def run(work: Work) -> Result:
    """Train on all hosts; leaves the last step's weights for the verify stage. Raises JobError."""
    import ray

    shared, hosts = SharedCheckpoints.from_environment(), Slice.from_environment()
    os.environ.setdefault("JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S", str(SHUTDOWN_SECONDS))
    ray.init(log_to_driver=True, runtime_env={"env_vars": worker_environment(tpu=bool(work.done("prepare")["tpu"]))})
    if not shared.newest() and work.result("import"):
        shared.upload_imported(Path(work.done("import")["parameters"]))
    exchange = make_exchange()
    relay(work, exchange, in_thread(lambda: fit(work, hosts, shared.root, exchange)))
    result = dict(ray.get(exchange.outcome.remote()) or {})
    if error := result.get("error"):
        print(f"host {result['host']}: {result['traceback']}", file=sys.stderr)
        raise JobError.from_json(error)
    if "step" not in result:
        raise lost("the workers ended without a result")
    if not result["stopped"]:
        step = result["step"]
        shared.download_weights(step, work.checkpoints / str(step) / "model_params")
    return result


def in_thread(function: Callable[[], None]) -> Future[None]:
    """Call a function in a thread that may wait for ever: the end of this process ends the thread, too."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
            future.set_result(None)
        except Exception as error:  # noqa: BLE001  (the future raises it)
            future.set_exception(error)

    threading.Thread(target=run, name="fit", daemon=True).start()
    return future


def relay(work: Work, exchange: Any, fitting: Future[None]) -> None:
    """Write the workers' reports to the progress file and forward SIGTERM to the workers, until there is an outcome.

    One host has the outcome of all: after its error, the others wait for it in a collective. Raises what `fitting`
    raises.
    """
    import ray

    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    over, outcome = False, dict[str, Any]()
    with work.progress.open("a", buffering=1) as file:
        while not over and not outcome:
            over = bool(wait([fitting], POLL_SECONDS).done)
            reports, outcome = ray.get(exchange.take.remote(bool(signals)))
            for report in reports:
                if all(math.isfinite(value) for value in report.values() if isinstance(value, float)):
                    file.write(json.dumps(report) + "\n")
    if not outcome:
        fitting.result()


def fit(work: Work, hosts: Slice, root: str, exchange: Any) -> None:
    """Run the workers with Ray Train, which restarts them after a loss. Raises JobError when Ray gives up."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    tpu = bool(work.done("prepare")["tpu"])
    inputs = {
        "job": (work.directory / "job.json").read_bytes(),
        "prepare": work.done("prepare"),
        "rows": work.rows.read_bytes(),
        "root": root,
    }
    trainer = JaxTrainer(
        train_on_host,
        train_loop_config={"inputs": ray.put(inputs), "exchange": exchange},
        # This setting initialises jax.distributed, on CPUs too.
        jax_config=JaxConfig(use_tpu=True),
        scaling_config=ScalingConfig(**hosts.scaling(tpu=tpu)),
        run_config=RunConfig(
            name="train",
            storage_path=str(work.directory / "ray"),
            failure_config=FailureConfig(max_failures=WORKER_FAILURES),
        ),
    )
    try:
        error = trainer.fit().error
    except ray.train.TrainingFailedError as failure:
        error = failure
    if error is not None and not ray.get(exchange.outcome.remote()):
        print(error, file=sys.stderr)  # Ray's text quotes the errors of the workers, and those may quote a row
        raise lost(type(error).__name__)


def train_on_host(config: dict[str, Any]) -> None:
    """Train in a worker. The run's own errors end the attempt; Ray restarts the workers after other errors.

    An error of any host is the outcome of all: none can take a step without that host.
    """
    import jax
    import ray

    from containers.train_maxtext.train import initial_weights, train

    lend(Clients())  # before anything opens the bucket
    exchange, inputs = config["exchange"], ray.get(config["inputs"])
    host = jax.process_index()
    with tempfile.TemporaryDirectory(prefix="dropforge-") as directory:
        work = unpack(Path(directory), inputs)
        try:
            read_weights(initial_weights(work.spec, work))
            watchdog = Watchdog(f"host {host}")  # Ray restarts the workers after the end of one
            report = (lambda **_: None) if host else reporter_to(exchange)
            result = train(work, report, stop_together(exchange), watchdog)
        except Exception as error:
            failure = classify_stage(error)
            if failure.exit_code == INTERNAL and not isinstance(error, JobError):
                raise  # a peer is lost, or memory is short: Ray restarts the workers
            result = {"error": failure.to_json(), "host": host, "traceback": traceback.format_exc()}
    if host == 0 or "error" in result:
        ray.get(exchange.finish.remote(result))


def read_weights(uri: str) -> None:
    """Read the description of the weights, if there are any, as Orbax does; raises what TensorStore says.

    MaxText calls every error of this read a missing checkpoint, also a permission that the host's account lacks.
    """
    if uri:
        import tensorstore

        tensorstore.KvStore.open(f"{uri}/").result().read("_METADATA").result()


def reporter_to(exchange: Any) -> Callable[..., None]:
    def report(**fields: Any) -> None:
        exchange.report.remote(fields)

    return report


def stop_together(exchange: Any) -> Callable[[], bool]:
    """A function that all hosts call before each step: whether to stop, with the same answer on all hosts."""
    import jax
    import numpy as np
    import ray
    from jax.experimental import multihost_utils

    def stop() -> bool:
        stopping = bool(ray.get(exchange.stopping.remote())) if jax.process_index() == 0 else False
        return bool(multihost_utils.broadcast_one_to_all(np.array(stopping)))

    return stop


@dataclass(frozen=True)
class HostWork(Work):
    """A host's own work directory. Weights and checkpoints, which the hosts share, are in the bucket."""

    shared: SharedCheckpoints

    @property
    def training(self) -> Any:
        from etils import epath

        return epath.Path(self.shared.root)

    @property
    def checkpoints(self) -> Any:
        """The newest complete checkpoint; before the first, a directory that does not exist."""
        from etils import epath

        return epath.Path(self.shared.step_uri(self.shared.newest() or "none"))


def unpack(directory: Path, inputs: dict[str, Any]) -> HostWork:
    work = HostWork(directory, SharedCheckpoints(inputs["root"], Clients().storage()))
    (directory / "stages").mkdir()
    (directory / "job.json").write_bytes(inputs["job"])
    work.rows.write_bytes(inputs["rows"])
    write_json(directory / "stages" / "prepare.json", inputs["prepare"])
    work.write_result("import", {"parameters": work.shared.imported})
    return work


def make_exchange() -> Any:
    """An actor on the head. The first worker reports to it and asks it whether to stop; each worker tells its error."""
    import ray

    class Exchange:
        def __init__(self) -> None:
            self._reports: list[dict[str, Any]] = []
            self._outcome: dict[str, Any] = {}
            self._stopping = False

        def report(self, fields: dict[str, Any]) -> None:
            self._reports.append(fields)

        def take(self, stopping: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            """The reports since the last call, and the outcome if there is one."""
            self._stopping = self._stopping or stopping
            reports, self._reports = self._reports, []
            return reports, self._outcome

        def stopping(self) -> bool:
            return self._stopping

        def finish(self, outcome: dict[str, Any]) -> None:
            self._outcome = self._outcome or outcome  # the first error is the cause of the others

        def outcome(self) -> dict[str, Any]:
            return self._outcome

    head = {"node:__internal_head__": 0.001}
    return ray.remote(num_cpus=0, resources=head)(Exchange).remote()


def worker_environment(*, tpu: bool) -> dict[str, str]:
    """The environment of every Ray worker of this job. MaxText uses stubs of its cloud clients, as in all stages."""
    environment = {"HF_HUB_OFFLINE": "1", "DECOUPLE_GCLOUD": "TRUE", "TF_CPP_MIN_LOG_LEVEL": "2"}
    # Ray Train's watcher would tell the training that a host is about to end, which the training does not ask. It is a
    # process at each start of the workers.
    environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    return environment if tpu else {**environment, "JAX_PLATFORMS": "cpu"}


def lost(why: str) -> JobError:
    return infrastructure_error(f"training on Ray failed: {why}", "dropforge resumes the run from its checkpoint")


if __name__ == "__main__":
    exit_now(stage_main("train", run))  # Ray ends the workers of a process that has ended, whatever they wait for
