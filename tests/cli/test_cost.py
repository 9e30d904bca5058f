"""`dropforge cost`: sums by group, in which an unknown amount is never 0."""

from __future__ import annotations

import csv
import io
import json
from datetime import date, timedelta
from pathlib import Path

import pytest

from dropforge.base.clock import Clock
from dropforge.endpoints.record import EndpointRecord, Revision
from dropforge.endpoints.shared import Adapter
from dropforge.endpoints.store import EndpointStore
from dropforge.money.bill import Sum
from dropforge.money.limits import most_usd
from dropforge.money.plan import make_plan
from dropforge.run.record import RunState
from dropforge.spec import parse_spec
from dropforge_cli.deployment import placeholders

from .conftest import CREATED, ROOT, Deployed, attempt, served

SPECS = sorted([*(ROOT / "examples").glob("*.json"), *(ROOT / "schemas" / "examples" / "valid").glob("*.json")])


@pytest.fixture
def spent(deployed: Deployed) -> Deployed:
    """Two runs of a team in November, one of another in December at an unknown price, and a rejected run."""
    deployed.record("a-0123456789ab", RunState.SUCCEEDED, **served())
    deployed.spec("a-0123456789ab", labels={"team": "search"})
    deployed.record("b-0123456789ab", RunState.FAILED, attempts=[attempt()])
    deployed.spec("b-0123456789ab", labels={"team": "search"})
    december = CREATED + timedelta(days=20)
    deployed.record("c-0123456789ab", RunState.FAILED, created=december, attempts=[attempt(usd_per_hour=None)])
    deployed.spec("c-0123456789ab", labels={"team": "ads"})
    deployed.record("d-0123456789ab", RunState.REJECTED)
    return deployed


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_maximum_is_that_of_the_plan(path: Path) -> None:
    spec = parse_spec(path.read_bytes())
    planned = make_plan(spec, placeholders(), path.name).worst_case_usd
    assert most_usd(spec) == (None if planned is None else pytest.approx(planned, abs=1e-3))


def test_costs_of_months_are_added_up(spent: Deployed) -> None:
    lines = spent.run("cost").stdout.splitlines()
    assert lines[0].split() == ["month", "runs", "training", "endpoints", "total", "maximum", "share"]
    assert lines[1].split()[:5] == ["2026-11", "2", "$2.00", "$2.00", "$4.00"]
    assert lines[2].split()[:5] == ["2026-12", "1", "unknown", "$0.00", "unknown"]
    assert "in all" in lines[3]
    assert "$4.00 + 1 unknown" in lines[3]
    assert lines[3].rstrip().endswith("-"), "a share of an unknown total is unknown"
    assert max(map(len, lines)) <= 80


def test_a_named_endpoint_counts_for_the_runs_whose_models_it_serves(spent: Deployed) -> None:
    began = CREATED + timedelta(hours=1)
    revision = Revision(
        number=1, run="b-0123456789ab", digest="0", who="", requested=began, usd_per_hour=2.0, spent_usd=6.0
    )
    members = (("x", "a-0123456789ab"), ("y", "b-0123456789ab"))
    adapters = [Adapter(name=name, run=run, digest="0", source="") for name, run in members]
    shared = revision.model_copy(update={"number": 2, "adapters": adapters})
    unpriced = revision.model_copy(update={"number": 3, "run": "a-0123456789ab", "usd_per_hour": None})
    record = EndpointRecord(
        name="e", source="", type="cloud_run", region="us-central1", service="s", created=began,
        revisions=[revision, shared],
    )  # fmt: skip
    store = EndpointStore(spent.store, Clock())
    store.create(record)
    month = json.loads(spent.run("cost", "--json").stdout)["groups"][0]
    assert (month["training_usd"], month["endpoints_usd"], month["total_usd"]) == (2.0, 14.0, 16.0)
    store.update("e", lambda latest: latest.model_copy(update={"revisions": [revision, shared, unpriced]}))
    month = json.loads(spent.run("cost", "--json").stdout)["groups"][0]
    assert (month["endpoints_usd"], month["endpoints_unknown_runs"], month["total_unknown_runs"]) == (9.0, 1, 1)


def test_costs_by_label_are_json_for_programs(spent: Deployed) -> None:
    told = json.loads(spent.run("cost", "--by", "label:team", "--json").stdout)
    search, ads = told["groups"]
    assert (search["group"], search["total_usd"], search["total_unknown_runs"]) == ("search", 4.0, 0)
    assert search["share_of_maximum"] == pytest.approx(4.0 / search["maximum_usd"], abs=1e-4)
    assert (ads["group"], ads["total_usd"], ads["total_unknown_runs"]) == ("ads", None, 1)
    assert (told["total"]["runs"], told["total"]["total_usd"], told["total"]["total_unknown_runs"]) == (3, 4.0, 1)


def test_costs_are_comma_separated_values(spent: Deployed) -> None:
    rows = list(csv.DictReader(io.StringIO(spent.run("cost", "--by", "target", "--csv").stdout)))
    assert [(row["group"], row["total_usd"], row["total_unknown_runs"]) for row in rows] == [("cloud_run", "4.0", "1")]


def test_costs_by_model_and_since(spent: Deployed) -> None:
    output = spent.run("cost", "--by", "model", "--since", date(2026, 12, 1).isoformat()).stdout
    assert output.splitlines()[1].split()[:2] == ["google/gemma-2b", "1"]


def test_a_run_that_has_not_ended_is_noted(deployed: Deployed) -> None:
    assert deployed.run("cost").stdout == "no runs, so no cost\n"
    deployed.record("a-0123456789ab", RunState.TRAINING, attempts=[attempt(ended=None)])
    result = deployed.run("cost", "--by", "label:team")
    assert "have not ended, or still serve: 1" in result.stderr
    assert result.stdout.splitlines()[1].split()[:2] == ["-", "1"]


@pytest.mark.parametrize("arguments", [["--by", "colour"], ["--by", "label:"], ["--json", "--csv"]])
def test_wrong_usage_is_refused(deployed: Deployed, arguments: list[str]) -> None:
    assert deployed.run("cost", *arguments).exit_code == 2


def test_an_unknown_amount_is_never_0() -> None:
    assert [str(Sum.of(amounts)) for amounts in ([], [0.0], [None], [1.0, None], [0.0, None])] == [
        "$0.00", "$0.00", "unknown", "$1.00 + 1 unknown", "unknown",
    ]  # fmt: skip
