"""A hostile server on every endpoint, such as a model with code of its own, stays within its run.

It reads the run's model and compiled code, and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge.run.record import RunState

from ..deployments import clients
from .conftest import User
from .targets import PARTS, SERVES

ROOT = Path(__file__).resolve().parents[2]
# The server's process becomes this program, which is called vllm and runs the code of a served model: with the account
# of the container, with the token that vLLM's streamer gets, and with what it finds in the container's other process.
# It prints for each try "done", or the name of the error.
HOSTILE = """
import json, os, uuid
import google.auth
import psutil
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from dropforge.cloud.clients import Clients

other, specs = os.environ["VICTIM"], os.environ["SPECS_BUCKET"]
bucket, run = os.environ["DROPFORGE_MODEL_URI"].removeprefix("gs://").split("/models/")
assert not {"DROPFORGE_ACCESS_REQUEST", "DROPFORGE_RUN_KEY"} & set(os.environ)
def words(child):
    try:
        return str(child.cmdline())
    except psutil.ZombieProcess:  # of the server's start, such as the process that waits until it is ready
        return ""


(lender,) = (child for child in psutil.Process().children() if "bucket_tokens" in words(child))
assert "DROPFORGE_RUN_KEY" not in lender.environ()
request = json.loads(lender.environ()["DROPFORGE_ACCESS_REQUEST"])
of_another = Clients({**lender.environ(), "DROPFORGE_ACCESS_REQUEST": json.dumps({**request, "run": other})})
account = storage.Client("p", AnonymousCredentials())
credentials, project = google.auth.default()
token = storage.Client(credentials=credentials)
assert project == os.environ["DROPFORGE_PROJECT"], project


def outcome(work):
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "done"


def reads(client, name):
    return lambda: client.bucket(bucket).blob(name).download_as_bytes(retry=None)


tried = {"ask for another run's token": outcome(of_another.run_token)}
for who, client in (("account", account), ("token", token)):
    for name in (*(f"{place}/{{}}/x" for place in ("models", "checkpoints", "machines", "runs", "caches")), "keys/{}"):
        for whose, id in (("own", run), ("other", other)):
            tried[f"{who} reads {whose} {name.partition('/')[0]}"] = outcome(reads(client, name.format(id)))
    for prefix in ("", "models/", f"models/{other}/", "runs/", f"models/{run}/"):
        listed = outcome(lambda: list(client.list_blobs(bucket, prefix=prefix, retry=None)))
        tried[f"{who} lists {prefix.replace(run, 'own').replace(other, 'other')}"] = listed
    for whose, id in (("own", run), ("other", other)):
        for place in ("models", "caches"):
            for done, leaf in (("writes", uuid.uuid4().hex), ("replaces", "x")):
                blob = client.bucket(bucket).blob(f"{place}/{id}/{leaf}")
                tried[f"{who} {done} {whose} {place}"] = outcome(lambda: blob.upload_from_string("y", retry=None))
    tried[f"{who} looks at the bucket"] = outcome(lambda: client.get_bucket(bucket, retry=None))
    tried[f"{who} reads the specs bucket"] = outcome(lambda: list(client.list_blobs(specs, retry=None)))
print(json.dumps(tried))
"""
SERVE = """
from containers.serve_vllm.engine import Settings
from containers.serve_vllm.serve import serve
serve(Settings.from_environment(), "vllm", 0.0)
"""
# vLLM's streamer looks at the bucket before it lists the model's files. A server of its own machine writes its status.
# A server may leave compiled code to the next server of its run, but not replace what an earlier one has left.
ALLOWED = {
    "token looks at the bucket",
    "token lists models/own/",
    "token reads own models",
    "token reads own machines",
    "token reads own caches",
    "token writes own caches",
}
# The machine that trained keeps the token of the trainer, for the objects of the same run.
TRAINED = ALLOWED - {"token looks at the bucket", "token reads own caches", "token writes own caches"} | {
    "token reads own checkpoints",
    "token reads own runs",
    "token writes own models",
    "token replaces own models",
}
PLACES = ("models/{}/x", "checkpoints/{}/x", "machines/{}/x", "runs/{}/x", "caches/{}/x", "keys/{}")
ON_CLOUD_RUN = {"type": "cloud_run", **PARTS["cloud_run"]}
ON_TPU_VM = {"type": "tpu_vm", **PARTS["tpu_vm"]}
CASES = {
    **{kind: (ON_CLOUD_RUN, {"type": kind, **part}, ALLOWED) for kind, part in SERVES.items()},
    "training_vm": (ON_TPU_VM, {"type": "training_vm", "ttl": "1h"}, TRAINED),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_hostile_server_reads_the_model_of_its_run_alone(user: User, kind: str, tmp_path: Path) -> None:
    target, serve, allowed = CASES[kind]
    run, other = user.drop(user.spec(target=target, serve=serve)), new_run()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    with objects_of(user, run), objects_of(user, other):
        tried = attack(user, run, other, tmp_path)
    assert {what for what, answer in tried.items() if answer == "done"} == allowed
    refused = {answer for what, answer in tried.items() if what not in allowed}
    assert refused == {"Forbidden", "RefreshError"}
    assert tried["ask for another run's token"] == "RefreshError"
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)


def new_run() -> str:
    return f"victim-{uuid.uuid4().hex[:12]}"


@contextmanager
def objects_of(user: User, run: str) -> Iterator[None]:
    """What the containers and functions of a run write, where it is not written yet. The objects are deleted again."""
    bucket = clients.storage().bucket(user.settings.runs_bucket)
    made = [blob for place in PLACES if not (blob := bucket.blob(place.format(run))).exists()]
    for blob in made:
        blob.upload_from_string("secret")
    yield
    for blob in made:
        bucket.blob(blob.name).delete()  # of any generation: a trainer may have replaced it


def attack(user: User, run: str, other: str, directory: Path) -> dict[str, str]:
    """What HOSTILE has tried in the place of vLLM, started as the image starts vLLM on a GPU."""
    program = directory / "vllm"
    program.write_text(f"#!{sys.executable}\n{HOSTILE}")
    program.chmod(0o700)
    environment = {
        **environment_of(run),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
        "PATH": str(directory),
        "VICTIM": other,
        "SPECS_BUCKET": user.settings.specs_bucket,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVE], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    tried: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return tried


def environment_of(run: str) -> dict[str, str]:
    """The environment of the container that serves the run."""
    return next(filter(None, (_served(process, run) for process in psutil.process_iter())))


def _served(process: psutil.Process, run: str) -> dict[str, str] | None:
    try:
        environment: dict[str, str] = process.environ()
    except psutil.Error:
        return None
    is_server = environment.get("DROPFORGE_MODEL_URI", "").endswith(f"/models/{run}")
    return environment if is_server and "DROPFORGE_CONTAINER_ID" in environment else None
