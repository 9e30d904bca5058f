"""Requests beside job specs: the classes, the published schema, and the words for a wrong message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dropforge.spec.parts import Budget
from dropforge.spec.request import (
    CHANGES,
    BudgetRequest,
    RetireRequest,
    ServeRequest,
    WrongRequest,
    kind_of,
    read_change,
)

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "schemas" / "request.schema.json").read_text())
RUN, COPY = "my-job-0123456789ab", "gs://other-runs/models/my-job-0123456789ab"
REQUESTS: list[dict[str, Any]] = [
    {"cancel": RUN},
    {"spec_uri": "gs://team-specs/specs/a.json"},
    {"serve": {"run": RUN, "endpoint": "prod"}},
    {"serve": {"run": RUN, "endpoint": "prod", "canary": {"percent": 5, "for": "1h"}}},
    {"serve": {"run": COPY, "endpoint": "prod", "canary": None, "with": {"region": "us-central1"}}},
    {"rollback": "prod"},
    {"retire": "prod"},
    {"retire": {"endpoint": "prod", "model": "emails"}},
    {"extend": {"endpoint": "prod", "ttl": "7d"}},
    {"extend": {"endpoint": "prod", "ttl": None}},
    {"budget": {"endpoint": "prod", "usd": 50, "per": "month"}},
    {"budget": {"endpoint": "prod", "usd": None}},
    {"budget": {"endpoint": "prod", "usd": None, "per": "day"}},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"serve": "prod"}, 'serve: wrong value; found "prod"; expected an object with run and endpoint'),
    ({"serve": {"run": RUN}}, "endpoint: a required field is missing; found nothing; expected the name of an endpoint"),
    ({"serve": {"run": 5, "endpoint": "prod"}}, "run: wrong value; found 5; expected the id of a run, or gs://"),
    (
        {"serve": {"run": RUN, "endpoint": "prod", "canery": None}},
        "canery: unknown field; found null; did you mean 'canary'?",
    ),
    (
        {"serve": {"run": RUN, "endpoint": "prod", "with": 5}},
        "with: wrong value; found 5; expected fields of `serve`, such as region",
    ),
    (
        {"serve": {"run": RUN, "endpoint": "prod", "canary": {"percent": 90}}},
        "canary/percent: wrong value; found 90; expected less than or equal to 50",
    ),
    ({"serve": {"run": RUN, "endpoint": "prod", "canary": {"for": "2d"}}}, "canary/for: longer than a canary may last"),
    ({"rollback": {"endpoint": "prod"}}, "rollback: wrong value; found"),
    ({"retire": {"endpoint": 7}}, 'retire: wrong value; found {"endpoint": 7}; expected the name of an endpoint, or'),
    ({"retire": 7}, "retire: wrong value; found 7; expected the name of an endpoint, or an object with endpoint and"),
    ({"extend": {"endpoint": "prod"}}, "ttl: a required field is missing; found nothing; expected how long, such as"),
    ({"extend": {"endpoint": "prod", "ttl": "a week"}}, 'ttl: wrong value; found "a week"; expected how long, such as'),
    ({"budget": {"endpoint": "prod", "usd": 5, "per": "week"}}, "budget/per: unknown value; found"),
    ({"budget": {"endpoint": "prod", "usd": "five", "per": "day"}}, "budget/usd: wrong type; found"),
    ({"budget": {"endpoint": "prod", "per": "day"}}, "budget/usd: a required field is missing"),
    ({"budget": {"endpoint": 7, "usd": 5, "per": "day"}}, "endpoint: wrong value; found 7; expected the name of an"),
    ({"budget": 7}, "budget: wrong value; found 7; expected an object with endpoint, usd and per"),
]


@pytest.mark.parametrize("content", REQUESTS, ids=json.dumps)
def test_a_request_fits_the_published_schema_and_is_read(content: dict[str, Any]) -> None:
    jsonschema.validate(content, SCHEMA)
    kind = kind_of(content)
    assert kind in content
    if kind in CHANGES:
        assert type(read_change(content)).model_fields.keys() == {kind}


@pytest.mark.parametrize(("content", "told"), WRONG, ids=lambda value: json.dumps(value) if value else "")
def test_a_wrong_request_fits_no_schema_and_is_answered_in_words(content: dict[str, Any], told: str) -> None:
    if "2d" not in json.dumps(content):  # a rule that JSON Schema cannot express
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content, SCHEMA)
    with pytest.raises(WrongRequest) as wrong:
        read_change(content)
    assert wrong.value.message.startswith(told), wrong.value.message
    assert wrong.value.hint
    assert "Input should" not in wrong.value.message


@pytest.mark.parametrize("content", [{}, [], "prod", None, {"serve": {}, "cancel": RUN}, {"api_version": 1}, {5: 5}])
def test_anything_else_is_no_request(content: Any) -> None:
    assert kind_of(content) is None


def test_a_text_that_is_no_unicode_is_answered() -> None:
    with pytest.raises(WrongRequest, match="not Unicode text"):
        read_change({"rollback": "\ud800"})


def test_a_request_says_what_it_leaves_to_the_spec() -> None:
    plain, none = (read_change(REQUESTS[number]) for number in (2, 4))
    assert isinstance(plain, ServeRequest)
    assert isinstance(none, ServeRequest)
    assert (plain.serve.has_canary, none.serve.has_canary, none.serve.canary) == (False, True, None)
    endpoint, model = (read_change(REQUESTS[number]) for number in (6, 7))
    assert isinstance(endpoint, RetireRequest)
    assert isinstance(model, RetireRequest)
    assert [(each.of.endpoint, each.of.model) for each in (endpoint, model)] == [("prod", ""), ("prod", "emails")]
    budgets = [read_change(REQUESTS[number]) for number in (10, 11)]
    assert [isinstance(each, BudgetRequest) and each.amount for each in budgets] == [Budget(usd=50, per="month"), None]
