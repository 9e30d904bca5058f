"""The startup script of TPU VMs, run by emulated machines against emulated storage, Pub/Sub and Secret Manager."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.platforms import tpu_vm
from dropforge.platforms.tpu_vm.train import GRACE_SECONDS
from dropforge.run.events import JobEvent, parse_job_event
from dropforge.run.proof import EVENT_NAME, PROOF, is_document_proved, is_proved
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import find_members
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.tpu import TpuEmulator, sandbox

from .conftest import CONFIG, DOCKERFILE, Cloud, State, wait_for

SCRIPT = Path(tpu_vm.__file__).with_name("startup.sh")
BUCKET, TOPIC, SUBSCRIPTION = "runs", "projects/p1/topics/job-events", "projects/p1/subscriptions/test"
HOSTS = ("STORAGE_EMULATOR_HOST", "SECRET_MANAGER_EMULATOR_HOST", "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB")
SECRET = "hf_TopSecretValue0123456789"
SECRETS = '{"HF_TOKEN": "projects/p1/secrets/hf/versions/latest"}'
TRAIN_PY = """
    import os, signal, sys, time
    mode = os.environ["MODE"]
    if mode == "polite":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))  # at once: a second signal follows the first
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("training", mode, "with", os.environ.get("DROPFORGE_SECRETS", "no secret"), flush=True)
    with open(os.path.join(os.environ["WORK"], "trace"), "a") as trace:
        trace.write("x")
    if mode.isdigit():
        sys.exit(int(mode))
    if mode == "second-time" and os.path.getsize(os.path.join(os.environ["WORK"], "trace")) > 1:
        sys.exit(0)
    time.sleep(600)
"""


KEY = "k" * 64


@dataclass
class Lab(Cloud):
    """The emulated APIs that a machine needs, and the objects and events that its script leaves there."""

    image: str = ""
    run: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:12]}")

    def train(
        self, mode: str, node_id: str = "n1", disks: Sequence[str] = (), *, prelude: str = "", **metadata: str
    ) -> None:
        """Create a machine that trains in `mode`; `prelude` stands at the beginning of its script."""
        values = {
            "dropforge-role": "train",
            "dropforge-run": self.run,
            "dropforge-attempt": "1",
            "dropforge-image": self.image,
            "dropforge-env": f"MODE={mode}\nWORK=/work\nGREETING=a b=c\nPATH_OF_A_USER=x\nDROPFORGE_SECRETS={SECRETS}",
            "dropforge-deadline": str(int(time.time()) + 600),
            "dropforge-runs-bucket": BUCKET,
            "dropforge-run-key": KEY,
            "dropforge-job-events-topic": TOPIC,
            "dropforge-data-disk": "persistent-disk-1" if disks else "",
            **metadata,
        }
        self.ready(
            node_id,
            SCRIPT.read_text().replace("\n", f"\n{prelude}\n", 1),
            metadata={key: value for key, value in values.items() if value != "absent"},
            data_disks=[{"source_disk": disk} for disk in disks],
        )

    def read(self, name: str) -> str | None:
        """An object of the run; None without such an object."""
        path = urllib.parse.quote(f"machines/{self.run}/{name}", safe="")
        try:
            with urllib.request.urlopen(f"{self.url}/storage/v1/b/{BUCKET}/o/{path}?alt=media", timeout=60) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            return None

    def ended(self, node_id: str = "n1", times: int = 1, attempt: int = 1) -> dict[str, Any]:
        """The status that the script writes at its end."""
        self.wait_for_line("startup-script exit status", node_id, times)
        status = self.read(f"attempt-{attempt}/status.json")
        assert status, self.serial(node_id)
        assert is_document_proved(KEY, names.machine_object(self.run, attempt, "status.json"), status.encode())
        body: dict[str, Any] = json.loads(status)
        return body

    def note(self, *states: str, attempts: int = 1) -> None:
        """Write the part of the run's record that the script reads."""
        name = urllib.parse.quote(names.record_object(self.run), safe="")
        record = {"history": [{"state": state} for state in states], "attempts": [{"number": attempts}]}
        self._post(f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}", record)

    def keep(self) -> dict[str, str]:
        """Metadata of a machine that serves after the training."""
        return {
            "dropforge-server-image": self.image,
            "dropforge-server-env": "MODE=polite\nWORK=/work",
            "dropforge-server-deadline": str(int(time.time()) + 600),
        }

    def events(self) -> list[JobEvent]:
        answer = self._post(f"/v1/{SUBSCRIPTION}:pull", {"maxMessages": 10, "returnImmediately": True})
        messages = [received["message"] for received in answer.get("receivedMessages", ())]
        for message in messages:
            assert message["attributes"]["ce-type"].startswith("dev.dropforge.job.")
            assert is_proved(KEY, EVENT_NAME, base64.b64decode(message["data"]), message["attributes"][PROOF])
        return [parse_job_event(base64.b64decode(message["data"])) for message in messages]

    def pids(self, part: str) -> list[int]:
        """The machines' processes whose last argument ends with `part`, without their shims and inits."""
        commands = {pid: psutil.Process(pid).cmdline() for pids in self.processes().values() for pid in pids}
        parents = ("shim.py", "init.py")
        return [
            pid
            for pid, words in commands.items()
            if words[-1].endswith(part) and not any(word.endswith(parents) for word in words)
        ]

    def event(self) -> JobEvent:
        [event] = self.events()
        assert (event.run, event.attempt) == (self.run, 1)
        return event


@pytest.fixture
def lab(home: Path) -> Iterator[Lab]:
    folder = home / "repo" / "containers" / "train"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(DOCKERFILE.replace("nap", "train"))
    (folder / "main.py").write_text(textwrap.dedent(TRAIN_PY))
    images = ImageStore(home / "repo", home / "images", Path(sys.executable))
    hosts: dict[str, str] = {}

    def build() -> Sequence[Emulator]:
        db, clock = Database(home / "state.db"), SystemClock()
        storage = StorageEmulator(db, home / "blobs", clock)
        storage.create_bucket(BUCKET)
        pubsub = PubSubEmulator(db, clock)
        pubsub.create_topic(TOPIC)
        secrets = SecretManagerEmulator(db, clock, "p1")
        secrets.set_secret("hf", SECRET.encode())
        compute = ComputeEmulator(
            db, clock, directory=home / "disks", config=ComputeConfig(create_seconds=0.05, delete_seconds=0.05)
        )
        tpu = TpuEmulator(
            Host(db, clock, images, home / "vms", lambda account: hosts),
            disks=compute.disks,
            token=lambda scope, account: f"token-of-{scope.rsplit('/', 1)[1]}",
            config=CONFIG,
        )
        return [storage, pubsub, secrets, compute, tpu]

    with BackgroundServer(build) as server:
        hosts.update(dict.fromkeys(HOSTS, server.url))
        digest = images.resolve("x/train:v1").digest
        lab = Lab(server, home, image=f"us-west1-docker.pkg.dev/p1/dropforge/train@{digest}")
        request = urllib.request.Request(
            f"{server.url}/v1/{SUBSCRIPTION}", json.dumps({"topic": TOPIC}).encode(), method="PUT"
        )
        urllib.request.urlopen(request, timeout=60).close()
        yield lab
        for channel in lab.channels:
            channel.close()


@pytest.mark.slow
def test_a_container_that_reports_itself(lab: Lab) -> None:
    disk = lab.disk("d1")
    lab.train("0", disks=[disk])
    status = lab.ended()
    assert (status["exit_code"], status["error_class"], status["message"]) == (0, None, "")
    assert lab.events() == []  # the container reports its end itself
    output = lab.read("attempt-1/startup.log")
    assert output
    assert f"training 0 with {SECRETS}" in output
    lab.faults(reboot="n1")
    assert lab.ended(times=2) == status
    assert "reporting its end again" in lab.serial()
    assert lab.serial().count("training 0") == 1
    lab.delete()
    # A second machine has the same disk under another name: the script must not format it.
    lab.train("65", "n2", [disk], **{"dropforge-attempt": "2", "dropforge-data-disk": "unknown"})
    assert lab.ended("n2", attempt=2)["exit_code"] == 65
    assert "has a file system already" in lab.serial("n2")
    assert [path.read_text() for path in (lab.home / "disks").rglob("trace")] == ["xx"]


def test_the_script_exports_nothing_of_a_user() -> None:
    exported = re.findall(r"^\s*export (.*)", SCRIPT.read_text(), re.M)
    assert [line.split(" #")[0] for line in exported] == [
        "DOCKER_CONFIG=$ROOT/run/dropforge/docker",
    ]
    assert not re.search(r"^\s*(eval|source|\.|declare|set -a|set -o allexport)\s", SCRIPT.read_text(), re.M)


def test_the_machine_has_no_value_of_a_secret(lab: Lab) -> None:
    """The container reads the values by its own account, from the names in DROPFORGE_SECRETS."""
    lab.train("sleep", disks=[lab.disk("d1")])
    lab.wait_for_line(f"training sleep with {SECRETS}")
    pids = [pid for pids in find_members(lab.home / "vms").values() for pid in pids]
    assert len(pids) >= 4
    for pid in pids:
        arguments = " ".join(psutil.Process(pid).cmdline())
        assert SECRET not in arguments
        environment = psutil.Process(pid).environ()
        assert SECRET not in str(environment)
        if "DROPFORGE_CONTAINER_ID" not in environment:
            assert not {"PATH_OF_A_USER", "GREETING", "DROPFORGE_SECRETS"} & set(environment)
        assert "token-of-cloud-platform" not in arguments
    matches = subprocess.run(
        ["grep", "--recursive", "--files-with-matches", SECRET, lab.home / "vms", lab.home / "disks"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert matches.stdout == ""


@pytest.mark.parametrize(
    ("mode", "metadata", "error_class", "step", "text"),
    [
        ("1", {}, ErrorClass.CODE, "container", "exit code 1 without a report"),
        ("137", {}, ErrorClass.INFRASTRUCTURE, "container", "was killed"),
        ("0", {"dropforge-image": "x.pkg.dev/p1/unknown@sha256:0"}, ErrorClass.CONFIG, "pull", "is not an image ref"),
        ("0", {"dropforge-image": "absent"}, ErrorClass.INFRASTRUCTURE, "metadata", "step metadata failed"),
        ("0", {"dropforge-deadline": "1700000000"}, ErrorClass.DEADLINE, "container", "before the container"),
    ],
)
def test_the_script_reports_for_the_container(
    lab: Lab, mode: str, metadata: dict[str, str], error_class: ErrorClass, step: str, text: str
) -> None:
    lab.train(mode, **metadata)
    status = lab.ended()
    assert (status["error_class"], status["step"]) == (error_class, step)
    event = lab.event()
    assert event.type == "failed"
    assert event.error_class == error_class
    assert text in event.message


def test_the_memory_runs_out(lab: Lab) -> None:
    lab.train("sleep")
    lab.wait_for_line("training sleep")
    lab.faults(out_of_memory="n1")
    status = lab.ended()
    assert (status["error_class"], status["exit_code"]) == (ErrorClass.OUT_OF_MEMORY, 137)
    event = lab.event()
    assert event.type == "failed"
    assert event.error_class == ErrorClass.OUT_OF_MEMORY


def test_a_machine_past_its_deadline_shuts_itself_down(lab: Lab) -> None:
    lab.train("0", **{"dropforge-deadline": "1700000000"})
    assert lab.ended()["error_class"] == ErrorClass.DEADLINE
    wait_for(lambda: lab.node().state == State.STOPPED)
    assert not any(lab.processes().values())
    lab.delete()


def test_a_kept_machine_runs_until_its_servers_deadline(lab: Lab) -> None:
    lab.train("0", **(lab.keep() | {"dropforge-deadline": "1700000000"}))
    serial = lab.wait_for_line("Shutdown scheduled in +")
    minutes = int(serial.partition("Shutdown scheduled in +")[2].split()[0])
    assert 30 < minutes <= 40  # 600 s until the deadline, and 1800 s for the machine's deletion


class BrokenHalf(socketserver.ThreadingTCPServer):
    """A proxy that closes every other connection after its request, beginning with the first connection."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        numbers = itertools.count(1)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                request = self.request.recv(1 << 16)
                if next(numbers) % 2:
                    return
                with socket.create_connection(("127.0.0.1", port)) as server:
                    threading.Thread(target=copy, args=(self.request, server), daemon=True).start()
                    server.sendall(request)
                    copy(server, self.request)

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=[0.05], daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


@pytest.mark.parametrize("breaks", [False, True], ids=["", "and-connections-break"])
def test_a_failure_of_the_first_command_is_reported(lab: Lab, breaks: bool) -> None:
    """Run the script beside the machine's own script, with a root directory that is not writable."""
    lab.train("sleep")
    lab.wait_for_line("training sleep")
    db = Database(lab.home / "state.db")
    port = db.connection.execute("SELECT port FROM tpu_nodes").fetchone()["port"]
    db.close()
    with BrokenHalf(port) as metadata, BrokenHalf(int(lab.url.rpartition(":")[2])) as api:
        url = f"http://127.0.0.1:{api.server_address[1]}"
        environment = {
            "PATH": f"{sandbox.SHIMS}:{os.environ['PATH']}",
            "GCE_METADATA_HOST": f"127.0.0.1:{metadata.server_address[1] if breaks else port}",
            "DROPFORGE_ROOT": "/dev/null",
            "DROPFORGE_SANDBOX_PYTHON": sys.executable,
            **dict.fromkeys(HOSTS, url if breaks else lab.url),
        }
        command = ["bash", str(SCRIPT)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    event = lab.event()
    assert event.type == "failed"
    assert "step begin failed with exit code 1: mkdir" in event.message


def test_a_lost_event_leaves_a_status(lab: Lab) -> None:
    lab.train("1", **{"dropforge-job-events-topic": "projects/p1/topics/gone"})
    assert lab.ended()["message"] == "the container ended with exit code 1 without a report"
    assert "the event could not be published" in lab.serial()


@pytest.mark.parametrize(("mode", "code"), [("polite", 75), ("deaf", 137), ("sleep", 137)])
def test_a_preempted_machine(lab: Lab, mode: str, code: int) -> None:
    """The script gets no signal: it looks whether the machine shuts down when its container ends.

    A container that ignores SIGTERM, or has no handler for it, is killed after its time.
    """
    lab.train(mode)
    lab.wait_for_line(f"training {mode}")
    if mode != "polite":
        [timeout] = lab.home.rglob("run/docker/containers/dropforge/stop-timeout")
        timeout.write_text("0.2")
    lab.faults(preempt="n1")
    wait_for(lambda: lab.node().state == State.PREEMPTED and not lab.processes(), lab.serial)
    status = lab.read("attempt-1/status.json")
    assert status
    assert json.loads(status)["exit_code"] == code
    assert json.loads(status)["error_class"] == (None if mode == "polite" else ErrorClass.PREEMPTED)
    assert [event.type for event in lab.events()] == ([] if mode == "polite" else ["preempted"])


def test_docker_gives_the_container_its_time_at_a_preemption(lab: Lab) -> None:
    """Docker's own default is 10 s; the trainer takes 25 s for its last checkpoint (DROPFORGE_GRACE_SECONDS)."""
    lab.train("polite")
    lab.wait_for_line("training")
    [timeout] = lab.home.rglob("run/docker/containers/dropforge/stop-timeout")
    assert float(timeout.read_text()) == GRACE_SECONDS


def test_a_container_that_ends_with_the_signal_keeps_its_exit_code(lab: Lab) -> None:
    """SIGTERM interrupts Bash's `wait`, which then answers 143. The container has ended when the script asks for it."""
    lab.train("polite", prelude='kill() { sleep 1; builtin kill "$@"; }')
    lab.wait_for_line("training")
    [script] = lab.pids("startup-script")
    os.kill(script, signal.SIGTERM)
    assert lab.ended()["exit_code"] == 75
    assert lab.events() == []


def test_a_machine_continues_after_a_power_failure(lab: Lab) -> None:
    lab.train("second-time", disks=[lab.disk("d1")])
    lab.wait_for_line("training")
    lab.faults(reboot="n1")
    assert lab.ended()["exit_code"] == 0
    assert "has a file system already" in lab.serial()
    assert lab.events() == []


def test_a_disk_with_unknown_contents_is_not_formatted(lab: Lab) -> None:
    name = lab.disk("d1")
    lab.train("0", disks=[name])
    lab.ended()
    lab.delete()
    (content,) = (lab.home / "disks").rglob("filesystem")
    content.write_text('TYPE="ext4"\nTYPE="LVM2_member"\n')
    lab.train("0", "n2", [name], **{"dropforge-attempt": "2"})
    status = lab.ended("n2", attempt=2)
    assert (status["error_class"], status["step"]) == (ErrorClass.INFRASTRUCTURE, "disk")
    assert "it was not formatted" in status["message"]
    assert "LVM2_member" in content.read_text()


def test_a_killed_script_leaves_its_container(lab: Lab) -> None:
    """The container reports its end itself, so only the script's log is lost."""
    lab.train("sleep")
    lab.wait_for_line("training sleep")
    script, container = lab.pids("startup-script"), lab.pids("/app/main.py")
    assert (len(script), len(container)) == (1, 1)
    os.kill(script[0], signal.SIGKILL)
    lab.wait_for_line("startup-script exit status 137")
    assert lab.pids("/app/main.py") == container


@pytest.mark.slow
def test_a_container_is_stopped_at_the_deadline(lab: Lab) -> None:
    lab.train("sleep", **{"dropforge-deadline": str(int(time.time()) + 5)})
    assert lab.ended()["error_class"] == "deadline"
    assert lab.event().type == "failed"


@pytest.mark.slow
def test_a_server_starts_at_every_boot(lab: Lab) -> None:
    lab.train("polite", **{"dropforge-role": "serve"})
    lab.wait_for_line("training polite")
    lab.faults(maintenance="n1")
    lab.wait_for_line("training polite", count=2)
    assert lab.events() == []
    assert lab.read("serve/status.json") is None


def test_a_server_without_enough_memory_reports_it(lab: Lab) -> None:
    lab.train("sleep", **{"dropforge-role": "serve", "dropforge-attempt": "0"})
    for times in (1, 2, 3):
        lab.wait_for_line("training sleep", count=times)
        lab.faults(out_of_memory="n1")
        lab.wait_for_line("ended with exit code 137", count=times)
    wait_for(lambda: lab.read("serve/status.json") is not None, lab.serial)
    status = json.loads(lab.read("serve/status.json") or "")
    assert (status["error_class"], status["exit_code"]) == (ErrorClass.OUT_OF_MEMORY, 137)


@pytest.mark.slow
def test_a_kept_machine_serves_when_its_run_is_deployed(lab: Lab) -> None:
    lab.note("TRAINING")
    lab.train("0", disks=[lab.disk("d1")], **lab.keep())
    wait_for(lambda: lab.read("attempt-1/status.json") is not None, lab.serial)
    assert "training polite" not in lab.serial()
    lab.note("TRAINING", "DEPLOYING")
    lab.wait_for_line("training polite with no secret")
    lab.note("TRAINING", "DEPLOYING", "TEARING_DOWN", "SUCCEEDED")
    lab.faults(reboot="n1")
    lab.wait_for_line("training polite", count=2)
    assert lab.serial().count("training 0") == 1
    lab.faults(preempt="n1")
    wait_for(lambda: lab.node().state == State.PREEMPTED and not lab.processes(), lab.serial)
    assert lab.serial().count("training polite") == 2  # not started again after the signal
    assert lab.read("serve/status.json") is None
    assert lab.events() == []


@pytest.mark.parametrize(
    ("states", "attempts"),
    [(["TRAINING", "TEARING_DOWN"], 1), (["TRAINING", "DEPLOYING"], 2)],
    ids=["not-deployed", "another-attempt"],
)
def test_a_kept_machine_of_an_undeployed_run_ends(lab: Lab, states: list[str], attempts: int) -> None:
    lab.note(*states, attempts=attempts)
    lab.train("65", **lab.keep())
    assert lab.ended()["exit_code"] == 65
    assert "startup-script exit status 0" in lab.serial()
    assert "training polite" not in lab.serial()


def test_a_kept_machine_waits_until_its_servers_deadline(lab: Lab) -> None:
    """The run's record never changes."""
    lab.train("0", **{**lab.keep(), "dropforge-server-deadline": str(int(time.time()) + 3)})
    assert lab.ended()["exit_code"] == 0
    assert "training polite" not in lab.serial()


def test_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None and not Path(sys.executable).with_name("shellcheck").exists():
        pytest.skip("shellcheck is not installed")
    command = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    scripts = [SCRIPT, *sorted(sandbox.SHIMS.iterdir())]
    done = subprocess.run([command, *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
