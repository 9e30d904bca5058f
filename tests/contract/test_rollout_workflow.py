"""workflows/rollout.workflows.yaml and the function that it calls agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dropforge.platforms import servers
from dropforge.stages.rollout.answers import ROLLOUT_ANSWERS
from workflows_engine import Limits, ScriptedMocks, Simulation, compile_source, simulate

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "workflows" / "rollout.workflows.yaml").read_text()
RUN_SOURCE = (ROOT / "workflows" / "run.workflows.yaml").read_text()


@pytest.mark.parametrize("source", [SOURCE, RUN_SOURCE], ids=["rollout", "run"])
def test_it_compiles_without_a_warning(source: str) -> None:
    _, warnings = compile_source(source, Limits())
    assert warnings == []


def test_it_goes_round_on_the_one_answer_that_says_when_to_call_again() -> None:
    waiting = {answer.status for answer in ROLLOUT_ANSWERS if "wait_seconds" in answer.model_fields}
    assert set(re.findall(r'result\.status != "(\w+)"', SOURCE)) == waiting == {"PENDING"}


def test_its_header_names_every_end() -> None:
    ends = {answer.status for answer in ROLLOUT_ANSWERS} - {"PENDING"}
    described = re.search(r'output: \{"endpoint", "rollout", "status": ([A-Z_ |]+)\}', SOURCE)
    assert described is not None
    assert set(described[1].split(" | ")) == ends


def test_both_workflows_call_functions_in_the_same_way() -> None:
    """A retry that one of them has learnt, the other has too."""
    for name in ("call_function", "may_pass"):
        found = [re.search(rf"^{name}:\n(?:    .*\n|\n)*", f"{text}\n", re.M) for text in (SOURCE, RUN_SOURCE)]
        assert all(found)
        assert len({each[0].strip() for each in found if each}) == 1, name


def test_a_platform_takes_names_exactly_if_it_has_an_adapter_for_them() -> None:
    for kind, serving in servers().items():
        assert serving.spec.takes_names == bool(serving.named), kind
    assert any(serving.named for serving in servers().values())


def execution_with(*answers: dict[str, Any]) -> tuple[Simulation, int]:
    """An execution whose function gives these answers, the last of them for ever, and its number of calls."""
    responses = [*answers[:-1], {**answers[-1], "times": "always"}]
    mocks = ScriptedMocks([{"call": "http.post", "responses": responses}])
    arguments = {"endpoint": "sql", "rollout": "r-1"}
    env = {"FUNCTIONS_URL": "https://functions.example/dropforge-"}
    execution = simulate(SOURCE, arguments, mocks=mocks, env=env)
    return execution, len([call for call in mocks.calls if call.call == "http.post"])


def test_it_calls_again_after_a_function_that_keeps_failing() -> None:
    """The ninth failure in a row ends the tries of one call, and not the rollout."""
    promoted = {"body": {"status": "PROMOTED"}}
    execution, calls = execution_with(*[{"code": 503}] * 9, promoted)
    assert (execution.result["status"], calls) == ("PROMOTED", 10)


@pytest.mark.parametrize("code", [400, 404])
def test_it_ends_after_a_refusal(code: int) -> None:
    """Nothing can make the function take the request later: the endpoint has no record, for example."""
    execution, calls = execution_with({"code": code}, {"body": {"status": "PROMOTED"}})
    assert (execution.record.state, calls) == ("FAILED", 1)
