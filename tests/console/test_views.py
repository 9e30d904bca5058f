"""The pages show true numbers, also of a run that was stopped or resumed, or whose container is hostile."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.events import Started
from dropforge.run.index import about
from dropforge.run.record import Attempt, Queued, Record, RunError, RunState, Transition
from dropforge.run.series import Progress
from dropforge.run.summary import Summary
from dropforge.spec import parse_spec
from dropforge_console import views
from dropforge_console.charts import UNITS

EXAMPLES = Path(__file__).parents[2] / "examples"
BEGAN = datetime(2026, 11, 24, 9, 0, tzinfo=UTC)
NOW = BEGAN + timedelta(minutes=30)
SPEC = parse_spec(
    b"""{"api_version": "dropforge/v1", "name": "text-to-sql", "model": {"source": "google/gemma-2b"},
    "dataset": {"source": "owner/data"}, "labels": {"team": "search"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]}, "serve": null}"""
)


def at(minutes: float) -> datetime:
    return BEGAN + timedelta(minutes=minutes)


def record(*states: tuple[RunState, float], **fields: object) -> Record:
    """A record that entered each state at a minute."""
    history = [Transition(state=state, time=at(minutes), attempt=1) for state, minutes in states]
    return Record.model_validate(
        {
            "run": "text-to-sql-0123456789ab",
            "name": "text-to-sql",
            "source": "gs://specs/specs/a.json#1",
            "state": states[-1][0],
            "created": BEGAN,
            "history": history,
            **fields,
        }
    )


def attempt(number: int = 1, **fields: object) -> Attempt:
    return Attempt.model_validate(
        {"number": number, "placement": 0, "region": "us-central1", "started": at(1), "deadline": at(90), **fields}
    )


def progress(step: int, loss: float | None, number: int = 1, minutes: float | None = None) -> Progress:
    when = at(step if minutes is None else minutes)
    return Progress(
        attempt=number, time=when, step=step,
        total_steps=100, loss=loss,
    )  # fmt: skip


def test_the_timeline_fills_its_line_and_says_what_was_waited_for() -> None:
    run = record(
        (RunState.ACCEPTED, 0), (RunState.PROVISIONING, 1), (RunState.TRAINING, 16), (RunState.DEPLOYING, 26),
        attempts=[attempt(running=at(11))],
    )  # fmt: skip
    stages = views.timeline(run, NOW)
    assert sum(stage.width for stage in stages) == pytest.approx(UNITS, abs=1)
    assert [(stage.tone, stage.title) for stage in stages] == [
        ("off", "accepted 60.0 s"),
        ("hatch", "waiting 10 min"),
        ("off", "starting 5 min"),
        ("run", "training 10 min"),
        ("old", "deploying 4 min"),
    ]


def test_a_run_that_has_just_begun_has_a_timeline() -> None:
    assert views.timeline(record((RunState.ACCEPTED, 0)), BEGAN) == []


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (record((RunState.PROVISIONING, 1), attempts=[attempt()]), "Starting"),
        (record((RunState.PROVISIONING, 1), attempts=[attempt(wait_reason="no capacity")]), "Waiting"),
        (record((RunState.ACCEPTED, 0), queued=Queued(rule="max_runs", place=3, since=BEGAN)), "Waiting, place 3"),
        (record((RunState.FAILED, 5), attempts=[attempt(ended=at(5), wait_reason="no capacity")]), "Failed"),
    ],
)
def test_a_run_that_waits_says_so(run: Record, word: str) -> None:
    assert views.status(Summary.of(run)).word == word


def test_the_page_of_a_run_has_the_reason_of_its_wait() -> None:
    waiting = record((RunState.PROVISIONING, 1), attempts=[attempt(wait_reason="no capacity for nvidia-l4")])
    assert views.wait_text(waiting) == "no capacity for nvidia-l4"
    queued = record((RunState.ACCEPTED, 0), queued=Queued(rule="max_runs", place=3, since=BEGAN))
    assert views.wait_text(queued) == "Waits for a place by max_runs: number 3 in the queue."
    assert views.wait_text(record((RunState.TRAINING, 1))) == ""


def test_every_state_has_a_shape_of_its_own() -> None:
    shown = [views.status(Summary.of(record((state, 0)))) for state in RunState]
    assert len({(status.word, status.icon) for status in shown}) == len(RunState)


def test_steps_that_a_later_attempt_repeats_are_left_out_of_the_curve() -> None:
    lost = [progress(step, 1.0) for step in (10, 20, 30)]
    resumed = [progress(step, 0.5, 2, 50 + step) for step in (20, 30)]
    starts = [
        Started(run="text-to-sql-0123456789ab", attempt=2, sequence=1, time=at(60), resumed_step=10)
    ]  # fmt: skip
    loss = views.curves([*lost, *resumed], starts, [], "step", False).loss
    assert loss is not None
    assert loss.summary == "Training loss by step: from 1 to 0.5"
    assert [mark.text for mark in loss.marks] == ["attempt 2 resumes, step 10"]
    assert loss.marks[0].x == pytest.approx(100)


@pytest.mark.parametrize("by", list(views.AXES))
@pytest.mark.parametrize("log", [False, True])
def test_a_training_without_a_loss_yet_has_no_curve(by: str, log: bool) -> None:
    assert views.curves([progress(1, None)], [], [], by, log).loss is None
    assert views.curves([], [], [], by, log).loss is None


def test_an_unknown_price_is_unknown_and_not_zero() -> None:
    run = record((RunState.TRAINING, 2), attempts=[attempt(running=at(1))])
    assert views.row(Summary.of(run.model_copy(update={"about": about(SPEC, None)})), NOW).cost == "unknown"
    assert views.row(Summary.of(run), NOW).target == views.UNKNOWN


def test_a_failed_attempt_says_why() -> None:
    error = RunError(error_class=ErrorClass.OUT_OF_MEMORY, message="CUDA out of memory")
    run = record((RunState.FAILED, 9), attempts=[attempt(ended=at(9), error=error)])
    shown = views.attempts(run, NOW)[0]
    assert (shown.status.word, shown.why, shown.lasted) == ("out of memory", "CUDA out of memory", "8 min")


@pytest.mark.parametrize(
    ("wanted", "is_shown"),
    [
        (views.Wanted("gemma search"), True),
        (views.Wanted("TEAM=search"), True),
        (views.Wanted("ann@EXAMPLE"), True),
        (views.Wanted("llama"), False),
        (views.Wanted(state="TRAINING"), True),
        (views.Wanted(state="FAILED"), False),
        (views.Wanted(target="gke"), False),
    ],
)
def test_a_search_looks_at_name_model_and_labels(wanted: views.Wanted, is_shown: bool) -> None:
    run = record((RunState.TRAINING, 1), submitter="ann@example.com")
    assert (
        bool(views.selected([Summary.of(run.model_copy(update={"about": about(SPEC, None)}))], wanted, NOW)) == is_shown
    )


@pytest.mark.parametrize(
    "row", [{}, {"prompt": 3}, {"prompt": []}, {"prompt": ["x"]}, {"after": {"a": 1}}, {"expected": ""}]
)
def test_samples_that_a_hostile_container_wrote_are_shown_as_text(row: dict[str, object]) -> None:
    shown = views.samples([row])[0]
    assert all(isinstance(text, str) for text in shown[:4])
    assert not shown.is_right


def test_the_difference_of_two_specs_is_what_their_user_changed() -> None:
    other = parse_spec(views.spec_text(SPEC).replace("gemma-2b", "gemma-7b").encode())
    changed = [(line.kind, line.text.strip()) for line in views.spec_diff(SPEC, other) if line.kind != "ctx"]
    assert changed == [("del", '-    "source": "google/gemma-7b"'), ("add", '+    "source": "google/gemma-2b"')]


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.json")), ids=lambda path: path.name)
def test_the_spec_of_a_run_can_be_dropped_again(path: Path) -> None:
    """The stored spec has every field; the text for a user has only what is no default, and means the same."""
    document = json.loads(path.read_text())
    if (document.get("serve") or {}).get("type") == "cloud_run":
        document["serve"] |= {"endpoint": "text-to-sql", "canary": {"for": "20m"}}
    stored = parse_spec(parse_spec(json.dumps(document).encode()).model_dump_json(by_alias=True).encode())
    text = views.spec_text(stored)
    assert parse_spec(text.encode()) == stored
    assert len(json.loads(text)["training"]) <= len(document["training"])


def test_what_the_training_counted_in_its_data_is_told() -> None:
    counts = {"rows_train": 1900, "rows_eval": 100, "rows_dropped": 3, "rows_truncated": 0, "loss": 0.5}
    found = record((RunState.SUCCEEDED, 1), metrics={**counts, "answers_given": 5700, "answers_learnt": 5690})
    assert views.counted(found) == [
        ("Rows trained on", "1,900"), ("Rows held out", "100"), ("Rows left out", "3"), ("Sequences cut", "0"),
        ("Answers learnt", "5,690 of 5,700"),
    ]  # fmt: skip
    assert views.counted(record((RunState.TRAINING, 1), metrics={})) == []


def test_a_list_is_of_the_wanted_days_and_models_and_the_best_results_come_first() -> None:
    def run(day: int, metrics: dict[str, float | None], model: str = "google/gemma-2b") -> Summary:
        found = record((RunState.SUCCEEDED, 1), run=f"r-{day:012x}", metrics=metrics)
        known = about(SPEC, None).model_copy(update={"model": model})
        return Summary.of(found.model_copy(update={"about": known})).model_copy(
            update={"created": BEGAN + timedelta(days=day)}
        )

    runs = [
        run(4, {"loss": 0.9}),
        run(3, {"exact_match": 0.2}, "other"),
        run(2, {}),
        run(1, {"loss": 0.1, "exact_match": None}),
        run(0, {"exact_match": 0.8, "loss": 9.0}),
    ]

    def days(wanted: views.Wanted) -> list[int]:
        return [(found.created - BEGAN).days for found in views.selected(runs, wanted, NOW)]

    assert days(views.Wanted(sort="metric")) == [0, 3, 1, 4, 2]
    assert days(views.Wanted(sort="oldest")) == [0, 1, 2, 3, 4]
    assert days(views.Wanted(since="2026-11-25", until="2026-11-27")) == [3, 2, 1]
    assert days(views.Wanted(model="other")) == [3]


def test_the_title_says_how_far_a_training_is() -> None:
    training, ended = record((RunState.TRAINING, 1)), record((RunState.FAILED, 1))
    assert [views.percent(each, progress(28, 1.0)) for each in (training, ended)] == [28, None]
    assert views.percent(training, None) is None
