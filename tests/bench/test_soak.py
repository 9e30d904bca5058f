"""`make soak` measures what grows while a training lasts, and tells growth from noise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench._samples import Measure, Point, grows_steadily, leaks, program, slope, table
from dropforge_local.stack.config import ROOT

SOAK_MINUTES = 2.0
DESCRIPTORS = Measure("descriptors", "stack.main")


def sampled(value: Callable[[float], float], seconds: int = 600) -> list[Point]:
    return [Point(at, value(at)) for at in range(0, seconds + 1, 5)]


@pytest.mark.parametrize(
    ("value", "grows"),
    [
        (lambda at: 40 + at / 60, True),
        (lambda at: 40 + at // 100 + (30 if at % 20 else 0), True),  # a leak under bursts
        (lambda at: 40 + (30 if at % 20 else 0), False),  # bursts
        (lambda at: 40 + min(at, 200) / 10, False),  # a start that settles
        (lambda at: 40 + (at > 300), False),  # one more at once, as with a new machine
        (lambda at: 40 - at / 60, False),
    ],
)
def test_a_steady_growth_is_told_from_bursts_and_from_a_start(value: Callable[[float], float], grows: bool) -> None:
    assert grows_steadily(sampled(value)) is grows


def test_a_short_time_is_not_judged() -> None:
    assert not grows_steadily(sampled(lambda at: at, seconds=120))
    assert not grows_steadily(sampled(lambda at: at)[::40])


def test_only_descriptors_and_threads_are_leaks() -> None:
    points = sampled(lambda at: 40 + at / 60)
    found = {DESCRIPTORS: points, Measure("memory MiB", "stack.main"): points}
    assert leaks(found) == ["the descriptors of stack.main grow steadily: by 1.0 a minute, to 50"]


def test_the_table_has_first_last_most_and_slope() -> None:
    points = sampled(lambda at: 100 if at == 30 else at / 60)
    assert slope(points) == pytest.approx(1)
    _, line = table({DESCRIPTORS: points})
    assert line.split() == ["descriptors:", "stack.main", "0.0", "10.0", "100.0", "+1.00"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/v/bin/python", "-P", "-m", "dropforge_local.stack.main", "state", "0"], "stack.main"),
        (["python3.12", "-I", "-S", "/srv/shim.py", "folder"], "shim"),
        (["python", "-c", "from multiprocessing.spawn import spawn_main"], "python"),
        (["ray::IDLE", "", ""], "ray::IDLE"),
        (["/usr/bin/bash", "-c", "sleep 1"], "bash"),
        ([], "ended"),
    ],
)
def test_a_process_is_named_after_its_program(command: list[str], name: str) -> None:
    assert program(command) == name


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_soak_on_cloud_run_succeeds_and_shows_every_measure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench._soak", "cloud_run", "--minutes", str(SOAK_MINUTES)]
    done = subprocess.run([*command, "--state", str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 resources, 0 processes, 0 ports are left" in done.stdout
    for event in ("asleep", "preempted"):
        assert f" {event}\n" in done.stdout
    parts = ("stack.main", "stack.functions_host", "containers.train_trl.train", "shim")
    rows = [f"{what}: {part}" for what in ("memory MiB", "descriptors", "threads") for part in parts]
    rows += ["disk MiB: blobs/", "disk MiB: state.db", "requests a minute: trainer", "requests a minute: inspect"]
    rows += [f"objects KiB: {kind}" for kind in ("runs: record.json", "runs: events/", "models: series/")]
    shown = {line[:56].strip() for line in done.stdout.splitlines()}
    assert [row for row in rows if row not in shown] == []
