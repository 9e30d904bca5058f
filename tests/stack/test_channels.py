"""A run on a local stack tells every channel, each message once, also when one channel was down at the end."""

from __future__ import annotations

import base64
import html
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.run.record import RunState
from dropforge.spec import JobSpec
from dropforge_cli.deployment import of_stack
from dropforge_cli.sources import make_secrets
from dropforge_local.emulators.channels.emulator import TOKEN
from dropforge_local.emulators.slack.emulator import CHANNEL

from ..deployments import clients
from .conftest import User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHA = "0123456789abcdef0123456789abcdef01234567"
STATES = ["ACCEPTED", "TRAINING", "CANCELLED"]


def notify(user: User) -> dict[str, Any]:
    """Create the secrets of all channels; return the spec's `notify`."""
    values = {
        "webhook-bot": "xoxb-local",
        "webhook-url": f"{user.info.http}/channels/webhook/x",
        "webhook-signing": f"whsec_{base64.b64encode(bytes(32)).decode()}",
        "webhook-teams": f"{user.info.http}/channels/teams/x",
        "webhook-github": f"{TOKEN}x",
    }
    parent = f"projects/{user.settings.project}"
    for name, value in values.items():
        secret = clients.secrets().create_secret(
            parent=parent, secret_id=name, secret={"replication": {"automatic": {}}}
        )
        clients.secrets().add_secret_version(parent=secret.name, payload={"data": value.encode()})
    return {
        "slack": {"token_secret": "webhook-bot", "channel": CHANNEL},
        "webhook": {"url_secret": "webhook-url", "signing_secret": "webhook-signing"},
        "teams": {"webhook_secret": "webhook-teams"},
        "github": {"repository": "owner/name", "sha": SHA, "token_secret": "webhook-github"},
    }


def told(user: User, path: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = requests.get(f"{user.info.http}/{path}/messages", timeout=60).json()["messages"]
    return messages


def events(user: User) -> list[str]:
    """The ids of the events that the webhook got, in order."""
    return [m["headers"]["webhook-id"] for m in told(user, "channels") if m["channel"] == "webhook"]


def test_every_channel_hears_of_every_state_once(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    run = user.drop(user.spec("hang", notify=notify(user)))
    user.wait(run, "TRAINING")
    wait_until(lambda: len(events(user)) >= 2)
    requests.post(f"{user.info.http}/slack/_fail", json={"count": 2, "status": 503}, timeout=60)
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    assert user.wait(run).state is RunState.CANCELLED
    assert " cancelled by topic " in user.slack(run, "cancelled")[-1]

    assert [event.rsplit("/", 1)[1].upper() for event in events(user)] == STATES
    messages = told(user, "channels")
    assert [m["channel"] for m in messages].count("teams") == len(STATES)
    statuses = [json.loads(m["body"])["state"] for m in messages if m["channel"] == "github"]
    assert statuses == ["pending", "pending", "error"]
    threads = [m["payload"].get("thread_ts") for m in told(user, "slack") if run in json.dumps(m["payload"])]
    noted = json.loads(user.store.read(names.slack_object(run)).data)["ts"]
    assert threads == [None, noted, noted]
    others = {f"1/cancelled@{channel}" for channel in ("webhook", "teams", "github")}
    assert others <= set(user.store.record(run).notices)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_command_in_the_message_about_a_success_calls_the_model(user: User) -> None:
    run = user.drop(user.spec(serve={"type": "cloud_run", "ttl": "1h"}))
    assert user.wait(run).state is RunState.SUCCEEDED
    assert user.slack(run, "succeeded")[-1].endswith("succeeded")
    message = json.dumps(next(m for m in reversed(told(user, "slack")) if run in json.dumps(m))["payload"])
    command = html.unescape(json.loads(f'"{message.partition("`")[2].partition("`")[0]}"'))
    assert f"$(dropforge token {run})" in command
    clean = {name: v for name, v in os.environ.items() if not name.startswith("DROPFORGE_") and "EMULATOR" not in name}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    environment = {**clean, "PATH": path, "DROPFORGE_STATE": str(user.state)}
    answered = subprocess.run(["sh", "-c", f"{command} --fail --silent"], env=environment, capture_output=True)
    assert answered.returncode == 0, answered
    assert json.loads(answered.stdout)["choices"][0]["message"]
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.until(lambda: user.resources(run) == [])


def test_the_secrets_that_the_command_line_makes_reach_every_channel(user: User) -> None:
    spec = user.spec(
        notify={
            "slack": {"token_secret": "webhook-made-bot", "channel": CHANNEL},
            "webhook": {"url_secret": "webhook-made-url", "signing_secret": "webhook-made-signing"},
            "teams": {"webhook_secret": "webhook-made-teams"},
            "github": {"repository": "owner/name", "sha": SHA, "token_secret": "webhook-made-github"},
        }
    )
    made = make_secrets(JobSpec.model_validate(spec), of_stack(user.info))
    assert sorted(made) == [f"webhook-made-{name}" for name in ("bot", "github", "signing", "teams", "url")]
    run = user.drop(spec)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert user.slack(run, "succeeded")[-1].endswith("succeeded")
    wait_until(lambda: {m["channel"] for m in told(user, "channels") if run in m["body"]} >= {"webhook", "teams"})
    assert "github" in {m["channel"] for m in told(user, "channels")}
