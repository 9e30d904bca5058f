"""The page of a run and the comparison of runs, from the objects that the control plane and the containers leave."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.run.record import Attempt, LedgerEntry, ResourceState, RunError, RunState
from dropforge.run.series import Series, write_series
from dropforge.run.spans import in_order, read_steps, spans_of
from dropforge.run.store import RunStore
from dropforge_console import views

from .deployed import Deployed, points
from .test_views import NOW, at, attempt, record

RUN, OTHER = "text-to-sql-0123456789ab", "text-to-sql-ba9876543210"
HOSTILE = '<img src=x onerror="document.title=1">'
SPEC: dict[str, Any] = {
    "api_version": "dropforge/v1",
    "name": "text-to-sql",
    "model": {"source": "google/gemma-2b"},
    "dataset": {"source": "owner/data"},
    "target": {
        "type": "cloud_run",
        "placements": [{"region": "us-central1"}, {"region": "europe-west4"}, {"region": "asia-southeast1"}],
    },
    "evaluation": {"holdout_fraction": 0.1},
    "serve": None,
}
JOB = "projects/p1/locations/europe-west4/jobs/df-text-to-sql-0123456789ab-a2"


def sample(question: str, after: str, expected: str = "right") -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "expected": expected,
        "before": "wrong",
        "after": after,
    }


def tried() -> list[Attempt]:
    """An attempt without capacity, and one in the next place."""
    stockout = RunError(error_class=ErrorClass.STOCKOUT, message="no nvidia-l4 in us-central1")
    return [
        attempt(1, ended=at(5), error=stockout, usd_per_hour=1.0, wait_reason=HOSTILE),
        attempt(2, placement=1, region="europe-west4", started=at(5), running=at(9), usd_per_hour=1.2),
    ]


@pytest.fixture
def deployed() -> Deployed:
    """A run that trains in its second place, and an older run that has succeeded."""
    deployed = Deployed(NOW)
    job = LedgerEntry(
        kind="run.googleapis.com/Job", name=JOB, attempt=2, state=ResourceState.CREATED, intended=at(5), created=at(6)
    )
    now = record((RunState.ACCEPTED, 0), (RunState.PROVISIONING, 1), (RunState.TRAINING, 9), attempts=tried(), run=RUN,
                 resources=[job])  # fmt: skip
    deployed.add(now, SPEC)
    deployed.report(RUN, 2, points(at(10), 20, attempt=2))
    earlier = {"created": at(-100), "attempts": [attempt(1, ended=at(-10), running=at(-50))]}
    deployed.add(record((RunState.TRAINING, -60), (RunState.SUCCEEDED, -10), run=OTHER, **earlier), SPEC)
    deployed.report(OTHER, 1, points(at(-40), 20, loss=3.0))
    return deployed


@pytest.mark.parametrize(("minutes", "text"), [(0.5, ""), (4, "no progress for 4 min"), (12, "stuck: no progress for")])
def test_the_page_of_a_training_without_progress_says_so(tmp_path: Path, minutes: float, text: str) -> None:
    """Instead of the time that was left when the training last told it."""
    deployed = Deployed()  # the present time: the bucket notes when it receives the series
    now = record((RunState.ACCEPTED, 0), (RunState.TRAINING, 9), run=RUN, attempts=[attempt(1, running=at(9))])
    deployed.add(now, SPEC)
    series = Series(run=RUN, attempt=1, began=at(9), written=at(9))
    for point in points(at(10), 20):
        fast = {"time": at(10 + point.step / 60), "total_steps": 30, "eta_seconds": 10.0}
        series.add(point.model_copy(update=fast))
    series.written += timedelta(minutes=minutes)
    write_series(deployed.storage, "runs", series, "", 0)
    with deployed.opened(tmp_path) as client:
        page = client.get(f"/runs/{RUN}").text
    assert ("No progress</h2>" in page) is bool(text)
    assert ("10.0 s left" in page) is not bool(text)
    assert text in page
    assert f"dropforge logs {RUN}" in page


def test_the_page_has_every_span_of_the_trace_that_is_sent(deployed: Deployed, tmp_path: Path) -> None:
    store = RunStore(deployed.storage, "runs")
    sent = spans_of(store.record(RUN), read_steps(store, store.record(RUN)))
    with deployed.opened(tmp_path) as client:
        page = client.get(f"/runs/{RUN}").text
    shown = re.findall(r'<th scope="row" class="d(\d)">([^<]*)', page)
    assert shown == [(str(span.depth), span.label) for span in in_order(sent)]
    assert {"attempt 1", "attempt 2", "train", "launch", "resource Job"} <= {label for _, label in shown}
    assert names.trace_id(RUN) in page
    assert "stockout: no nvidia-l4 in us-central1" in page
    assert HOSTILE not in page


def test_the_page_says_why_the_run_is_where_it_is(deployed: Deployed, tmp_path: Path) -> None:
    with deployed.opened(tmp_path) as client:
        page = client.get(f"/runs/{RUN}").text
    why = page[page.index('id="placed"') : page.index('id="attempts"')]
    assert "The place before had no capacity (us-central1): place 2 of 3." in why
    assert "nvidia-l4, 24 GiB" in why
    rows = [re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", row)).strip() for row in re.findall(r"<tr>.*?</tr>", why)]
    assert rows[1:] == [
        "us-central1 $1.00 1 stockout",
        "europe-west4 $1.20 1 here",
        f"asia-southeast1 {views.UNKNOWN} 0 not tried",
    ]


@pytest.mark.parametrize("by", ["step", "epoch", "tokens", "time"])
def test_the_held_out_loss_is_drawn_on_every_axis(deployed: Deployed, tmp_path: Path, by: str) -> None:
    with deployed.opened(tmp_path) as client:
        page = client.get(f"/runs/{RUN}?x={by}").text
        compared = client.get("/compare", params={"run": [RUN, OTHER], "x": by}).text
    dots = re.search(r'class="line held dots" d="([^"]*)"', page)
    assert dots is not None
    assert dots[1].count("h0") == 4
    assert "on held-out rows from 1.467 to 0.7333" in page
    assert f"Held-out loss of 2 runs by {by}" in compared


def test_the_page_draws_what_the_training_uses_of_its_machine(deployed: Deployed, tmp_path: Path) -> None:
    with deployed.opened(tmp_path) as client:
        page = client.get(f"/runs/{RUN}").text
    for title, value in (("Accelerator memory in GiB", "17.58"), ("Host memory in GiB", "3.906")):
        assert re.search(rf"{title}[^<]*\b{value}\b", page), title
    assert re.search(r"Accelerator busy in %[^<]*\b93\b", page)


def test_a_training_without_tokens_says_what_the_axis_lacks(deployed: Deployed, tmp_path: Path) -> None:
    old = [point.model_copy(update={"tokens": None}) for point in points(at(10), 3, attempt=1)]
    deployed.report(RUN, 1, old)
    del deployed.storage.objects[f"models/{RUN}/series/attempt-2.json.gz"]
    with deployed.opened(tmp_path) as client:
        assert "No report of this training has both a loss and tokens" in client.get(f"/runs/{RUN}?x=tokens").text
        assert "Training loss by step" in client.get(f"/runs/{RUN}?x=step").text


def test_the_answers_of_runs_to_the_same_questions_are_beside_each_other(deployed: Deployed, tmp_path: Path) -> None:
    deployed.commit(RUN, [sample("only here", "a"), sample("how many?", "right")])
    deployed.commit(OTHER, [sample("how many?", HOSTILE)])
    with deployed.opened(tmp_path) as client:
        page = client.get("/compare", params={"run": [RUN, OTHER]}).text
    table = page[page.index('id="questions"') :]
    first, second = re.findall(r'<tr><th scope="row">.*?</tr>', table, re.S)
    assert "how many?" in first
    assert first.count("as expected") == 1
    assert "&lt;img" in first
    assert HOSTILE not in page
    assert "only here" in second
    assert "not asked" in second


@pytest.mark.parametrize("content", [{"a": 1}, ["x", 3, None], [{"prompt": [3]}], "text", [[]], 3])
def test_samples_of_any_form_break_no_comparison(deployed: Deployed, tmp_path: Path, content: Any) -> None:
    deployed.commit(OTHER, content)
    with deployed.opened(tmp_path) as client:
        assert client.get("/compare", params={"run": [RUN, OTHER]}).status_code == 200
        assert client.get(f"/runs/{OTHER}").status_code == 200


def test_the_log_of_a_project_is_found_after_its_containers_are_gone(deployed: Deployed, tmp_path: Path) -> None:
    with deployed.opened(tmp_path) as client:
        page = client.get(f"/runs/{RUN}").text
    found = re.search(r'href="(https://console.cloud.google.com/logs/query;query=[^"]*)"', page)
    assert found is not None
    address = unquote(found[1])
    assert 'resource.type="cloud_run_job" AND resource.labels.job_name="df-text-to-sql-0123456789ab-a2"' in address
    assert f'timestamp>="{(at(0)).isoformat(timespec="seconds")}"' in address
    with deployed.opened(tmp_path, lambda resource: ["a line"]) as client:
        page = client.get(f"/runs/{RUN}").text
    assert "console.cloud.google.com" not in page
    assert "a line" in page
