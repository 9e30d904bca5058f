"""No text of a container, a spec or a cloud reaches the terminal as a control sequence."""

from __future__ import annotations

import ast
import io
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.events import Failed, Started
from dropforge.run.record import Endpoint, RunError, RunState
from dropforge_cli import plain as plain_module
from dropforge_cli.display import titled
from dropforge_cli.follow import LineDisplay, LiveDisplay, Snapshot
from dropforge_cli.plain import PlainConsole, echo_json, plain

from .conftest import CREATED, Deployed, attempt, entry

RUN = "job-0123456789ab"
CLIPBOARD, TITLE, CLEAR = "\x1b]52;c;cm0gLXJmIH4=\x07", "\x1b]0;owned\x07", "\x1b[2J\x1b[H"
EVIL = f"a{CLIPBOARD}b{TITLE}c{CLEAR}d\x9b2Je\x08\x08f\u202eg\x7fh\x00"


def is_plain(text: str) -> bool:
    return all(character in "\n\t" or character.isprintable() for character in text)


def test_control_characters_are_spelled_out() -> None:
    assert plain("\x1b[31m\x9b\u202e\x00") == r"\x1b[31m\x9b\u202e\x00"
    assert plain("10%\r20%\r\nend\ttab 日本語 é 👩‍💻") == "10%\n20%\nend\ttab 日本語 é 👩‍💻"
    assert is_plain(plain(EVIL))


def test_status_and_runs_show_no_control_sequence(deployed: Deployed) -> None:
    error = RunError(error_class=ErrorClass.CODE, message=EVIL, hint=EVIL)
    endpoint = Endpoint(url=EVIL, model=EVIL, service="s", region=EVIL, ready=CREATED, expires=CREATED + timedelta(1))
    ended = attempt(error=error)
    deployed.record(
        RUN, RunState.FAILED, name=EVIL, error=error, attempts=[ended], metrics={EVIL: 1.0}, endpoint=endpoint
    )
    deployed.ledger(RUN, entry("run.googleapis.com/Service", f"projects/p/locations/r/services/{EVIL}"))
    deployed.event(Started(run=RUN, attempt=1, sequence=1, time=CREATED, device=EVIL))
    for command in (("status", RUN), ("runs",), ("status", RUN, "--json"), ("runs", "--json")):
        output = deployed.run(*command).output
        assert "owned" in output or "clipboard" in output or command == ("runs",)
        assert is_plain(output), command


@pytest.mark.parametrize("is_live", [False, True])
def test_a_followed_run_shows_no_control_sequence_of_an_event(deployed: Deployed, is_live: bool) -> None:
    record = deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None, region=EVIL)])
    out = io.StringIO()
    console = PlainConsole(file=out, width=200, markup=False, force_terminal=is_live, color_system=None)
    failed = Failed(run=RUN, attempt=1, sequence=1, time=CREATED, error_class=ErrorClass.CODE, message=EVIL)
    snapshot = Snapshot(record, None, [failed])
    if is_live:
        with LiveDisplay(console) as display:
            display.show(snapshot)
    else:
        LineDisplay(console).show(snapshot)
    assert "owned" in out.getvalue()
    for attack in (CLIPBOARD, TITLE, CLEAR, "\x9b", "\u202e", "\x08"):
        assert attack not in out.getvalue()


@pytest.mark.parametrize("file", sorted(Path(plain_module.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_no_command_prints_past_the_filter(file: Path) -> None:
    """A command prints by `echo`, `echo_json`, or a console of display.py: a new one cannot forget the filter."""
    tree = ast.parse(file.read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    raw = {
        name for name in calls if re.fullmatch(r"print|Console|(click|rich)\.(echo|secho|print|ClickException)", name)
    }
    assert raw - ({"click.echo"} if file.stem == "plain" else set()) == set()
    assert not {name for name in names if re.match(r"sys\.(stdout|stderr)\.write", name)}
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert not imported & {"echo", "secho", "print"} or file.stem == "plain" or "from .plain import" in file.read_text()


def test_the_check_of_commands_finds_what_prints_past_the_filter(tmp_path: Path) -> None:
    for code in ("click.echo(x)", "print(x)", "Console().print(x)", "sys.stdout.write(x)", "click.secho(x)"):
        file = tmp_path / "new.py"
        file.write_text(code)
        with pytest.raises(AssertionError):
            test_no_command_prints_past_the_filter(file)


def test_json_escapes_control_characters_and_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json({EVIL: [EVIL, "é"]})
    printed = capsys.readouterr().out
    assert is_plain(printed)
    assert json.loads(printed) == {EVIL: [EVIL, "é"]}


def test_the_consoles_own_styles_stay() -> None:
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=True, color_system="standard", width=80).print(titled("bold", CLEAR))
    assert out.getvalue() == "\x1b[1mbold\x1b[0m  \\x1b[2J\\x1b[H\n"
