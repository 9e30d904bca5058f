"""Clients that send a spec again: the same wish has one run, and the rules notice a control plane that makes two."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dropforge.run import intents
from dropforge_cli.main import cli
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.simulation import run, run_repeated


@pytest.mark.parametrize("first", range(0, 48, 8))
def test_repeated_requests_keep_every_promise(first: int) -> None:
    problems = [f"seed {seed}: {problem}" for seed in range(first, first + 8) for problem in check(run_repeated(seed))]
    assert problems == []


def test_repeats_join_runs_and_some_requests_are_runs_of_their_own() -> None:
    joined = made = 0
    for seed in range(8):
        history = run_repeated(seed)
        records = {f.data["name"].split("/")[1] for f in history.of("write") if f.data["name"].endswith("/record.json")}
        wishes = {fact.data["run"]: fact.data["wanted"] for fact in history.of("intent")}
        joined += len(wishes.keys() - records)
        made += len({wishes[run] for run in wishes.keys() & records})
    assert joined > 10
    assert made > 10


@pytest.mark.parametrize("broken", ["_is_joined", "claim"])
def test_the_rule_notices_a_control_plane_that_makes_two_runs(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "claim":
        monkeypatch.setattr("dropforge.stages.submit.claim", lambda store, digest, mine, now: mine)
    else:
        monkeypatch.setattr(intents, "_is_joined", lambda *_: False)
    assert "one_intent" in {problem.rule for seed in range(8) for problem in check(run_repeated(seed))}


def test_repeats_shift_no_other_seed() -> None:
    """The first users of a seed want the same with and without repeats."""
    first = [next(run_(3).of("dropped")).data["spec"] for run_ in (run, run_repeated)]
    assert first[0] == first[1]


def test_the_command_replays_a_life_with_repeats() -> None:
    replayed = CliRunner().invoke(cli, ["chaos", "--seed", "1", "--repeated", "--verbose"])
    assert "--seed 1 --repeated: " in replayed.output
    assert f"digest {run_repeated(1).digest}" in replayed.output
    assert "intent" in replayed.output
