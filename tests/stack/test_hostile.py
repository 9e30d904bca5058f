"""A hostile training container on every target reaches nothing outside of its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
# What every trainer may do; the test shows that it has no effect on the other run.
ALLOWED = {
    "token: write one's own model",
    "token: list one's own model",
    "ask for one's own token",
    "say that another run succeeded",
    "say that another run failed",
    "say that another run preempted",
}
REFUSED = ("403", "404", "400")
# Whoever has the wrong proof does not learn whether there is such a run; a token within a boundary is no access token.
NOT_FOUND = {
    "ask for another run's token with one's own proof",
    "ask for another run's token without a proof",
    "ask for another run's token with a proof by one's own key",
    "ask for the token of no run",
    "widen the run's token",
}
PREFIXES = ("models", "checkpoints", "machines")
LEFT = 4  # the objects of the victim


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
    bucket = clients.storage().bucket(user.settings.runs_bucket)
    left = artifacts(bucket)
    assert len(left) == LEFT, left
    limits = {"max_attempts": 1}
    runs = {
        kind: user.drop(user.spec(target={"type": kind, **part}, labels={"victim": victim}, limits=limits))
        for kind, part in PARTS.items()
    }
    for kind, run in runs.items():
        assert user.wait(run, timeout=PATIENCE_SECONDS).state is RunState.FAILED, kind
        tried = json.loads(bucket.blob(f"models/{run}/tried.json").download_as_bytes())
        done = {what: answer for what, answer in tried.items() if answer not in REFUSED}
        assert done == dict.fromkeys(ALLOWED, "done"), kind
        assert {what for what, answer in tried.items() if answer != "403" and what not in ALLOWED} == NOT_FOUND, kind
        assert len(tried) > 400
    # The machine's script has written how the container ended, by a token of its own.
    assert bucket.blob(f"machines/{runs['tpu_vm']}/attempt-1/status.json").exists()
    own = tuple(f"{prefix}/{run}/" for prefix in PREFIXES for run in runs.values())
    assert {name: at for name, at in artifacts(bucket).items() if not name.startswith(own)} == left
    sweep(user)
    after = user.store.record(victim)
    assert (after.state, after.execution, after.history) == (RunState.TRAINING, before.execution, before.history)
    assert len(user.resources(victim)) == 1
    user.publish("dropforge-operations", json.dumps({"cancel": victim}).encode())
    assert user.wait(victim).state is RunState.CANCELLED


def artifacts(bucket: Any) -> dict[str, int]:
    """The objects that containers write, with their generations."""
    return {blob.name: blob.generation for prefix in PREFIXES for blob in bucket.list_blobs(prefix=f"{prefix}/")}


def sweep(user: User) -> None:
    url = f"{user.info.functions}sweep"
    token = Identity((user.state / "identity").read_text()).token("OIDC", url)
    answer = requests.post(url, json={}, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_SECONDS)
    assert answer.ok, answer.text
