"""What the local stack cannot run here is refused before anything starts."""

from __future__ import annotations

import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from dropforge.spec import JobSpec, parse_spec
from dropforge_cli.demo import SIGNALS
from dropforge_cli.deployment import Deployment
from dropforge_cli.machine import check_machine
from dropforge_cli.main import cli
from dropforge_cli.problems import CliError
from dropforge_cli.sources import prepare

from .conftest import ROOT

LOCAL = ROOT / "examples" / "local"


def spec(name: str) -> JobSpec:
    return parse_spec((LOCAL / name).read_bytes())


@pytest.mark.parametrize("name", [path.name for path in sorted(LOCAL.glob("*.json"))])
def test_macos_runs_the_examples_of_cloud_run_and_gke_and_linux_runs_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    check_machine(spec(name))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    if spec(name).target.type in ("cloud_run", "gke"):
        check_machine(spec(name))
    else:
        with pytest.raises(CliError, match="which the local stack cannot run on Darwin: "):
            check_machine(spec(name))


@pytest.fixture
def signals() -> Iterator[None]:
    """The demo ignores signals at its end. In this process, every later child would ignore them, too."""
    handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_demo_says_so_before_it_installs_or_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    result = CliRunner().invoke(cli, ["demo", str(LOCAL / "ray.json"), "--state", str(tmp_path / "demo")])
    assert result.exit_code == 1
    assert "/target/type is 'ray', which the local stack cannot run on Darwin: Ray supports clusters" in result.output
    assert "started the local stack" not in result.output
    assert "prepared the environment" not in result.output


def test_submit_says_so_for_the_local_stack_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    unused = cast(Any, None)
    with pytest.raises(CliError, match="/target/type is 'tpu_vm', which the local stack cannot run on Darwin"):
        prepare(spec("tpu_vm.json"), Deployment(unused, "here", stack=cast(Any, object())))
    monkeypatch.setattr("dropforge_cli.sources.missing", lambda *_: {})
    prepare(spec("tpu_vm.json"), Deployment(unused, "a project", stack=None))
