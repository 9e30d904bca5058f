"""A hostile training container on every target reaches nothing outside of its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge.run.record import RunState
from dropforge_local.base.identity import Identity
from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackInfo
from dropforge_local.stack.deployment import IMAGES

from ..deployments import clients
from .conftest import NOOP_CONFIG, RARE_SWEEP_SECONDS, User
from .targets import PARTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# What the account of every trainer may do; the test shows that it has no effect on the other run.
ALLOWED = {
    "write one's own model",
    "forge the status of another run's machine",
    "forge a machine of no run",
    "forge another run's manifest",
    "forge another run's checkpoint",
    "forge another run's machine's end",
    "say that another run succeeded",
    "say that another run failed",
    "say that another run preempted",
}


@pytest.fixture
def user(tmp_path: Path, open_user: Callable[[Path], User], fork_stack: Callable[[Path], StackInfo]) -> Iterator[User]:
    """The user of a stack on which every trainer is hostile."""
    state, image = tmp_path / "stack", f"{IMAGES}/train-hostile:test"
    trainers = {f"DROPFORGE_TRAIN_{kind}_IMAGE": image for kind in ("TRL", "MAXTEXT", "RAY")}
    settings = {**NOOP_CONFIG.settings, **trainers}
    replace(NOOP_CONFIG, settings=settings, sweep_seconds=RARE_SWEEP_SECONDS).save(state)
    fork_stack(state)
    yield open_user(state)
    local.down(state)


def test_a_hostile_container_reaches_nothing_outside_of_its_run(user: User) -> None:
    victim = user.drop(user.spec())
    before = user.wait(victim, "TRAINING")
    limits = {"max_attempts": 1}
    runs = {
        kind: user.drop(user.spec(target={"type": kind, **part}, labels={"victim": victim}, limits=limits))
        for kind, part in PARTS.items()
    }
    bucket = clients.storage().bucket(user.settings.runs_bucket)
    for kind, run in runs.items():
        assert user.wait(run, timeout=PATIENCE_SECONDS).state is RunState.FAILED, kind
        tried = json.loads(bucket.blob(f"models/{run}/tried.json").download_as_bytes())
        assert {what: answer for what, answer in tried.items() if answer != "403"} == dict.fromkeys(ALLOWED, "done"), (
            kind
        )
        assert len(tried) > 50
    sweep(user)
    after = user.store.record(victim)
    assert (after.state, after.execution, after.history) == (RunState.TRAINING, before.execution, before.history)
    assert len(user.resources(victim)) == 1
    user.publish("dropforge-operations", json.dumps({"cancel": victim}).encode())
    assert user.wait(victim).state is RunState.CANCELLED


def sweep(user: User) -> None:
    url = f"{user.info.functions}sweep"
    token = Identity((user.state / "identity").read_text()).token("OIDC", url)
    answer = requests.post(url, json={}, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_SECONDS)
    assert answer.ok, answer.text
