"""The train stage on a Ray cluster: JaxTrainer has every host of the slice run containers/train_maxtext's `sft.train`.

Runs on the head. What the workers read and write lies in the bucket, below checkpoints/<run>/maxtext: the imported
weights, and Orbax's checkpoints, which a run goes on from whichever attempt or worker made them. Only the last step's
weights come back to the head, for the stages that follow.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import INTERNAL, Job, JobError
from shared_checkpoints import STEPS, newest, root_of, upload
from stages import Result, Work, classify_stage, describe, stage_main, write_json
from tpu_slice import Slice

from dropforge.base.errors import ErrorClass
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import download_prefix

WORKER_FAILURES = 3  # lost workers within one attempt; each goes on from the newest checkpoint
POLL_SECONDS = 0.5
# For the hosts that are left to take leave of one that is lost, which they never can: Ray waits 30 s by default.
SHUTDOWN_SECONDS = 5


def run(work: Work) -> Result:
    """Train on all hosts; leaves the last step's weights where the verify stage looks. Raises JobError."""
    import ray

    job, hosts = Job.from_environment(), Slice.from_environment()
    root = root_of(job)
    use_storage(os.environ)
    os.environ.setdefault("JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S", str(SHUTDOWN_SECONDS))
    ray.init(log_to_driver=True, runtime_env={"env_vars": worker_environment(tpu=bool(work.done("prepare")["tpu"]))})
    if not newest(root) and work.result("import"):
        upload(Path(work.done("import")["parameters"]), f"{root}/imported")
    exchange = make_exchange()
    with Relay(work, exchange):
        fit(work, hosts, root, exchange)
    result = dict(ray.get(exchange.outcome.remote()) or {})
    ray.shutdown()
    if error := result.get("error"):
        raise JobError(ErrorClass(error["error_class"]), error["exit_code"], error["message"], error["hint"])
    if "step" not in result:
        raise lost("the workers ended, and none of them said how")
    if not result["stopped"]:
        step = str(result["step"])
        parameters = work.checkpoints / step / "model_params"
        download_prefix(Clients().storage(), f"{root}/{STEPS}/{step}/model_params", parameters)
    return result


def fit(work: Work, hosts: Slice, root: str, exchange: Any) -> None:
    """Have Ray Train run the workers, and start them again when one is lost. Raises JobError when it gives up."""
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
        # This setting is what initialises jax.distributed, on CPUs too.
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
        raise lost(f"{type(error).__name__}: {str(error)[-2000:]}")


def train_on_host(config: dict[str, Any]) -> None:
    """What a worker does. Errors that are the run's own end it everywhere; others are a lost worker's."""
    import jax
    import ray
    from sft import train

    exchange, inputs = config["exchange"], ray.get(config["inputs"])
    first = jax.process_index() == 0
    use_storage(os.environ)
    with tempfile.TemporaryDirectory(prefix="dropforge-") as directory:
        work = unpack(Path(directory), inputs)
        try:
            result = train(work, teller(exchange) if first else lambda **_: None, stop_together(exchange))
        except Exception as error:
            failure = classify_stage(error)
            if failure.exit_code == INTERNAL and not isinstance(error, JobError):
                raise  # a peer is lost, or memory is short: Ray starts the workers again
            result = {"error": describe(failure)}
    if first:
        ray.get(exchange.finish.remote(result))


def teller(exchange: Any) -> Callable[..., None]:
    def tell(**fields: Any) -> None:
        exchange.tell.remote(fields)

    return tell


def stop_together(exchange: Any) -> Callable[[], bool]:
    """Asked by all hosts before each step: whether the run is to stop, the same answer for all."""
    import jax
    import numpy as np
    import ray
    from jax.experimental import multihost_utils

    def stop() -> bool:
        asked = bool(ray.get(exchange.stopping.remote())) if jax.process_index() == 0 else False
        return bool(multihost_utils.broadcast_one_to_all(np.array(asked)))

    return stop


@dataclass(frozen=True)
class HostWork(Work):
    """A host's own work directory; what the hosts share is in the bucket."""

    root: str

    @property
    def training(self) -> Any:
        from etils import epath

        return epath.Path(self.root)

    @property
    def checkpoints(self) -> Any:
        """The newest whole checkpoint; before there is one, a directory that does not exist."""
        return self.training / STEPS / str(newest(self.root) or "none")


def unpack(directory: Path, inputs: dict[str, Any]) -> HostWork:
    work = HostWork(directory, inputs["root"])
    (directory / "stages").mkdir()
    (directory / "job.json").write_bytes(inputs["job"])
    work.rows.write_bytes(inputs["rows"])
    write_json(directory / "stages" / "prepare.json", inputs["prepare"])
    work.write_result("import", {"parameters": f"{inputs['root']}/imported"})
    return work


def make_exchange() -> Any:
    """An actor on the head through which the workers' first tells, and is told."""
    import ray

    class Exchange:
        def __init__(self) -> None:
            self._told: list[dict[str, Any]] = []
            self._outcome: dict[str, Any] = {}
            self._stopping = False

        def tell(self, fields: dict[str, Any]) -> None:
            self._told.append(fields)

        def take(self, stopping: bool) -> list[dict[str, Any]]:
            self._stopping = self._stopping or stopping
            told, self._told = self._told, []
            return told

        def stopping(self) -> bool:
            return self._stopping

        def finish(self, outcome: dict[str, Any]) -> None:
            self._outcome = outcome

        def outcome(self) -> dict[str, Any]:
            return self._outcome

    head = {"node:__internal_head__": 0.001}
    return ray.remote(num_cpus=0, resources=head)(Exchange).remote()


class Relay:
    """Writes down what the workers tell, for the driver's eyes, and tells them when this process gets SIGTERM."""

    def __init__(self, work: Work, exchange: Any) -> None:
        self._work = work
        self._exchange = exchange
        self._asked = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._relay, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join(POLL_SECONDS * 20)

    def _relay(self) -> None:
        import ray

        with self._work.progress.open("a", buffering=1) as file:
            while True:
                last = self._done.wait(POLL_SECONDS)
                for told in ray.get(self._exchange.take.remote(self._asked.is_set())):
                    if all(math.isfinite(value) for value in told.values() if isinstance(value, float)):
                        file.write(json.dumps(told) + "\n")
                if last:
                    return


def worker_environment(*, tpu: bool) -> dict[str, str]:
    """Of every Ray worker of this job. MaxText's own Google Cloud clients are stubs, as in the other stages."""
    environment = {"HF_HUB_OFFLINE": "1", "DECOUPLE_GCLOUD": "TRUE", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return environment if tpu else {**environment, "JAX_PLATFORMS": "cpu"}


def use_storage(environ: Any) -> None:
    """TensorStore reads the emulator's address from a variable of its own."""
    if host := environ.get("STORAGE_EMULATOR_HOST"):
        environ["TENSORSTORE_GCS_HTTP_URL"] = host
        environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "local"


def lost(why: str) -> JobError:
    return JobError(
        ErrorClass.INFRASTRUCTURE, INTERNAL, f"training on Ray failed: {why}", "it is tried again from its checkpoint"
    )


if __name__ == "__main__":
    sys.exit(stage_main("train", run))
