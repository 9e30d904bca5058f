"""The operator's ceiling: which specs a policy refuses, by which rule, and what happens with a broken policy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.run.events import Request
from dropforge.run.record import RunState
from dropforge.spec import parse_spec
from dropforge.spec.policy import BrokenPolicy, Ceiling, Policy, policy_of
from dropforge.stages.admission import time_problems
from dropforge.stages.ceiling import cost_of, policy_problems, with_defaults
from dropforge.stages.submit import submit_message

from ..deployments import Memory, context_with, settings_with

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    *sorted((ROOT / "examples").rglob("*.json")),
    *sorted((ROOT / "schemas" / "examples" / "valid").glob("*.json")),
    *sorted((ROOT / "functions").rglob("smoke.json")),
]
B200S = {"type": "gke", "accelerator": "nvidia-b200", "accelerator_count": 8, "node_network": "tcp"}
L4 = {"type": "cloud_run", "placements": [{"region": "us-central1"}]}
L4_USD = 1.4209
DEFAULT = policy_of("")


def document(**changes: Any) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": "job",
        "model": {"source": "google/gemma-2b"},
        "dataset": {"source": "b-mc2/sql-create-context"},
        "target": L4,
        "serve": None,
        **changes,
    }


def spec_with(**changes: Any) -> Any:
    return parse_spec(json.dumps(document(**changes)).encode())


def policy_with(**rules: Any) -> Policy:
    return policy_of(json.dumps({"api_version": "dropforge/v1", **rules}))


def broken(policy: Policy, **changes: Any) -> list[str]:
    """The rules that a spec breaks, each as `rule pointer`."""
    problems = policy_problems(spec_with(**changes), policy)
    return [f"{problem.message.split('`')[1]} {problem.pointer}" for problem in problems]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_default_policy_allows_every_example(path: Path) -> None:
    assert policy_problems(parse_spec(path.read_bytes()), DEFAULT) == []


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        (
            {"target": {**B200S, "nodes": 64, "placements": [{"region": "us-central1"}]}},
            {"max_usd_per_hour /target", "max_cost_usd /limits/max_cost_usd", "max_accelerators /target"},
        ),
        (
            {
                "serve": {
                    "type": "gke", "accelerator": "nvidia-b200", "accelerator_count": 8, "max_instances": 100,
                    "region": "us-central1",
                }
            },
            {"max_usd_per_hour /serve", "max_instances /serve/max_instances", "max_accelerators /serve"},
        ),
        ({"limits": {"max_duration": "11h", "max_attempts": 50}}, {"max_attempts /limits/max_attempts"}),
        ({"limits": {"retry": {"preempted": 50}}}, {"max_retries /limits/retry/preempted"}),
        ({"serve": {"type": "cloud_run", "ttl": "999999d"}}, {"max_ttl /serve/ttl"}),
        (
            {"target": {"type": "gke", "placements": [{"region": "us-central1"}]},
             "limits": {"max_duration": "999999d"}},
            {"max_duration /limits/max_duration"},
        ),
        (
            {"target": {"type": "tpu_vm", "placements": [{"zone": "us-west4-a"}], "data_disk_gib": 65536},
             "training": {"adapter": {"type": "none"}}},
            {"max_disk_gib /target"},
        ),
        ({"model": {"source": "a/b", "trust_remote_code": True}}, {"trust_remote_code /model/trust_remote_code"}),
    ],
    ids=["64x8-b200", "endpoint", "attempts", "retries", "ttl", "duration", "disk", "remote-code"],
)  # fmt: skip
def test_the_default_policy_refuses_the_specs_of_the_security_review(changes: dict[str, Any], rules: set[str]) -> None:
    assert rules <= set(broken(DEFAULT, **changes))


# One rule, a spec that it refuses, the place of the problem. The ceilings are just below what the spec uses.
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_cost_usd": 2.8}, {}, "/limits/max_cost_usd"),
    ({"max_cost_usd": 2}, {"limits": {"max_cost_usd": 2.5}}, "/limits/max_cost_usd"),
    ({"max_usd_per_hour": 1.4}, {}, "/target"),
    ({"max_usd_per_hour": 2.8}, {"serve": {"type": "cloud_run", "max_instances": 2}}, "/serve"),
    (
        {"endpoint_names": ["search-*"]},
        {"serve": {"type": "cloud_run", "endpoint": "text-to-sql"}},
        "/serve/endpoint",
    ),
    ({"max_duration": "119m"}, {}, "/limits/max_duration"),
    ({"max_attempts": 19}, {}, "/limits/max_attempts"),
    ({"max_retries": 3}, {"limits": {"retry": {"preempted": 3, "stockout": 4, "quota": 0}}}, "/limits/retry/stockout"),
    ({"max_ttl": "23h"}, {"serve": {"type": "cloud_run"}}, "/serve/ttl"),
    ({"max_startup_timeout": "19m"}, {"serve": {"type": "cloud_run"}}, "/serve/startup_timeout"),
    (
        {"max_accelerators": 15},
        {"target": {**B200S, "nodes": 2, "placements": [{"region": "us-central1"}]}},
        "/target",
    ),
    ({"max_accelerators": 2}, {"serve": {"type": "cloud_run", "max_instances": 3}}, "/serve"),
    ({"max_nodes": 1}, {"target": {**B200S, "nodes": 2, "placements": [{"region": "us-central1"}]}}, "/target"),
    ({"max_instances": 2}, {"serve": {"type": "cloud_run", "max_instances": 3}}, "/serve/max_instances"),
    ({"max_disk_gib": 99}, {"target": {**L4, "disk_gib": 100}}, "/target"),
    ({"max_usd_per_day": 1}, {}, "/limits/max_cost_usd"),
    ({"require_budget": True}, {}, "/limits/max_cost_usd"),
    (
        {"require_price": True},
        {"target": {"type": "gke", "placements": [{"region": "us-central1"}]}},
        "/target/price_usd_per_hour",
    ),
    ({"trust_remote_code": False}, {"model": {"source": "a/b", "trust_remote_code": True}}, "/model/trust_remote_code"),
    ({"targets": ["gke", "tpu_*"]}, {}, "/target/type"),
    ({"endpoints": ["gke"]}, {"serve": {"type": "cloud_run"}}, "/serve/type"),
    ({"accelerators": ["tpu-*"]}, {}, "/target"),
    ({"regions": ["europe-*"]}, {}, "/target/placements"),
    (
        {"regions": ["us-central1"]},
        {"serve": {"type": "cloud_run", "region": "europe-west4"}},
        "/serve",
    ),
    ({"models": ["Google/*"]}, {}, "/model/source"),
    (
        {"datasets": ["gs://team-data/*"]},
        {"dataset": {"source": "gs://team-data-of-others/x.jsonl"}},
        "/dataset/source",
    ),
    (
        {"datasets": ["b-mc2/*"]},
        {"evaluation": {"source": "gs://team-data-of-others/x.jsonl"}},
        "/evaluation/source",
    ),
    (
        {"notify_hosts": ["*.example.com"]},
        {"notify": {"webhook": {"url": "https://hooks.example.org/", "signing_secret": "s"}}},
        "/notify/webhook/url",
    ),
    (
        {"notify_hosts": ["example.com"]},
        {"notify": {"email": {"server_secret": "s", "to": ["a@example.com", "b@EXAMPLE.org"]}}},
        "/notify/email/to/1",
    ),
    ({"required_labels": {"team": ["ads"]}}, {}, "/labels/team"),
    ({"required_labels": {"team": ["ads"]}}, {"labels": {"team": "search"}}, "/labels/team"),
]


@pytest.mark.parametrize(
    ("rules", "changes", "pointer"), CASES, ids=[f"{next(iter(case[0]))}-{n}" for n, case in enumerate(CASES)]
)
def test_each_rule_refuses_alone_and_says_where(rules: dict[str, Any], changes: dict[str, Any], pointer: str) -> None:
    """With `null` in the place of the limit, the same spec passes."""
    (rule,) = rules
    lifted = {name: None for name in Ceiling.model_fields if name != "required_labels"}
    assert broken(policy_with(**lifted), **changes) == []
    found = broken(policy_with(**{**lifted, **rules}), **changes)
    assert found == [f"{rule}{'.team' if rule == 'required_labels' else ''} {pointer}"]
    (problem,) = policy_problems(spec_with(**changes), policy_with(**{**lifted, **rules}))
    assert problem.found
    assert "an operator can change the policy" in str(problem.expected)


def test_every_rule_has_a_case() -> None:
    cases = {rule for rules, _, _ in CASES for rule in rules}
    assert cases | {"max_runs"} == set(Ceiling.model_fields), "max_runs refuses no spec: see test_places.py"


def test_a_spec_at_its_limit_passes() -> None:
    exact = {"max_cost_usd": round(2 * L4_USD, 4), "max_usd_per_hour": L4_USD, "max_duration": "2h", "max_attempts": 20}
    assert broken(policy_with(**exact)) == []


def test_a_label_tightens_the_ceiling_and_never_lifts_it() -> None:
    policy = policy_with(max_cost_usd=5, by_label=[
        {"labels": {"team": "interns", "stage": "test"}, "max_cost_usd": 1},
        {"labels": {"team": "rich"}, "max_cost_usd": 1000},
    ])  # fmt: skip
    assert broken(policy, labels={"team": "interns"}) == []
    assert broken(policy, labels={"team": "interns", "stage": "test"}) == [
        "by_label[0].max_cost_usd /limits/max_cost_usd"
    ]
    expensive = {"limits": {"max_duration": "12h"}, "labels": {"team": "rich"}}
    assert broken(policy, **expensive) == ["max_cost_usd /limits/max_cost_usd"]


def test_a_stated_price_below_the_list_price_does_not_help() -> None:
    """A budget is enforced at the stated price, so it would pay for hundreds of hours of the real machine."""
    cheap = {**L4, "price_usd_per_hour": 0.001}
    assert cost_of(spec_with(target=cheap)).most == pytest.approx(2 * L4_USD)
    budget = {"max_duration": "12h", "max_cost_usd": 0.5}
    assert cost_of(spec_with(target=cheap, limits=budget)).most == pytest.approx(12 * L4_USD)
    assert cost_of(spec_with(limits=budget)).most == 0.5
    assert cost_of(spec_with(target={**L4, "price_usd_per_hour": 9.0})).training == 9.0


def test_the_maximum_cost_of_a_run_has_that_of_its_endpoint() -> None:
    serve = {"type": "cloud_run", "ttl": "10h", "price_usd_per_hour": 50.0}
    spec = spec_with(serve=serve)
    most, training = cost_of(spec).most, cost_of(spec_with()).most
    assert most is not None
    assert training is not None
    assert most - training >= 10 * 50.0


def test_a_policy_of_names_also_limits_shared_endpoints_without_a_name() -> None:
    shared = {"type": "cloud_run", "share": True}
    assert broken(policy_with(endpoint_names=["search-*"]), serve=shared) == ["endpoint_names /serve/share"]
    assert broken(policy_with(endpoint_names=["shared-*"]), serve=shared) == []


def test_defaults_fill_in_only_what_a_spec_leaves_out() -> None:
    policy = policy_with(defaults={"max_cost_usd": 7, "max_duration": "5h", "max_attempts": 2, "ttl": "3h"})
    silent = with_defaults(spec_with(serve={"type": "cloud_run"}), policy)
    assert (silent.limits.max_cost_usd, silent.limits.max_duration, silent.limits.max_attempts) == (7, "5h", 2)
    assert silent.serve is not None
    assert silent.serve.ttl == "3h"
    limits = {"max_cost_usd": 9, "max_duration": "2h", "max_attempts": 20}
    stated = spec_with(serve={"type": "cloud_run", "ttl": "24h"}, limits=limits)
    assert with_defaults(stated, policy) == stated
    again = parse_spec(silent.model_dump_json(by_alias=True).encode())
    assert with_defaults(again, policy) == silent


def test_a_default_that_the_target_does_not_take_is_a_problem_of_the_spec() -> None:
    with pytest.raises(InvalidSpec, match="/limits/max_duration: longer than a Cloud Run task"):
        with_defaults(spec_with(), policy_with(defaults={"max_duration": "2d"}))


@pytest.mark.parametrize(
    "text",
    ["{", "null", "[]", "{}", '{"api_version": "dropforge/v2"}', '{"api_version": "dropforge/v1", "max_cost": 1}',
     '{"api_version": "dropforge/v1", "max_cost_usd": 0}', '{"api_version": "dropforge/v1", "max_cost_usd": "5"}'],
)  # fmt: skip
def test_with_a_broken_policy_nothing_is_accepted_and_nothing_is_lost(text: str) -> None:
    """The delivery fails, so that it is repeated. With the repaired policy the same delivery is decided."""
    storage = Memory()
    data = json.dumps(document()).encode()
    with pytest.raises(BrokenPolicy, match=r"DROPFORGE_POLICY cannot be read: .*policy check"):
        submit_message(context_with(settings_with(policy=text), storage=storage), data, Request("x", "key", "1"))
    assert storage.objects == {}
    events: list[Any] = []

    def publish(*given: Any, **_: Any) -> Any:
        events.append(given)
        return SimpleNamespace(result=lambda _: "")

    publisher = SimpleNamespace(publish=publish)
    repaired = settings_with(policy='{"api_version": "dropforge/v1", "max_cost_usd": 1}')
    record = submit_message(
        context_with(repaired, storage=storage, publisher=publisher), data, Request("x", "key", "1")
    )
    assert record.state is RunState.REJECTED
    stored = json.loads(storage.objects[names.errors_object(record.run)][0])
    assert [problem["pointer"] for problem in stored["errors"]] == ["/limits/max_cost_usd"]
    assert len(events) == 1


@pytest.mark.parametrize(
    ("target", "least"),
    [
        ({"type": "cloud_run", "placements": [{"region": "us-central1"}]}, 120),
        ({"type": "gke", "placements": [{"region": "us-central1"}]}, 180),
        ({"type": "gke", "placements": [{"region": "us-central1"}], "cluster": {"create": True}}, 480),
        ({"type": "tpu_vm", "placements": [{"zone": "us-west4-a"}]}, 240),
        ({"type": "ray", "placements": [{"region": "us-east5"}]}, 180),
    ],
    ids=["cloud_run", "gke", "own-cluster", "tpu_vm", "ray"],
)
def test_a_run_needs_time_for_the_start_of_its_target_and_a_minute_of_training(
    target: dict[str, Any], least: int
) -> None:
    def problems(duration: int) -> list[SpecProblem]:
        given = document(target=target, serve=None, limits={"max_duration": f"{duration}s"})
        given["training"] = {"adapter": {"type": "none"}}
        return time_problems(parse_spec(json.dumps(given).encode()))

    assert problems(least) == []
    [problem] = problems(least - 1)
    assert problem.pointer == "/limits/max_duration"
    assert f"at least {least}s" in (problem.expected or "")
