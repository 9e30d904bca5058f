"""Following a run: the objects that are read, and the output on a terminal and in a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial

import pytest
from rich.console import Console

from dropforge.base.errors import ErrorClass
from dropforge.base.figures import age, duration, number, usd
from dropforge.run.events import Checkpointed, Failed, JobEvent, Preempted, Started, Succeeded
from dropforge.run.record import Record, RunError, RunState
from dropforge.run.series import Progress
from dropforge.run.standstill import Standstill
from dropforge.run.store import RunStore
from dropforge_cli.deployment import Deployment, connect
from dropforge_cli.display import joined
from dropforge_cli.follow import Follower, LineDisplay, Snapshot, render, show_until_terminal, watch
from dropforge_cli.problems import CliError
from dropforge_cli.result import doubt
from dropforge_cli.specs import upload_spec

from .conftest import CREATED, Deployed, attempt, served

RUN = "job-0123456789ab"
SHOW_CURSOR = "\x1b[?25h"


def progress(step: int, attempt: int = 1, total: int = 40) -> Progress:
    return Progress(
        attempt=attempt, time=CREATED + timedelta(seconds=step), step=step,
        total_steps=total, loss=2.0 - step / 40, tokens_per_second=5210.4, eta_seconds=float(total - step),
    )  # fmt: skip


def event(kind: type[JobEvent], sequence: int, **fields: object) -> JobEvent:
    return kind(run=RUN, attempt=1, sequence=sequence, time=CREATED + timedelta(seconds=sequence), **fields)


def advance(store: RunStore, state: RunState, seconds: float) -> Record:
    return store.update(RUN, lambda record: record.entered(state, CREATED + timedelta(seconds=seconds)))


def test_a_run_without_a_record_has_no_snapshot(deployed: Deployed) -> None:
    assert Follower(deployed.store, RUN).snapshot() is None


def test_the_last_point_of_the_present_attempts_series_is_the_progress(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    follower = Follower(deployed.store, RUN)
    deployed.series(RUN, progress(10), progress(20))
    first, second = follower.snapshot(), follower.snapshot()
    assert first is not None
    assert second is not None
    assert first.progress == second.progress == progress(20)
    deployed.store.update(RUN, lambda r: r.model_copy(update={"attempts": [attempt(), attempt(2, ended=None)]}))
    third = follower.snapshot()
    assert third is not None
    assert third.progress is None


def test_each_event_is_in_one_snapshot(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    follower = Follower(deployed.store, RUN)
    begun, saved = event(Started, 1, device="cpu"), event(Checkpointed, 2, step=1, uri="gs://b/c")
    deployed.event(begun)
    first, second = follower.snapshot(), follower.snapshot()
    deployed.event(saved)
    third = follower.snapshot()
    assert [each.events for each in (first, second, third) if each] == [[begun], [], [saved]]


def test_a_start_that_came_with_the_end_has_a_line_of_its_own(deployed: Deployed) -> None:
    begun, ended = event(Started, 1, device="L4"), event(Failed, 2, error_class=ErrorClass.DATA, message="3 rows")
    assert isinstance(begun, Started)
    assert isinstance(ended, Failed)
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    deployed.event(ended.with_start(begun))
    snapshot = Follower(deployed.store, RUN).snapshot()
    assert snapshot is not None
    out = io.StringIO()
    LineDisplay(Console(file=out, width=200)).show(snapshot)
    lines = [line.split(" s  ") for line in out.getvalue().splitlines()]
    assert [float(seconds) for seconds, text in lines if "container" in text] == [1.0, 2.0]
    assert [text for _, text in lines if "container" in text] == [
        "the container has started on L4",
        "the container failed: data: 3 rows",
    ]


def test_progress_of_an_earlier_attempt_is_not_shown(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(), attempt(2, ended=None)])
    deployed.series(RUN, progress(39))
    follower = Follower(deployed.store, RUN)
    snapshot = follower.snapshot()
    assert snapshot is not None
    assert snapshot.progress is None
    deployed.series(RUN, progress(5, attempt=2))
    snapshot = follower.snapshot()
    assert snapshot is not None
    assert snapshot.progress == progress(5, attempt=2)


def test_a_run_that_waits_for_a_place_says_which_and_each_change_once(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.ACCEPTED)
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=200))
    for place in (3, 3, 1):
        record = deployed.store.update(RUN, partial(Record.with_wait, rule="max_runs", place=place, now=CREATED))
        display.show(Snapshot(record))
        assert f"number {place} by max_runs" in _printed(render(Snapshot(record), CREATED))
    assert f"number {place} by max_runs" in deployed.run("status", RUN).output
    assert "ACCEPTED, place 1" in deployed.run("runs").output
    display.show(Snapshot(deployed.store.update(RUN, lambda latest: latest.with_place(CREATED))))
    waits = [line.split(" s  ")[1] for line in out.getvalue().splitlines() if "waits" in line]
    assert [wait.split(" by ")[0] for wait in waits] == [f"waits for a place: number {place}" for place in (3, 1)]
    assert "waits" not in deployed.run("status", RUN).output


def test_an_attempt_and_an_endpoint_that_wait_say_why(deployed: Deployed) -> None:
    quota = "Waiting for nvidia-l4 quota in us-central1: 3 of 3 in use."
    deployed.record(RUN, RunState.PROVISIONING, attempts=[attempt(ended=None)])
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=200))
    for reason in (quota, quota, ""):
        record = deployed.store.update(RUN, partial(Record.with_wait_reason, attempt=1, reason=reason))
        display.show(Snapshot(record))
        assert (quota in deployed.run("status", RUN).output) is bool(reason)
        assert (quota in _printed(render(Snapshot(record), CREATED))) is bool(reason)
    assert [line.split(" s  ")[1] for line in out.getvalue().splitlines() if quota in line] == [
        f"waits to train: {quota}"
    ]
    advance(deployed.store, RunState.TRAINING, 60)
    advance(deployed.store, RunState.DEPLOYING, 90)
    deployed.store.update(RUN, lambda latest: latest.with_endpoint_wait_reason("pod x waits: ContainerCreating"))
    assert "the endpoint is not ready: pod x waits: ContainerCreating" in deployed.run("status", RUN).output


def test_a_cancelled_attempt_did_not_end_with_success(deployed: Deployed) -> None:
    stopped = attempt().model_copy(update={"error": None, "cancelled": True, "ended": CREATED})
    deployed.record(RUN, RunState.CANCELLED, attempts=[stopped])
    shown = deployed.run("status", RUN).output
    assert "cancelled" in shown
    assert "success" not in shown


def _printed(what: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(what)
    return out.getvalue()


def test_a_training_without_progress_says_so_instead_of_the_time_that_was_left(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    deployed.spec(RUN, limits={"stuck_after": "1h"})
    shown = []
    for seconds, last in ((30, 20), (240, 20), (720, 20), (720, 40)):
        deployed.series(RUN, *map(progress, range(1, last + 1)), quiet_seconds=seconds)
        snapshot = Follower(deployed.store, RUN).snapshot()
        assert snapshot is not None
        shown.append(_printed(render(snapshot, CREATED)))
        assert ("no progress" in deployed.run("status", RUN).output) is (seconds > 60)
    assert "20.0 s left" in shown[0]
    assert "no progress" not in shown[0]
    assert "no progress for 4 min at step 20 of 40; a step usually takes 1.0 s; it counts as stuck after" in shown[1]
    assert "stuck: no progress for 12 min at step 20 of 40; a step usually takes 1.0 s" in shown[2]
    assert "no progress for 12 min after the last step, 40 of 40; it evaluates and exports" in shown[3]
    assert f"`dropforge logs {RUN}`" in shown[3]
    assert not any(" left" in text for text in shown[1:])


def test_the_last_step_leaves_no_time(deployed: Deployed) -> None:
    """The evaluation and the export come after the last step. Nobody knows how long they take."""
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    deployed.spec(RUN)
    deployed.series(RUN, progress(40))
    output = deployed.run("status", RUN).output
    assert "step 40 of 40" in output
    assert "left" not in output


def test_a_pipe_gets_a_line_when_the_training_stands_still_and_when_it_is_stuck(deployed: Deployed) -> None:
    record = deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=200))
    for seconds in (70, 80, 600, 610):
        display.show(Snapshot(record, standstill=Standstill(seconds, 60, 600, 20, 40, 1.0)))
    display.show(Snapshot(record))
    display.show(Snapshot(record, standstill=Standstill(65, 60, 600, 20, 40, 1.0)))
    lines = [line.split(" s  ", 1)[1] for line in out.getvalue().splitlines() if "no progress" in line]
    assert [line.split(" at ")[0] for line in lines] == [
        "no progress for 70.0 s",
        "stuck: no progress for 10 min",
        "no progress for 65.0 s",
    ]


def test_a_spec_that_cannot_be_read_gives_no_verdict(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    deployed.series(RUN, *map(progress, range(1, 21)), quiet_seconds=720)
    assert "no progress" not in deployed.run("status", RUN).output


def test_a_pipe_gets_one_line_per_change(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.ACCEPTED)
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=200))
    follower = Follower(deployed.store, RUN)

    def show() -> None:
        snapshot = follower.snapshot()
        assert snapshot is not None
        display.show(snapshot)

    show()
    deployed.store.update(RUN, lambda record: record.model_copy(update={"attempts": [attempt(ended=None)]}))
    advance(deployed.store, RunState.PROVISIONING, 1)
    deployed.event(event(Started, 1, device="cpu"))
    show()
    for step in range(1, 41):
        deployed.series(RUN, progress(step))
        show()
    deployed.event(event(Checkpointed, 50, step=40, uri="gs://b/c"))
    deployed.event(event(Succeeded, 51, manifest_uri="gs://b/m"))
    advance(deployed.store, RunState.TEARING_DOWN, 52)
    advance(deployed.store, RunState.SUCCEEDED, 53)
    show()
    lines = out.getvalue().splitlines()
    assert lines[:4] == [
        "    0.0 s  accepted",
        "    1.0 s  provisioning  attempt 1 in us-central1",
        "    1.0 s  the container has started on cpu",
        "    1.0 s  step 1 of 40, loss 1.975, 5,210 tokens/s, 39.0 s left",
    ]
    assert len([line for line in lines if "step" in line and "of 40" in line]) == 11
    assert lines[-3:] == [
        "   50.0 s  checkpoint at step 40",
        "   52.0 s  tearing_down  attempt 1 in us-central1",
        "   53.0 s  succeeded  attempt 1 in us-central1",
    ]


def test_the_end_that_a_container_reports_is_shown(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.TRAINING, attempts=[attempt()])
    deployed.event(event(Preempted, 1, step=7))
    deployed.event(event(Failed, 2, error_class=ErrorClass.DATA, message="[1] is not a row"))
    out = io.StringIO()
    snapshot = Follower(deployed.store, RUN).snapshot()
    assert snapshot is not None
    LineDisplay(Console(file=out, width=200, markup=False)).show(snapshot)
    assert "preempted; step 7 is saved" in out.getvalue()
    assert "the container failed: data: [1] is not a row" in out.getvalue()


def test_a_terminal_gets_stages_with_seconds_and_a_bar(deployed: Deployed) -> None:
    record = deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    console.print(render(Snapshot(record, progress(20)), CREATED + timedelta(seconds=130)))
    assert "✓  accepted  90.0 s" in out.getvalue()
    assert "▶  training  40.0 s" in out.getvalue()
    assert "━" * 20 in out.getvalue()
    assert "step 20 of 40, loss 1.5, 5,210 tokens/s, 20.0 s left" in out.getvalue()


@pytest.fixture
def hurried(deployed: Deployed) -> Iterator[Deployment]:
    """The deployment with short polls and a short timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dropforge_cli.deployment.CLOUD_POLL_SECONDS", 0.01)
        patch.setattr("dropforge_cli.deployment.CLOUD_PATIENCE_SECONDS", 0.5)
        yield connect(None)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_is_followed_to_its_end(deployed: Deployed, hurried: Deployment, terminal: bool) -> None:
    deployed.record(RUN, RunState.ACCEPTED)

    def work() -> None:
        for seconds, state in enumerate((RunState.TEARING_DOWN, RunState.CANCELLED)):
            advance(deployed.store, state, seconds)

    out = io.StringIO()
    with ThreadPoolExecutor() as pool:
        pool.submit(work)
        record = show_until_terminal(hurried, RUN, Console(file=out, width=120, force_terminal=terminal))
    assert record.state is RunState.CANCELLED
    assert "cancelled" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watched_run_ends_with_its_reason(deployed: Deployed, hurried: Deployment, terminal: bool) -> None:
    error = RunError(error_class=ErrorClass.DATA, message="line 3 is not JSON", hint="correct the data set")
    problem = {"pointer": "/model", "message": "does not exist", "found": '"m"', "expected": "a model"}
    ended = {"state": RunState.FAILED, "error": error, "problems": [problem]}
    deployed.record(RUN, RunState.ACCEPTED)
    out = io.StringIO()
    with ThreadPoolExecutor() as pool:
        pool.submit(deployed.store.update, RUN, lambda record: record.model_copy(update=ended))
        console = Console(file=out, width=80, force_terminal=terminal, color_system=None, highlight=False)
        assert not watch(hurried, RUN, console)
    assert out.getvalue().replace(SHOW_CURSOR, "").splitlines()[-3:] == [
        '/model: does not exist; found "m"; expected a model',
        "data: line 3 is not JSON",
        "hint: correct the data set",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watched_success_ends_with_metrics_and_endpoint(
    deployed: Deployed, hurried: Deployment, terminal: bool
) -> None:
    ended = {**served(), "state": RunState.SUCCEEDED, "metrics": {"exact_match": 0.5, "exact_match_before": 0.25}}
    deployed.record(RUN, RunState.ACCEPTED)
    out = io.StringIO()
    with ThreadPoolExecutor() as pool:
        pool.submit(deployed.store.update, RUN, lambda record: record.model_copy(update=ended))
        assert watch(hurried, RUN, Console(file=out, width=120, force_terminal=terminal, color_system=None))
    assert out.getvalue().replace(SHOW_CURSOR, "").splitlines()[-4:] == [
        "result   exact_match 0.25 → 0.5",
        "endpoint https://e.run.app/v1",
        "  model job, ended 2026-11-20 14:30 UTC",
        "cost so far: $3.00 (training $1.00, endpoint at most $2.00)",
    ]


def test_status_prints_the_result_of_a_watched_run_once(deployed: Deployed, hurried: Deployment) -> None:
    error = RunError(error_class=ErrorClass.DATA, message="line 3 is not JSON")
    deployed.record(RUN, RunState.TEARING_DOWN, error=error)
    with ThreadPoolExecutor() as pool:
        pool.submit(advance, deployed.store, RunState.FAILED, 1)
        result = deployed.run("status", RUN, "--watch")
    assert result.exit_code == 1
    assert result.output.count("data: line 3 is not JSON") == 1


def test_a_spec_without_a_run_is_an_error_after_the_timeout(deployed: Deployed, hurried: Deployment) -> None:
    with pytest.raises(CliError, match=f"run {RUN} did not appear within") as error:
        show_until_terminal(hurried, RUN, Console(file=io.StringIO()))
    assert "on_spec_uploaded of project p" in error.value.hint


@pytest.mark.parametrize("command", [["status"], ["status", "--watch"], ["cancel"], ["trace"]])
def test_commands_wait_for_the_run_of_a_spec_that_was_just_dropped(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """A script calls them as soon as `submit` has ended: the function may not have the upload's event yet."""
    monkeypatch.setattr("dropforge_cli.deployment.CLOUD_POLL_SECONDS", 0.01)
    run = upload_spec(connect(None), b"{}", "job.json")
    with ThreadPoolExecutor() as pool:
        working = pool.submit(deployed.run, *command, run)
        assert not wait([working], 0.1).done
        deployed.record(run, RunState.CANCELLED)
        result = working.result()
    assert "there is no run" not in result.output
    assert result.exit_code == (1 if "--watch" in command else 0), result.output
    assert run in result.output


def test_a_dropped_spec_that_becomes_no_run_is_an_error_after_the_timeout(
    deployed: Deployed, hurried: Deployment
) -> None:
    run = upload_spec(hurried, b"{}", "job.json")
    result = deployed.run("status", run)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: run {run} did not appear within 0 s")


@pytest.mark.parametrize("command", [["status"], ["status", "--watch"], ["cancel"], ["logs", "--follow"]])
def test_a_run_without_a_spec_is_an_error_at_once(deployed: Deployed, command: list[str]) -> None:
    upload_spec(connect(None), b"{}", "job.json")
    result = deployed.run(*command, RUN)  # each waits for 300 s if the specs bucket has a spec of this run
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == f"error: there is no run '{RUN}'"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0.0 s"), (12.34, "12.3 s"), (120, "2 min"), (5025, "1 h 24 min"), (7200, "2 h"), (180_000, "2 d 2 h")],
)
def test_durations_read_well(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-1, "0 s"), (119, "119 s"), (125, "2 min"), (7200, "2 h"), (172_800, "2 d")]
)
def test_ages_have_one_unit(seconds: float, expected: str) -> None:
    assert age(seconds) == expected


def test_parts_are_joined_in_lines_that_split_no_part() -> None:
    terminal = Console(file=io.StringIO(), width=20, force_terminal=True)
    assert joined("title ", ["one 1", "two 2", "three 3"], terminal) == "title one 1, two 2,\n      three 3"
    assert joined("title ", ["one 1", "two 2", "three 3"], Console(width=20)) == "title one 1, two 2, three 3"


def test_the_seconds_of_lines_never_decrease(deployed: Deployed) -> None:
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=120))
    record = deployed.record(RUN, RunState.TRAINING, attempts=[attempt(ended=None)])
    display.show(Snapshot(record, None, [event(Checkpointed, 9, step=9, uri="gs://b/c")]))
    display.show(Snapshot(record, progress(8)))  # the series came later
    seconds = [float(line.split()[0]) for line in out.getvalue().splitlines()]
    assert seconds == sorted(seconds)
    assert len(seconds) > 2


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, ""),
        ({"exact_match": 0.0}, ""),
        ({"exact_match": 0.0, "exact_match_before": 0.0}, "answers none of the held-out rows exactly"),
        ({"exact_match": 0.1, "exact_match_before": 0.0, "loss": 1.0, "loss_before": 2.0}, ""),
        ({"exact_match": 0.1, "exact_match_before": 0.0, "loss": 2.0, "loss_before": 2.0}, "the loss on the held-out"),
        ({"loss": None, "loss_before": 2.0}, ""),
    ],
)
def test_a_result_that_says_the_model_learnt_nothing_is_doubted(
    metrics: dict[str, float | None], expected: str
) -> None:
    assert expected in doubt(metrics)
    assert bool(doubt(metrics)) is bool(expected)


def test_money_and_metrics_read_well() -> None:
    assert [usd(v) for v in (None, 0.0, 0.0123, 1.5, 12.345)] == ["unknown", "$0.00", "$0.0123", "$1.50", "$12.35"]
    assert [usd(v) for v in (0.00001, 0.00005, 0.9999, 0.99999)] == ["< $0.0001", "$0.0001", "$0.9999", "$1.00"]
    assert [usd(v) for v in (-0.0, -0.5, -1.5)] == ["$0.00", "-$0.5000", "-$1.50"]
    assert [number(v) for v in (None, 0.0, 0.95674, 3.0, 12345.6)] == ["-", "0", "0.9567", "3", "12,346"]
