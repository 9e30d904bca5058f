"""The workflow reads only fields, and branches only on statuses, that the stages answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.stages.answers import ANSWERS, Answer

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / "workflows" / "run.workflows.yaml").read_text())
# The variables with an answer in each subworkflow, and the functions that answer it.
VARIABLES: dict[tuple[str, str], tuple[str, ...]] = {
    ("provision", "result"): ("provision",),
    ("await_training", "result"): ("inspect",),
    ("deploy", "result"): ("deploy",),
    ("teardown", "result"): ("teardown",),
    ("run_stages", "result"): ("provision", "inspect"),
    ("main", "ended"): ("teardown",),
}
# A subworkflow that hands on what another one returns, in a map of its own: `outcome` holds one of these.
OUTCOMES = {"SUCCEEDED", "FAILED", "CANCELLED", "SUPERSEDED"}


def texts(node: Any) -> Iterator[str]:
    """Every string of a part of the workflow."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from texts(value)
    elif isinstance(node, list):
        for item in node:
            yield from texts(item)


def answers(functions: tuple[str, ...]) -> list[type[Answer]]:
    return [answer for function in functions for answer in ANSWERS[function]]


def fields_read(subworkflow: str, variable: str) -> set[str]:
    text = "\n".join(texts(WORKFLOW[subworkflow]))
    direct = re.findall(rf"\b{variable}\.(\w+(?:\.\w+)?)", text)
    return {*direct, *re.findall(rf'map\.get\({variable}, "(\w+)"\)', text)}


def has_field(answer: type[Answer], path: str) -> bool:
    if path == "status":
        return True
    name, _, inner = path.partition(".")
    field = answer.model_fields.get(name)
    if field is None or not inner:
        return field is not None
    return inner in getattr(field.annotation, "model_fields", {})


def statuses_compared(subworkflow: str, variable: str) -> set[str]:
    text = "\n".join(texts(WORKFLOW[subworkflow]))
    single = re.findall(rf'\b{variable}\.status [!=]= "(\w+)"', text)
    lists = re.findall(rf"\b{variable}\.status in \[([^\]]*)\]", text)
    return {*single, *re.findall(r'"(\w+)"', " ".join(lists))}


def statuses_made(node: Any) -> set[str]:
    """The statuses that the workflow itself gives a map, literally or in an expression."""
    if isinstance(node, dict):
        own = re.findall(r"[A-Z]{4,}", node["status"]) if isinstance(node.get("status"), str) else []
        return {*own, *(status for value in node.values() for status in statuses_made(value))}
    return {status for item in node for status in statuses_made(item)} if isinstance(node, list) else set()


@pytest.mark.parametrize(("subworkflow", "variable"), VARIABLES, ids="-".join)
def test_every_field_that_the_workflow_reads_is_in_an_answer(subworkflow: str, variable: str) -> None:
    types = answers(VARIABLES[subworkflow, variable])
    read = fields_read(subworkflow, variable)
    assert read, "the table of variables is out of date"
    assert [path for path in read if not any(has_field(answer, path) for answer in types)] == []


@pytest.mark.parametrize(("subworkflow", "variable"), VARIABLES, ids="-".join)
def test_every_status_that_the_workflow_branches_on_is_answered(subworkflow: str, variable: str) -> None:
    answered = {answer.status for answer in answers(VARIABLES[subworkflow, variable])}
    made = statuses_made(WORKFLOW[subworkflow]) | statuses_made(WORKFLOW["call_function"])
    assert statuses_compared(subworkflow, variable) <= answered | made


@pytest.mark.parametrize(
    ("function", "subworkflow"), [("provision", "provision"), ("inspect", "await_training"), ("deploy", "deploy")]
)
def test_a_subworkflow_goes_round_on_statuses_that_say_when_to_call_again(function: str, subworkflow: str) -> None:
    """The subworkflow waits and calls again after each answer with `wait_seconds`, and ends after each other answer.

    RUNNING is an exception: its `wait_seconds` is the time until the first look of `await_training`.
    """
    waits = {answer.status for answer in ANSWERS[function] if "wait_seconds" in answer.model_fields} - {"RUNNING"}
    compared = statuses_compared(subworkflow, "result")
    assert waits <= compared
    others = {answer.status for answer in ANSWERS[function]} - waits
    assert {"SUPERSEDED", "FAILED"} <= others


def test_every_end_of_a_subworkflow_is_an_outcome() -> None:
    """`run_stages` returns the last answer to `main`, which tears the run down and ends it with this status."""
    handed = {"RUNNING", "READY", "WAITING", "PENDING"}
    for function in ("provision", "inspect", "deploy"):
        assert {answer.status for answer in ANSWERS[function]} - handed <= OUTCOMES


def test_every_answer_of_a_function_has_a_status_of_its_own() -> None:
    for function, types in ANSWERS.items():
        statuses = [answer.status for answer in types]
        assert len(statuses) == len(set(statuses)), function


def test_an_answer_says_its_status_and_what_was_set() -> None:
    from dropforge.run.record import RunState
    from dropforge.stages.answers import Pending, Superseded

    assert Pending(wait_seconds=3, remaining=["disk"]).to_json() == {
        "status": "PENDING",
        "wait_seconds": 3.0,
        "remaining": ["disk"],
    }
    superseded = Superseded(execution=None, state=RunState.FAILED)
    assert superseded.to_json() == {"status": "SUPERSEDED", "execution": None, "state": "FAILED"}
