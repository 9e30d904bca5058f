"""Faults of a whole stack: SIGKILL, killed functions, Slack down, simultaneous deliveries, a port in use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.run.record import RunState
from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackConfig, StackError

from .conftest import User
from .test_runs import assert_clean, deliver_upload, states
from .zygote import Zygote

pytestmark = pytest.mark.slow


def kill(user: User) -> None:
    """SIGKILL the stack; its functions end with it, its containers continue."""
    stack = psutil.Process(user.info.pid)
    functions = [p for p in stack.children(recursive=True) if "functions_host" in " ".join(p.cmdline())]
    stack.kill()
    psutil.wait_procs([stack, *functions], timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0])
def test_a_restarted_stack_continues_its_runs(own_stack: Callable[[], User], seconds: float) -> None:
    user = own_stack()
    run = user.drop(user.spec("slow"))
    time.sleep(seconds)  # the run is then in any stage
    kill(user)
    user = own_stack()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert len(user.executions(run)) == 1
    assert_clean(user, run)


def test_a_restarted_stack_notices_a_container_that_ended_meanwhile(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    run = user.drop(user.spec("killed-later"))
    user.wait(run, "TRAINING")
    kill(user)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while local.leftovers(user.state).processes and time.monotonic() < deadline:
        time.sleep(0.05)
    record = own_stack().wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "data"


def test_killed_functions_are_restarted(unforked_stack: Callable[[], User]) -> None:
    user = unforked_stack()
    run = user.drop(user.spec("slow"))
    user.wait(run, "TRAINING")
    children = psutil.Process(user.info.pid).children()
    (functions,) = [child for child in children if any("functions_host" in word for word in child.cmdline())]
    functions.kill()
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED
    assert_clean(user, run)


def test_a_slack_failure_delays_only_the_message(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    request = urllib.request.Request(f"{user.info.http}/slack/_fail", b'{"count": 4, "status": 503}', method="POST")
    urllib.request.urlopen(request, timeout=60).close()
    run = user.drop(user.spec())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED
    assert user.slack(run, "succeeded")[-1].endswith("succeeded")


def test_simultaneous_deliveries_create_one_run(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    bucket = user.settings.specs_bucket
    for number in range(5):
        name = f"specs/race-{number}.json"
        run = user.drop(user.spec(), name)
        delivery = [user, bucket, name, user_generation(user, name)]
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(deliver_upload, *zip(*[delivery] * 8, strict=True))
        assert set(answers) <= {204, 500}  # 500: retry later, because another delivery handles the spec
        record = user.wait(run)
        assert states(record) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
        assert len(record.attempts) == 1
        assert_clean(user, run)


def user_generation(user: User, name: str) -> str:
    from ..deployments import clients

    return str(clients.storage().bucket(user.settings.specs_bucket).get_blob(name).generation)


@pytest.mark.parametrize("option", ["http_port", "grpc_port", "functions_port"])
def test_the_error_names_a_port_that_is_in_use(tmp_path: Path, zygote: Zygote, option: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with patch.object(local, "_spawn", zygote.spawn), pytest.raises(StackError, match=str(port)):
            local.up(tmp_path / "stack", **{option: port})
    assert not local.leftovers(tmp_path / "stack")


def test_a_state_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack must be able to restart after a kill while it writes config.json, the ports or the identity."""
    StackConfig(images="before").save(tmp_path)

    def write_part_and_die(path: Path, text: str) -> int:
        with path.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_part_and_die)
        with pytest.raises(KeyboardInterrupt):
            StackConfig(images="after").save(tmp_path)
    assert StackConfig.of(tmp_path).images == "before"


def test_two_stacks_cannot_share_a_state_directory(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    assert local.up(user.state).pid == user.info.pid
    (user.state / "stack.json").rename(user.state / "hidden")
    with pytest.raises(StackError, match="another stack uses"):
        local.up(user.state)
    (user.state / "hidden").rename(user.state / "stack.json")


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_storage_cp_drops_a_spec_that_runs(own_stack: Callable[[], User], tmp_path: Path) -> None:
    import json

    user = own_stack()
    spec = tmp_path / "from-gcloud.json"
    spec.write_text(json.dumps(user.spec()))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_PROJECT": user.settings.project,
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{user.info.http}/",
    }
    destination = f"gs://{user.settings.specs_bucket}/specs/from-gcloud.json"
    subprocess.run(["gcloud", "storage", "cp", spec, destination], env=environment, check=True, timeout=100)
    generation = user_generation(user, "specs/from-gcloud.json")
    run = names.run_id_of_object(user.settings.specs_bucket, "specs/from-gcloud.json", generation)
    assert user.wait(run).state is RunState.SUCCEEDED
