"""Secrets of whole runs appear in no output of the stack, although the trainer leaks them in every way."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from tests.patience import PATIENCE_SECONDS

from dropforge.run.record import RunState
from dropforge_cli.main import cli
from dropforge_local.stack import control as local
from dropforge_local.stack.deployment import IMAGES

from ..deployments import clients
from .conftest import NOOP_CONFIG, NOOP_IMAGES, User
from .targets import PARTS, SERVES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
CANARY = "Canary7f3a"
SECRETS = {
    "hf-token": "hf_" + CANARY * 3,
    "special": f'p@ss"w\\ord/&?=% é{{{CANARY}}}+',
    "plain": f"{CANARY}-of-no-known-prefix",
}
# Each value, also in its percent-encoded, JSON or base64 form, contains one of these strings.
TRACES = [CANARY, "Q2FuYXJ5N2YzY", "NhbmFyeTdmM2", "DYW5hcnk3ZjNh"]


@pytest.fixture
def canary_stack(tmp_path: Path, open_user: Callable[[Path], User]) -> Iterator[User]:
    repository, state = tmp_path / "repository", tmp_path / "stack"
    shutil.copytree(NOOP_IMAGES, repository)
    shutil.copytree(ROOT / "containers" / "common", repository / "containers" / "common")
    shutil.copy(ROOT / "containers" / "__init__.py", repository / "containers")
    shutil.copytree(ROOT / "functions" / "dropforge", repository / "functions" / "dropforge")
    image = f"{IMAGES}/train-canary:test"
    trainers = {f"DROPFORGE_TRAIN_{kind}_IMAGE": image for kind in ("TRL", "MAXTEXT", "RAY")}
    replace(NOOP_CONFIG, images=str(repository), settings={**NOOP_CONFIG.settings, **trainers}).save(state)
    local.up(state)
    yield open_user(state)
    local.down(state)


def test_no_output_contains_a_secret(canary_stack: User) -> None:
    user = canary_stack
    webhook = f"{user.info.http}/slack/services/T/B/{CANARY}"
    for name, value in {**SECRETS, "webhook-canary": webhook}.items():
        secret = clients.secrets().create_secret(
            parent=f"projects/{user.settings.project}", secret_id=name, secret={"replication": {"automatic": {}}}
        )
        clients.secrets().add_secret_version(parent=secret.name, payload={"data": value.encode()})
    watch = ProcessWatch()
    watch.start()
    variables = {"HF_TOKEN": "hf-token", "PASSWORD": "special", "MY_KEY": "plain"}
    notify = {"slack": {"webhook_secret": "webhook-canary"}}
    runs = []  # all at once, because runs mostly wait
    for kind, part in PARTS.items():
        serve = {"type": kind, **SERVES[kind]} if kind in SERVES else None
        target = {"type": kind, **part}
        behave = "fail-once" if kind == "cloud_run" else "succeed"
        runs.append(user.drop(user.spec(behave, target=target, serve=serve, secrets=variables, notify=notify)))
    quoting = user.drop(user.spec("quote-a-row", notify=notify))
    for run in runs:
        record = user.wait(run, timeout=PATIENCE_SECONDS)
        assert record.state is RunState.SUCCEEDED, record.error
        assert user.slack(run, "succeeded")
    assert "[redacted]" in str(user.store.record(runs[0]).attempts[0].error)
    assert_no_row_is_told(user, quoting)
    watch.stop()
    assert watch.leaks == set()
    assert watch.trainers  # the watch saw the processes of trainers
    for run in runs:
        outputs = [
            command(user, *arguments) for arguments in (["status", run], ["status", run, "--json"], ["logs", run])
        ]
        assert "[redacted]" in outputs[-1] or "rayjobs" in outputs[-1]  # Ray keeps the output of its jobs to itself
        assert leaks_in("\n".join(outputs)) == []
    for name, data in sinks(user):
        assert leaks_in(data) == [], name


def assert_no_row_is_told(user: User, run: str) -> None:
    """A library's error quotes a training row: the container's own log has it, and nothing else has."""
    assert user.wait(run, timeout=PATIENCE_SECONDS).state is RunState.FAILED
    assert user.slack(run, "failed")
    messages = [json.dumps(message) for message in _get(user, "slack/messages")["messages"]]
    told = [message for message in messages if run in message]
    told += [command(user, "status", run), command(user, "status", run, "--json")]
    told += [user.store.read(name).data.decode() for name in user.store.names(f"runs/{run}/")]
    assert not [text for text in told if "RowCanary" in text]
    assert sum("ValueError at " in text for text in told) >= 6  # Slack, status, its JSON, record, report, event
    assert "RowCanary" in command(user, "logs", run)


def leaks_in(text: str) -> list[str]:
    """Return each first occurrence of a canary in a text, with the text around it."""
    return [text[max(0, text.index(trace) - 80) :][:200] for trace in TRACES if trace in text]


def command(user: User, *arguments: str) -> str:
    result = CliRunner().invoke(cli, [*arguments, "--state", str(user.state)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.output)


def sinks(user: User) -> Iterator[tuple[str, str]]:
    """Yield (name, content) of everything that the stack stores or shows, except Secret Manager's own tables."""
    for path in user.state.rglob("*"):
        if path.is_file() and not path.name.startswith("state.db"):
            yield str(path), path.read_bytes().decode(errors="replace")
    database = sqlite3.connect(user.state / "state.db")
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert len([name for name in tables if name.startswith("secret")]) in range(1, 4)
    for table in tables:
        if not table.startswith("secret"):
            for row in database.execute(f"SELECT * FROM {table}"):
                yield f"table {table}", " ".join(_text(value) for value in row)
    database.close()
    yield "slack", json.dumps(_get(user, "slack/messages"))
    for execution in _get(user, f"v1/{user.settings.workflow_name}/executions?view=FULL")["executions"]:
        yield (
            execution["name"],
            json.dumps([execution, _get(user, f"v1/{execution['name']}/stepEntries?pageSize=1000")]),
        )


class ProcessWatch(threading.Thread):
    """Inspects all processes repeatedly.

    `leaks` names each process that has a secret in its arguments, and each process outside containers that has a
    secret in its environment. `trainers` has the container processes with a secret in their environment.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.leaks: set[str] = set()
        self.trainers: set[int] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.7):
            for process in psutil.process_iter():
                self._inspect(process)

    def stop(self) -> None:
        self._ended.set()
        self.join(60)

    def _inspect(self, process: psutil.Process) -> None:
        try:
            arguments, environment = process.cmdline(), process.environ()
        except psutil.Error:
            return
        if leaks_in(" ".join(arguments)):
            self.leaks.add(f"arguments of {arguments[:3]}")
        if leaks_in(" ".join(environment.values())):
            if "DROPFORGE_CONTAINER_ID" in environment:
                self.trainers.add(process.pid)
            else:
                self.leaks.add(f"environment of {arguments[:3]}")


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _get(user: User, path: str) -> Any:
    with urllib.request.urlopen(f"{user.info.http}/{path}", timeout=60) as response:
        return json.load(response)
