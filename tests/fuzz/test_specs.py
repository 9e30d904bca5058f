"""A document is accepted as a spec only if the schema allows it; every refusal names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec, job_spec_schema, parse, parse_spec

from .conftest import App
from .documents import from_schema, mutated, odd_values, torn

EXAMPLES = Path(__file__).resolve().parents[2] / "schemas" / "examples" / "valid"
VALID = [json.loads(path.read_text()) for path in sorted(EXAMPLES.glob("*.json"))]
SCHEMA = json.loads(json.dumps(job_spec_schema()))
# In a JSON Schema, `$` is the end of the text (ECMA-262); in Python, it is also the place before a last newline.
CHECK = jsonschema.Draft202012Validator(json.loads(json.dumps(SCHEMA).replace('$"', '\\\\Z"')))
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
    assert form_errors(document) == []  # only a rule that a JSON Schema cannot express may refuse the document


@settings(QUIET, max_examples=400)
@given(mutated(VALID) | odd_values)
@example({**VALID[0], "schema_uri": "x"})
@example({**VALID[0], "limits": {"max_cost_usd": True}})
def test_the_schema_and_pydantic_agree(document: Any) -> None:
    assume(is_json(document))
    assert (form_errors(document) == []) == CHECK.is_valid(document), form_errors(document)
    problems = problems_of(data_of(document))
    assert_problems_name_places(problems, document)
    assert problems or CHECK.is_valid(document)


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({"labels": {"team": "search"}}, True),
        ({"labels": {"Team": "search"}}, False),
        ({"labels": {"": "search"}}, False),
        ({"labels": {"team": "a\n"}}, False),
        ({"secrets": {"HF_TOKEN": "hf-token"}}, True),
        ({"secrets": {"hf token": "hf-token"}}, False),
        ({"training": {"epochs": 2}}, True),
        ({"training": {"max_steps": 10.0}}, True),
        ({"training": {"max_steps": 1e2}}, True),
        ({"training": {"max_steps": 10.5}}, False),
        ({"training": {"max_steps": 10**400}}, False),
        ({"training": {"max_grad_norm": 10**400}}, False),
        ({"limits": {"max_cost_usd": 1e308}}, False),
        ({"limits": {"max_attempts": True}}, False),
    ],
)
def test_the_schema_and_pydantic_agree_about_names_and_numbers(change: dict[str, Any], is_allowed: bool) -> None:
    minimal = json.loads((EXAMPLES / "minimal.json").read_text())
    document = {**minimal, **change}
    assert CHECK.is_valid(document) is is_allowed
    assert (form_errors(document) == []) is is_allowed
    assert (problems_of(data_of(document)) == []) is is_allowed


def form_errors(document: Any) -> list[str]:
    """Return pydantic's errors, apart from the rules that a JSON Schema cannot express (`Wrong`)."""
    try:
        JobSpec.model_validate_json(json.dumps(parse._parse_json(data_of(document))))
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
        return [f"{error['loc']}: {error['msg']}" for error in errors if error["type"] != "value_error"]
    return []


def is_json(document: Any) -> bool:
    """Whether the document can be JSON text: no infinite numbers, no half of a surrogate pair."""
    try:
        json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


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
