"""`dropforge logs`: what people read of a container's lines, in the local stack and from gcloud."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dropforge.base.log import log
from dropforge.base.log_lines import FIELDS, entries, readable, readable_gcloud
from dropforge.run.record import RunState

from .conftest import Deployed, entry

RUN = "job-0123456789ab"
TOKEN = "hf_" + "a1b2c3d4" * 4
TIME = "2026-11-24T05:58:03.123Z"


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def line(**fields: Any) -> str:
    return json.dumps({"message": "m", **fields})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line(time=TIME, severity="INFO", stage="train", run=RUN), "11-24 06:58:03 m"),
        (line(time=TIME, severity="WARNING"), "11-24 06:58:03 WARNING m"),
        (line(step=40, total_steps=160, loss=1.23456), "m, step 40 of 160, loss 1.235"),
        (line(step=0, loss=None), "m, step 0"),
        (line(loss=float("nan"), hint="lower it"), "m, loss nan, hint: lower it"),
        (line(time="yesterday", loss="low", step=[1]), "m, step [1], loss low"),
        ('{"loss": 1}', '{"loss": 1}'),
        ('{"message": 1}', '{"message": 1}'),
        ("{" * 100_000, "{" * 100_000),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("", ""),
    ],
)
def test_a_line_for_people(text: str, expected: str) -> None:
    assert readable(text) == expected


def test_what_the_code_logs_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    log("not gone", stage="teardown", run=RUN, severity="ERROR")
    day, clock, rest = readable(capsys.readouterr().err.strip()).split(" ", 2)
    assert (len(day), len(clock), rest) == (5, 8, "ERROR not gone")


def test_a_credential_in_the_escapes_of_json_is_redacted() -> None:
    hidden = '{"message": "token ' + "".join(f"\\u{ord(character):04x}" for character in TOKEN) + '"}'
    assert TOKEN not in hidden
    for shown in (readable(hidden), readable(f"token {TOKEN}"), readable_gcloud("\t".join([TIME, "INFO", hidden]))):
        assert shown.endswith("token [redacted]")


def columns(**fields: str) -> str:
    return "\t".join({**dict.fromkeys(FIELDS, ""), "timestamp": TIME, "severity": "INFO", **fields}.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            columns(message="training", step="4", total_steps="8", loss="0.5"),
            "11-24 06:58:03 training, step 4 of 8, loss 0.5",
        ),
        (columns(severity="ERROR", message="m", hint="h"), "11-24 06:58:03 ERROR m, hint: h"),
        (columns(textPayload="a\tb"), "11-24 06:58:03 a\tb"),
        (columns(textPayload=line(severity="ERROR", time="2020-01-01T00:00:00Z")), "11-24 06:58:03 ERROR m"),
        (f"{TIME}\tINFO\tthe first of two lines", "11-24 06:58:03 the first of two lines"),
        ("the second of two lines\t\t\t\t\t", "the second of two lines"),
        ("no time\tat\tall", "no time\tat\tall"),
    ],
)
def test_a_line_of_gcloud_for_people(text: str, expected: str) -> None:
    assert readable_gcloud(text) == expected


def test_lines_of_gcloud_are_grouped_to_entries() -> None:
    first, second, third = columns(message="a"), f"{TIME}\tINFO\ttwo", "lines\t\t\t\t\t"
    assert list(entries([first, second, third, first])) == [[first], [second, third], [first]]
    assert list(entries([])) == []


@pytest.fixture
def gcloud(deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gcloud that prints a file, for a run with a resource."""
    deployed.record(RUN, RunState.SUCCEEDED)
    deployed.ledger(RUN, entry("run.googleapis.com/Job", f"projects/p/locations/us-central1/jobs/df-{RUN}-a1"))
    program, output = tmp_path / "bin" / "gcloud", tmp_path / "output"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec cat "{output}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return output


def test_gcloud_prints_the_same(deployed: Deployed, gcloud: Path) -> None:
    gcloud.write_text(columns(message="new \x1b[2J") + "\n" + f"{TIME}\tERROR\told\n{TOKEN}\t\t\t\t\t\n")
    result = deployed.run("logs")
    assert result.stdout.splitlines() == ["11-24 06:58:03 new \\x1b[2J", "11-24 06:58:03 ERROR old", "[redacted]"]
    assert "jsonPayload.loss" in result.stderr
    newest = deployed.run("logs", "job", "--tail", 2)
    assert newest.stdout.splitlines() == ["11-24 06:58:03 ERROR old", "[redacted]", "11-24 06:58:03 new \\x1b[2J"]


def test_json_prints_what_gcloud_has(deployed: Deployed, gcloud: Path) -> None:
    gcloud.write_text(f'[\n  {{"textPayload": "{TOKEN}"}}\n]\n')
    result = deployed.run("logs", RUN, "--json")
    assert "--format=json" in result.stderr
    assert json.loads(result.stdout) == [{"textPayload": "[redacted]"}]
