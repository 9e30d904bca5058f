"""Ray clusters only: the operator replaces machines within the attempt.

test_targets.py has the tests of every target. They use a stand-in for Ray that starts quickly;
tests/emulators/kubernetes/test_ray.py compares the stand-in with the real Ray.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil

from dropforge.run.record import RunState

from .clusters import Clusters
from .conftest import User
from .targets import PARTS
from .test_runs import assert_clean

TARGET: dict[str, Any] = {"type": "ray", **PARTS["ray"]}
HOSTS = 2
ROOT = Path(__file__).resolve().parents[2]
READ_WEIGHTS = "import sys; from containers.train_ray.train import read_weights; read_weights(sys.argv[1])"
WRITE_AND_READ = """
import sys
from containers.train_ray.bucket_tokens import lend
from dropforge.cloud.clients import Clients
lend(Clients())
import fsspec, tensorstore
bucket = tensorstore.KvStore.open(sys.argv[1]).result()
bucket.write("d/part", b"weights").result()
bucket.write("d/part", b"weights").result()  # replaces the object
print(bucket.read("d/part").result().value.decode())
files = fsspec.filesystem("gcs")
print([name.rpartition("/")[2] for name in files.ls(sys.argv[1] + "d")], files.cat(sys.argv[1] + "d/part"))
"""


def pods_of(user: User, run: str, node_type: str) -> list[tuple[str, str]]:
    return sorted(pod for pod in Clusters(user.info).pods(run) if f"-{node_type}-" in pod[1])


def preempt(user: User, pod: tuple[str, str]) -> None:
    user.post("_local/kubernetes/faults", {"preempt": {"cluster": pod[0], "pod": pod[1]}})


def test_preempted_hosts_and_head_are_replaced_within_the_attempt(user: User) -> None:
    run = user.drop(user.spec("hang-at-first-start", target=TARGET))
    user.wait(run, "TRAINING")
    hosts = pods_of(user, run, "worker")
    assert len(hosts) == HOSTS
    preempt(user, hosts[0])
    # When a host of a slice is lost, the operator replaces all hosts of the slice. The driver continues.
    user.until(lambda: len(pods := pods_of(user, run, "worker")) == HOSTS and not set(pods) & set(hosts))
    assert user.store.record(run).state is RunState.TRAINING
    (head,) = pods_of(user, run, "head")
    preempt(user, head)  # the driver ends with the head, and the operator submits the job again
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1, [attempt.error for attempt in record.attempts]
    assert_clean(user, run)


def test_orbax_reaches_the_bucket_with_the_token_of_the_run(user: User, maxtext_environment: Path) -> None:
    """Orbax uses TensorStore and gcsfs. MaxText calls a refusal a missing checkpoint."""
    run = user.drop(user.spec("hang", target=TARGET))
    user.wait(run, "TRAINING")
    environment = next(filter(None, (environment_of(process, run) for process in psutil.process_iter())))
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'functions'}"
    command = [str(maxtext_environment / "bin" / "python"), "-c", WRITE_AND_READ]
    places = (f"checkpoints/{run}/maxtext", "checkpoints/job-0123456789ab/maxtext", f"runs/{run}")
    for folder, is_its_own in zip(places, (True, False, False), strict=True):
        uri = f"gs://{user.settings.runs_bucket}/{folder}/"
        done = subprocess.run([*command, uri], env=environment, capture_output=True, text=True)
        assert (done.stdout == "weights\n['part'] b'weights'\n") is is_its_own, (done.stdout, done.stderr)
        assert is_its_own or "PERMISSION_DENIED" in done.stderr
    refused = {**environment, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "of-another-stack"}
    done = subprocess.run([command[0], "-c", READ_WEIGHTS, uri], env=refused, capture_output=True, text=True)
    assert "PERMISSION_DENIED: Request had invalid authentication credentials" in done.stderr
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait(run)


def environment_of(process: psutil.Process, run: str) -> dict[str, str] | None:
    """The environment of a process in a container of the run; None for another process."""
    try:
        environment = process.environ()
    except psutil.Error:
        return None
    return environment if environment.get("DROPFORGE_RUN") == run and "DROPFORGE_CONTAINER_ID" in environment else None
