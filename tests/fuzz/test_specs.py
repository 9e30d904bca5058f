"""A document is accepted as a spec only if the schema allows it; every refusal names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.run.record import Record, RunState
from dropforge.spec import job_spec_schema, parse_spec

from .conftest import App
from .documents import from_schema, mutated, odd_values, torn

EXAMPLES = Path(__file__).resolve().parents[2] / "schemas" / "examples" / "valid"
VALID = [json.loads(path.read_text()) for path in sorted(EXAMPLES.glob("*.json"))]
SCHEMA = json.loads(json.dumps(job_spec_schema()))
CHECK = jsonschema.Draft202012Validator(SCHEMA)
QUIET = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def data_of(document: Any) -> bytes:
    return json.dumps(document).encode()


def problems_of(data: bytes) -> list[SpecProblem]:
    """Return the problems that `parse_spec` reports; it may raise nothing but InvalidSpec."""
    try:
        parse_spec(data)
    except InvalidSpec as refused:
        problems = refused.problems
    else:
        return []
    assert problems
    return problems


def assert_problems_name_places(problems: list[SpecProblem], document: Any) -> None:
    """Each problem names an existing place or a missing field, the value, and the expected value."""
    assert_complete(problems)
    for problem in problems:
        assert "Canary" not in str(problem)
        assert is_place(document, problem.pointer), problem


def assert_complete(problems: list[SpecProblem]) -> None:
    """Each problem has a message, and a value and an expectation unless it is about the whole document."""
    for problem in problems:
        assert problem.message
        assert problem.found is not None or not problem.pointer, problem
        assert problem.expected or "not listed" in problem.message, problem


def is_place(document: Any, pointer: str) -> bool:
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    for step in steps[:-1]:
        if isinstance(document, list):
            if not (step.isdecimal() and int(step) < len(document)):
                return False
            document = document[int(step)]
        elif isinstance(document, dict) and step in document:
            document = document[step]
        else:
            # A missing part has its defaults; a problem of a default is reported at the place of the default.
            return document is None
    return not steps or isinstance(document, dict | list)


@settings(QUIET, max_examples=60)
@given(from_schema(SCHEMA))
def test_a_document_that_the_schema_allows_is_accepted_or_refused_with_a_reason(document: Any) -> None:
    assert_problems_name_places(problems_of(data_of(document)), document)


@settings(QUIET, max_examples=400)
@given(mutated(VALID) | odd_values)
def test_a_document_that_the_schema_refuses_is_refused(document: Any) -> None:
    problems = problems_of(data_of(document))
    assert_problems_name_places(problems, document)
    if not problems:
        CHECK.validate(document)


@settings(QUIET, max_examples=400)
@given(torn(VALID))
def test_damaged_bytes_are_refused_or_a_document(data: bytes) -> None:
    problems = problems_of(data)
    assert_complete(problems)
    if not problems:
        CHECK.validate(json.loads(data.decode("utf-8-sig")))


@settings(QUIET, max_examples=120)
@given(mutated(VALID).map(data_of) | torn(VALID) | odd_values.map(data_of), st.booleans())
def test_every_upload_is_acknowledged_and_only_a_spec_starts_an_execution(
    app: App, data: bytes, as_message: bool
) -> None:
    status, record = app.message("on_spec_message", data) if as_message else app.upload(data)
    assert status == 200
    assert_settled(app, record, data)


@pytest.mark.parametrize("document", VALID, ids=lambda document: str(document["name"]))
def test_valid_examples_start_one_execution_or_none(app: App, document: dict[str, Any]) -> None:
    status, record = app.message("on_spec_message", data_of(document))
    assert status == 200
    assert_settled(app, record, data_of(document))


def assert_settled(app: App, record: Record | None, data: bytes) -> None:
    if record is None:
        request = json.loads(data)  # only a cancel makes no run
        assert set(request) == {"cancel"}
    elif record.state is RunState.REJECTED:
        assert record.problems
        assert app.executions(record.run) == 0
    else:
        assert record.state is RunState.ACCEPTED
        assert app.executions(record.run) == 1
        assert not problems_of(data)
