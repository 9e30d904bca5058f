"""The stage preflight, by what it answers about the text of a spec. tests/cli/test_preflight.py has the questions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropforge.cloud import google_apis
from dropforge.cloud.google_apis import NotAsked, Refused
from dropforge.spec import parse_spec
from dropforge.stages import preflight as module
from dropforge.stages.answers import Finding
from dropforge.stages.preflight import accepted, preflight

from ..console.test_run_page import SPEC
from ..deployments import Memory, context_with

L4 = {**SPEC, "target": {"type": "gke", "accelerator": "nvidia-l4", "placements": [{"region": "us-central1"}]}}


class Bucket(Memory):
    """A bucket in us-central1."""

    location, location_type = "US-CENTRAL1", "region"

    def lookup_bucket(self, name: str, timeout: float) -> Bucket:
        return self


def answers(text: str, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """The answers where no API but Cloud Storage's is emulated."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    context = context_with(storage=Bucket())
    return preflight(context, text).findings


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "the spec is not JSON"), ("\ud800", "the text is not Unicode"), (json.dumps({**SPEC, "nam": 1}), "nam")],
)
def test_a_spec_that_cannot_be_read_is_one_failed_answer(
    text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers(text, monkeypatch)
    assert {each.status for each in found} == {"failed"}
    assert any(expected in each.message for each in found), found


def test_a_question_that_cannot_be_asked_here_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {each.what: each.status for each in answers(json.dumps(SPEC), monkeypatch)}
    quotas = {what: status for what, status in asked.items() if what.startswith("quota for")}
    assert quotas
    assert set(quotas.values()) == {"not asked"}


def test_a_spec_whose_budget_may_end_the_endpoint_early_is_accepted_with_a_warning() -> None:
    serve = {"type": "cloud_run", "ttl": "4h", "price_usd_per_hour": 1}
    target = {**SPEC["target"], "price_usd_per_hour": 1}
    for budget, statuses in ((9, ["ok"]), (5, ["ok", "warning"])):
        limits = {"max_duration": "4h", "max_cost_usd": budget}
        document = {**SPEC, "target": target, "serve": serve, "limits": limits}
        found = list(accepted(context_with().cloud, "spec", parse_spec(json.dumps(document).encode())))
        assert [each.status for each in found] == statuses
        assert all("raise limits.max_cost_usd" in each.message for each in found[1:])


def asked_of(limit: float, usage: float, zones: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The answers about one L4 in us-central1, by question, where Compute Engine says this."""

    def get(api: str, path: str, **query: Any) -> dict[str, Any]:
        if "acceleratorTypes" in path:
            return {"items": {f"zones/{zone}": {"acceleratorTypes": [{}]} for zone in zones}}
        if "/regions/" in path:
            return {"quotas": [{"metric": "NVIDIA_L4_GPUS", "limit": limit, "usage": usage}]}
        raise NotAsked("another question")

    monkeypatch.setattr(google_apis, "get", get)
    spec = parse_spec(json.dumps(L4).encode())
    return {each.what: each.status for each in module.about(context_with(storage=Bucket()).cloud, spec)}


@pytest.mark.parametrize(
    ("limit", "usage", "status"), [(1, 0, "ok"), (2, 1, "ok"), (1, 1, "warning"), (0, 0, "failed")]
)
def test_what_others_use_is_not_free(limit: float, usage: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked_of(limit, usage, ["us-central1-a"], monkeypatch)
    assert found["quota for 1 nvidia-l4 in us-central1"] == status


def test_a_gpu_of_another_region_is_none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    what = "1 nvidia-l4 in us-central1"
    assert asked_of(1, 0, ["us-central1-b"], monkeypatch)[what] == "ok"
    assert asked_of(1, 0, ["us-central2-b", "europe-west4-a"], monkeypatch)[what] == "failed"


def test_a_refusal_of_google_is_a_failure_that_says_what_google_said() -> None:
    def ask() -> list[Finding]:
        raise Refused(403, "denied to this account")

    (answer,) = module.asked("quota", ask)
    assert (answer.status, answer.message) == ("failed", "Google answered 403: denied to this account")
