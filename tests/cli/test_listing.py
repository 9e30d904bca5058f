"""`dropforge runs`: its columns in terminals of any width, its filters, its order, and its JSON."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import Result
from rich.console import Console

from dropforge.run.record import RunState
from dropforge.run.summary import Summary
from dropforge_cli.display import fitting
from dropforge_cli.listing import columns, in_order
from dropforge_cli.problems import CliError
from dropforge_cli.runs import all_runs

from .conftest import CREATED, ROOT, Deployed, attempt, served

LONG = "a-job-of-many-letter-0123456789ab"  # as long as an id can be
GOOD, BAD, OPEN = "good-0123456789ab", "bad-0123456789ab", "open-0123456789ab"
NOW = CREATED + timedelta(days=1)


@pytest.fixture
def listed(deployed: Deployed) -> Deployed:
    """Four runs: served, failed at an unknown price, training without a price so far, and rejected."""
    deployed.record(GOOD, RunState.SUCCEEDED, name="good", metrics={"exact_match": 0.9567, "loss": 0.5}, **served())
    deployed.spec(GOOD, labels={"team": "search", "tier": "a"})
    hours = {"created": CREATED + timedelta(hours=1)}
    unpriced = [attempt(usd_per_hour=None)]
    deployed.record(BAD, RunState.FAILED, name="bad", metrics={"loss": 1.5}, attempts=unpriced, **hours)
    deployed.spec(BAD, labels={"team": "ads"})
    deployed.record(OPEN, RunState.TRAINING, name="good text to sql of a team", created=CREATED + timedelta(hours=2))
    deployed.spec(
        OPEN,
        labels={"team": "search"},
        target=GKE,
        model={"source": "google/gemma-3-12b-it"},
        training={"adapter": {"type": "lora"}},
    )
    deployed.record(LONG, RunState.REJECTED, created=CREATED + timedelta(hours=3))
    return deployed


GKE = json.loads((ROOT / "examples" / "gke-gemma-3-12b-fsdp.json").read_text())["target"]


def ids(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [line.split()[0] for line in result.stdout.splitlines()[1:]]


def table(deployed: Deployed, width: int) -> list[str]:
    records = all_runs(deployed.store)
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(fitting(records, columns(records, None, NOW), console.width)[0])
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [33, 40, 60, 80, 100, 120, 240])
def test_each_run_is_one_line_with_its_whole_id(listed: Deployed, width: int) -> None:
    lines = table(listed, width)
    assert [line.split()[0] for line in lines] == ["run", LONG, OPEN, BAD, GOOD]
    assert max(map(len, lines)) <= width


def test_80_columns_have_state_endpoint_cost_and_age(listed: Deployed) -> None:
    lines = table(listed, 80)
    assert lines[0].split() == ["run", "state", "target", "endpoint", "cost", "age"]
    assert lines[3].split() == [BAD, "FAILED", "cloud_run", "-", "unknown", "23", "h"]
    assert lines[4].split() == [GOOD, "SUCCEEDED", "cloud_run", "ended", "$3.00", "24", "h"]


def test_a_wide_terminal_has_every_column(listed: Deployed) -> None:
    lines = table(listed, 160)
    titles = ["run", "name", "state", "target", "labels", "attempts", "metric", "endpoint", "cost", "age"]
    assert lines[0].split() == titles
    assert "exact_match 0.9567  ended" in lines[4]
    assert " team=search tier=a " in lines[4]
    assert "loss 1.5" in lines[3]
    assert lines[1].split()[4:6] == ["-", "-"]  # a rejected run has no labels


def test_docs_name_the_columns_by_their_importance(listed: Deployed) -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "cli.md").read_text())
    shown = re.search(r"in this order of importance: ([^.]*)\.", page)
    assert shown is not None
    records = all_runs(listed.store)
    assert shown[1].split(", ") == [column.title for column in sorted(columns(records, None, NOW))]


def test_the_cost_has_the_endpoint_until_now_or_until_its_end(deployed: Deployed) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=1)
    record = deployed.record(GOOD, RunState.SUCCEEDED, **served(ended=None, expires=ahead))
    cost = record.cost(CREATED + timedelta(minutes=90))
    assert cost == 2.0
    assert "60 min left" in deployed.run("runs").output or "59 min left" in deployed.run("runs").output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [LONG, OPEN, BAD, GOOD]),
        (["--in", "failed", "--in", "SUCCEEDED"], [BAD, GOOD]),
        (["--name", "good*"], [OPEN, GOOD]),
        (["--name", "good"], [GOOD]),
        (["--target", "gke"], [OPEN]),
        (["--model", "google/gemma-3*"], [OPEN]),
        (["--model", "google/gemma-2b", "--in", "failed"], [BAD]),
        (["--label", "team=search"], [OPEN, GOOD]),
        (["--label", "team=search", "--label", "tier=a"], [GOOD]),
        (["--since", "2026-11-20T13:30"], [LONG, OPEN]),
        (["--reverse"], [GOOD, BAD, OPEN, LONG]),
        (["--sort", "name"], [BAD, GOOD, OPEN, LONG]),
        (["--sort", "loss"], [BAD, GOOD, LONG, OPEN]),
        (["--sort", "loss", "--reverse"], [GOOD, BAD, LONG, OPEN]),
        (["--sort", "cost"], [GOOD, LONG, OPEN, BAD]),
        (["--limit", "2"], [LONG, OPEN]),
    ],
)
def test_runs_are_filtered_sorted_and_limited(listed: Deployed, options: list[str], expected: list[str]) -> None:
    assert ids(listed.run("runs", *options)) == expected
    assert [run["run"] for run in json.loads(listed.run("runs", "--json", *options).stdout)] == expected


def test_the_rest_is_counted(listed: Deployed) -> None:
    assert listed.run("runs", "--limit", 1).stderr == "3 more: `--limit 4` lists them all\n"
    assert listed.run("runs").stderr == ""


def test_sorting_by_an_unknown_metric_lists_the_metrics(listed: Deployed) -> None:
    result = listed.run("runs", "--sort", "blue")
    assert result.exit_code == 1
    assert "none of the 4 runs has the metric 'blue'" in result.stderr
    assert "or by a metric: exact_match, loss" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("--since", "soon", "expected a length of time such as 36h"), ("--label", "team", "expected KEY=VALUE")],
)
def test_a_wrong_value_is_wrong_usage(deployed: Deployed, option: str, value: str, expected: str) -> None:
    result = deployed.run("runs", option, value)
    assert result.exit_code == 2
    assert expected in result.output


def test_a_filter_that_takes_no_run_says_so(listed: Deployed) -> None:
    assert listed.run("runs", "--target", "ray").stdout.startswith("none of the 4 runs matches the options")


def test_json_has_the_spec_the_metrics_the_cost_and_the_endpoint(listed: Deployed) -> None:
    shown = {run["run"]: run for run in json.loads(listed.run("runs", "--json").stdout)}
    good, bad, rejected = shown[GOOD], shown[BAD], shown[LONG]
    assert good["labels"] == {"team": "search", "tier": "a"}
    assert (good["target"], good["model"]) == ("cloud_run", "google/gemma-2b")
    assert (good["training_cost_usd"], good["serving_cost_usd"], good["total_cost_usd"]) == (1.0, 2.0, 3.0)
    assert good["metrics"]["exact_match"] == 0.9567
    assert good["endpoint"]["url"] == "https://e.run.app"
    assert bad["total_cost_usd"] is None
    assert (rejected["labels"], rejected["target"], rejected["model"]) == (None, None, None)


def test_no_run_has_no_order() -> None:
    none: list[Summary] = []
    assert in_order(none, "loss", NOW) == []


def test_a_run_without_the_metric_is_last_in_both_directions(listed: Deployed) -> None:
    records = all_runs(listed.store)
    for backwards in (True, False):
        assert [r.run for r in in_order(records, "exact_match", NOW, backwards=backwards)] == [GOOD, LONG, OPEN, BAD]
    with pytest.raises(CliError):
        in_order(records, "colour", NOW)
