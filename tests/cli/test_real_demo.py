"""`dropforge demo` with real training and serving."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dropforge_local.base.recording import FILE, SERVER, TRAINER

from ..contract.calls import grants, needs, unmet, unused
from .commands import Process
from .conftest import ROOT

pytestmark = pytest.mark.slow

# The real demo on a stack that records the calls of its containers.
RECORDED = """
from dataclasses import replace
from dropforge_local.stack import control as stack
from dropforge_local.stack.config import StackConfig
start = stack.up
def up(state, **options):
    replace(StackConfig.of(state), record=True).save(state)
    return start(state, **options)
stack.up = up
from dropforge_cli.main import cli
cli(prog_name="dropforge")
"""
RECORDED_COMMAND = [sys.executable, "-P", "-c", RECORDED]


@pytest.mark.timeout(1200)
def test_the_real_demo_trains_serves_answers_and_keeps_its_secret(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    demo = start("demo", str(ROOT / "examples" / "local" / "cloud_run.json"), command=RECORDED_COMMAND)
    assert demo.code(1000) == 0, demo.text()
    output = demo.text()
    before, after = re.search(r"exact match +(\S+) +(\S+)", output).groups()  # type: ignore[union-attr]
    assert float(before) < 0.1
    assert float(after) >= 0.8
    assert re.search(r"^expected +(select .*)\nbase +.*\nserved +select ", output, re.M)
    assert "what is left  0 resources, 0 processes, 0 ports" in output
    assert canaries(tmp_path / "build" / "demo") == []
    assert "local-canary-" not in output
    assert_containers_hold_what_they_need(tmp_path / "build" / "demo")


def assert_containers_hold_what_they_need(state: Path) -> None:
    """Check that the real trainer and server have a permission for every call, and few unused permissions."""
    made = {need for need in needs(state / FILE) if need.account in (TRAINER, SERVER)}
    assert unmet(made, grants()) == set()
    left = {(grant.account, grant.scope) for grant in unused(made, grants(), (TRAINER, SERVER))}
    assert left == NOT_ON_CLOUD_RUN


# Cloud Run pulls images, reads secrets and checks callers itself.
NOT_ON_CLOUD_RUN = {
    (TRAINER, "registry"), (SERVER, "registry"), (TRAINER, "training_secrets"), (SERVER, "endpoint_keys"),
}  # fmt: skip


def canaries(state: Path) -> list[Path]:
    """Return files with the secret's value, except the database of the emulated Secret Manager."""
    files = [path for path in state.rglob("*") if path.is_file() and not path.name.startswith("state.db")]
    return [path for path in files if b"local-canary-" in path.read_bytes()]
