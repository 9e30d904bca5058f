"""The console of a local stack: it starts when somebody opens it, goes on after each kill, and ends with the stack."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests
from click.testing import CliRunner
from tests.patience import PATIENCE_SECONDS

from dropforge_cli.main import cli
from dropforge_local.stack import control
from dropforge_local.stack.console_process import MODULE

from .conftest import User
from .visitor import Visitor

pytestmark = pytest.mark.slow


def consoles(user: User) -> list[psutil.Process]:
    """The console processes of a stack, also after the stack was killed."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if MODULE in (process.info["cmdline"] or []) and Path(process.cwd()) == user.state:
            found.append(process)
    return found


def link_of(user: User, *words: str) -> str:
    result = CliRunner().invoke(cli, ["open", *words, "--state", str(user.state)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def enter(user: User, *words: str) -> Visitor:
    visitor = Visitor(link_of(user, *words))
    assert visitor.enter().status_code == 303
    return visitor


def test_the_console_starts_with_its_first_visitor_and_survives_every_kill(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    assert consoles(user) == []
    visitor = enter(user)
    assert visitor.root == user.info.console
    assert visitor.get("/runs").status_code == 200
    (console,) = consoles(user)
    assert console.ppid() == user.info.pid

    console.kill()
    console.wait(PATIENCE_SECONDS)
    assert visitor.get("/runs").status_code == 200  # by another process, for the same session
    (console,) = consoles(user)

    stack = psutil.Process(user.info.pid)
    stack.kill()
    stack.wait(PATIENCE_SECONDS)
    console.wait(PATIENCE_SECONDS)  # it does not outlive its stack
    user = own_stack()
    assert user.info.console == visitor.root
    assert visitor.get("/runs").status_code == 200

    stream = visitor.get("/live", stream=True)
    assert next(stream.iter_lines())
    control.down(user.state)  # also with an open stream
    assert consoles(user) == []
    assert not control.leftovers(user.state).ports
    with pytest.raises(requests.ConnectionError):
        visitor.get("/runs")


def test_a_link_of_the_command_line_leads_to_a_run(user: User) -> None:
    run = user.drop(user.spec("succeed"))
    user.wait(run)
    visitor = Visitor(link_of(user, run[:-4]))
    assert visitor.enter().headers["location"] == f"/runs/{run}"
    visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    page = f"{user.info.console}/runs/{run}"
    status = CliRunner().invoke(cli, ["status", run, "--state", str(user.state)]).stdout
    assert f"console {page}\n" in status
    assert (
        json.loads(CliRunner().invoke(cli, ["status", run, "--json", "--state", str(user.state)]).stdout)["console_url"]
        == page
    )
    assert CliRunner().invoke(cli, ["open", "no-such-run", "--state", str(user.state)]).exit_code == 1
    user.slack(run, "succeeded")
    with urllib.request.urlopen(f"{user.info.http}/slack/messages", timeout=60) as response:
        assert page in response.read().decode()


def test_who_has_no_link_reaches_nothing(user: User) -> None:
    """The directory of the tokens is the owner's alone, and no token is in the stack's files or in its environment."""
    token = link_of(user).partition("token=")[2].partition("&")[0]
    assert requests.get(f"{user.info.console}/runs", timeout=60).status_code == 401
    assert (user.state / "console").stat().st_mode & 0o077 == 0
    assert token not in (user.state / "stack.json").read_text()
    assert not any(token in path.read_text() + path.name for path in (user.state / "console").iterdir())
