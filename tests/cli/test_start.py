"""The installed program: Ctrl-C at any moment, and standard streams that are closed or know ASCII only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from .commands import COMMAND
from .conftest import EXAMPLE

# A package that the command line imports, in place of the real one: it says that the import has begun, and waits.
SLOW = """
import sys, time
print("imports", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("module", ["click", "pydantic"])
@pytest.mark.usefixtures("foreground")
def test_ctrl_c_while_the_command_is_imported_is_130_without_a_traceback(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [*COMMAND, "validate", str(EXAMPLE)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in rest
    assert "Aborted" not in rest


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_at_a_question_is_130(tmp_path: Path) -> None:
    """In a terminal of its own: there, click asks, and turns Ctrl-C into its own exception."""
    import pty

    program = (
        "import click; from dropforge_cli import main; from dropforge_cli.start import main as start\n"
        "@click.command()\ndef ask(): click.prompt('asks', err=True)\n"
        "main.Commands.get_command = lambda self, ctx, name: ask\nstart()"
    )
    above, below = pty.openpty()
    command = [sys.executable, "-P", "-c", program, "runs"]
    with subprocess.Popen(command, stdin=below, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.read(4) == b"asks"
        code = interrupt(process)
        rest = process.stderr.read()
    os.close(above)
    os.close(below)
    assert code == 130
    assert b"Aborted" not in rest
    assert b"Traceback" not in rest


def interrupt(process: subprocess.Popen[bytes]) -> int:
    """Press Ctrl-C until a process ends: Python notices one just before a call of the system only after that call."""
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
    raise AssertionError("Ctrl-C ends nothing")


def shell(line: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", line, "sh", *COMMAND]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=directory, env=environment
    )


def test_a_closed_standard_output_is_one_line(tmp_path: Path) -> None:
    done = shell('"$1" validate absent.json >&-', tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: the standard output is closed; expected a terminal, a file or a pipe\n"


def test_a_closed_input_or_error_output_changes_nothing(tmp_path: Path) -> None:
    done = shell(f'"$1" validate {EXAMPLE} <&- 2>&-', tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{EXAMPLE}: ok, gemma-2b-text-to-sql\n")


def test_text_that_an_ascii_output_cannot_encode_is_spelled(tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["dataset"]["source"] = "gs://some-bucket/\u2192.jsonl"
    (tmp_path / "spec.json").write_text(json.dumps(document))
    done = shell('"$1" plan spec.json', tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "google/gemma-2b on gs://some-bucket/\\u2192.jsonl" in done.stdout
