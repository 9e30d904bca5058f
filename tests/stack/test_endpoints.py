"""Named endpoints on the whole stack: one URL, new models behind it under load, and the way back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from google.cloud import run_v2
from openai import NotFoundError, OpenAIError

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import NotFound as NoRecord
from dropforge.endpoints.record import RolloutState
from dropforge.platforms import servers
from dropforge.run.record import RunState
from dropforge_cli.main import cli

from .clusters import Clusters
from .conftest import User
from .named import EVERY, KINDS, OPERATIONS, Load, Named, is_told
from .test_faults import kill
from .test_runs import call, run_events

REQUESTS = "dropforge-requests"
A100 = "nvidia-tesla-a100"  # no other test of the stack uses a machine with it
DUST = "1e-06 USD a month"
REGION = "asia-southeast1"  # no other test serves there, so a stockout there disturbs none


@pytest.fixture(params=KINDS)
def named(user: User, request: pytest.FixtureRequest) -> Iterator[Named]:
    """Yield a named endpoint; the test runs once for each platform that keeps the revision before."""
    with lent(user, request.param) as named:
        yield named


@pytest.fixture(params=EVERY)
def any_named(user: User, request: pytest.FixtureRequest) -> Iterator[Named]:
    """Yield a named endpoint; the test runs once for each platform that has named endpoints."""
    with lent(user, request.param) as named:
        yield named


@contextmanager
def lent(user: User, kind: str) -> Iterator[Named]:
    """A named endpoint of a platform, which is retired afterwards."""
    named = Named(user, kind=kind)
    yield named
    with suppress(NoRecord):
        if named.record.retired is None:
            named.retire()


def test_every_platform_with_named_endpoints_is_tested() -> None:
    assert {kind for kind, serving in servers().items() if serving.named} == set(EVERY)


def test_models_change_behind_one_url_and_no_request_fails(named: Named) -> None:
    """Two new models and two rollbacks under load, streams included. A rollback starts no machine."""
    before = named.serves()
    first = before.revision(1).revision
    with Load(named).running() as load:
        named.user.until(lambda: load.has_seen(first))
        after = named.serves()
        second = after.revision(2).revision
        named.user.until(lambda: load.has_seen(second))
        for promoted, revision in ((1, first), (2, second)):
            rollout = named.ended(named.ask(rollback=named.name))
            assert (rollout.state, rollout.revision) == (RolloutState.PROMOTED, promoted)
            named.user.until(partial(load.has_seen, revision))
        third = named.serves().revision(3).revision
        named.user.until(lambda: load.has_seen(third))
    assert load.problems == []
    assert set(load.answers) == {first, second, third}
    record = named.record
    assert (record.url, record.stable, record.previous) == (before.url, 3, 2)
    named.user.until(lambda: named.revisions() == {second, third})  # no rollback can promote the first
    assert {revision.number for revision in record.revisions if revision.paid_since} == named.paid


def test_a_revision_that_cannot_start_leaves_the_one_before_alone(named: Named) -> None:
    kubernetes = named.kind == "gke"
    place = {} if kubernetes else {"region": REGION}
    faults, lacking = ("_local/kubernetes/faults", A100) if kubernetes else ("_local/cloudrun/faults", REGION)
    first = named.serves(**place).revision(1).revision
    with Load(named).running() as load:
        named.user.post(faults, {"stockout": [lacking]})
        try:  # Kubernetes waits for a machine until the end of the time to start
            wanted = {"accelerator": A100, "startup_timeout": "5s"} if kubernetes else place
            record = named.user.wait(named.put(**wanted))
        finally:
            named.user.post(faults, {"stockout": []})
        named.user.until(lambda: load.has_seen(first))
    assert load.problems == []
    assert set(load.answers) == {first}
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == ("deadline" if kubernetes else "stockout")
    assert "out of resources" in record.error.message or not kubernetes
    rollout = named.record.rollout(record.run)
    assert (rollout.state, named.record.stable) == (RolloutState.ROLLED_BACK, 1)
    assert named.serves(**place).stable == 3, "a failed rollout must not block the next"
    named.user.until(lambda: len(named.revisions()) <= (2 if kubernetes else 3))


def share(named: Named, name: str, behave: str = "shared", *, base: str = "owner/tiny-1m") -> str:
    """Drop a spec whose adapter gets to a shared endpoint, as model `name`; return its run."""
    serve = {"type": named.kind, "endpoint": named.name, "share": True}
    training = {"adapter": {"type": "lora"}}
    spec = named.user.spec(behave, name=name, training=training, serve=serve, model={"source": base})
    return named.user.drop(spec)


def test_adapters_share_an_endpoint_and_come_and_go_without_a_failed_request(named: Named) -> None:
    """Each is compared with its own seal. What does not fit changes nothing; the last one out retires the endpoint."""
    user = named.user
    first = user.wait(share(named, "sql"))
    assert first.state is RunState.SUCCEEDED, first.error
    with Load(named, "sql").running() as load:
        user.until(lambda: load.answers)
        second = user.wait(share(named, "emails"))
        assert second.state is RunState.SUCCEEDED, second.error
        both = named.record.serving
        assert both is not None
        assert [(each.name, each.run, each.sealed) for each in both.adapters] == [
            ("sql", first.run, True),
            ("emails", second.run, True),
        ]
        assert {each.parity.state for each in both.adapters if each.parity} == {"sealed"}
        assert second.parity is not None
        assert second.parity.state == "sealed"
        refused = [user.wait(share(named, "third", how)) for how in ("shared-otherwise", "shared-on-another-base")]
        told = [run.error and (run.state, run.error.error_class, run.error.message) for run in refused]
        assert [each and each[:2] for each in told] == [("FAILED", "parity"), ("FAILED", "config")]
        assert "model third: the endpoint does not answer as the exported model" in str(told[0])
        assert "does not fit endpoint" in str(told[1])
        early = [share(named, "third", base="owner/other"), share(named, named.name), named.put("sealed")]
        assert [user.wait(run).state for run in early] == [RunState.REJECTED] * 3
        assert [each.name for each in named.record.adapters] == ["sql", "emails"]
        assert "sql, emails" in ran(user, "endpoints")
        assert "model='emails'" in ran(user, "snippet", second.run)
        assert ran(user, "chat", f"{named.name}/sql", "Hello") == "ok\n"
        assert f"{named.name}/sql, {named.name}/emails" in ran(user, "chat", f"{named.name}/other", "Hi", fails=True)
        assert "as models sql\n" in ran(user, "retire", named.name, "--model", "emails")
        assert is_told(
            named, second.run, f":arrows_counterclockwise: emails no longer serves behind endpoint {named.name}"
        )
        messages: Any = [{"role": "user", "content": "Hello"}]
        with pytest.raises(NotFoundError):
            named.client().chat.completions.create(model="emails", messages=messages)
        last = named.record.serving
        assert last is not None
        assert last.run == first.run
        user.until(lambda: load.has_seen(last.revision))
    assert load.problems == []
    assert set(named.record.cost_by_model(utc_now())) == {"sql", "emails", "third"}
    assert named.ended(named.ask(retire={"endpoint": named.name, "model": "sql"})).state is RolloutState.RETIRED
    assert named.service() is None


def test_a_revision_that_differs_from_its_model_gets_no_request(any_named: Named) -> None:
    """The parity seal in a rollout: a sealed model serves, and the next one is not served as its seal says."""
    named = any_named
    before = named.serves("sealed").revision(1)
    assert before.parity is not None
    assert (before.parity.state, before.parity.rows) == ("sealed", 1)
    with Load(named).running() as load:
        record = named.user.wait(named.put("sealed-otherwise"))
        named.user.until(lambda: load.has_seen(before.revision))
    assert load.problems == []
    assert set(load.answers) == {before.revision}
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "parity"
    assert is_told(named, record.run, f":warning: noop was not put behind endpoint {named.name}")
    after = named.record
    assert (after.rollout(record.run).state, after.stable, after.previous) == (RolloutState.ROLLED_BACK, 1, 0)
    refused = after.revision(2)
    assert refused.parity is not None
    assert (refused.parity.state, refused.paid_since) == ("failed", None)
    assert refused.parity.reason == record.error.message


def test_rollouts_of_one_endpoint_take_turns(any_named: Named) -> None:
    named = any_named
    runs = [named.put(), named.put(), named.put()]
    for run in runs:
        assert named.user.wait(run).state is RunState.SUCCEEDED
    rollouts = named.record.rollouts
    assert {rollout.id for rollout in rollouts} == set(runs)
    for before, after in pairwise(rollouts):
        assert before.ended is not None
        assert after.started is not None
        assert before.ended <= after.started
    assert named.answer() == named.record.revision(3).revision


def test_a_cancelled_run_puts_nothing_behind_the_name(named: Named) -> None:
    named.serves()
    run = named.put(region="us-central1")
    named.user.wait(run, RunState.DEPLOYING, RunState.SUCCEEDED)
    named.user.publish(OPERATIONS, json.dumps({"cancel": run}).encode())
    record = named.user.wait(run)
    rollout = named.ended(run) if named.record.find(run) else None
    if record.state is RunState.CANCELLED and rollout is not None and rollout.state is RolloutState.ROLLED_BACK:
        assert named.record.stable == 1
    else:  # the model was promoted before the cancel arrived: the endpoint is not the run's to delete
        assert named.record.stable == 2
    assert named.answer() == named.record.revision(named.record.stable).revision


def test_an_old_model_is_served_again_without_training(any_named: Named) -> None:
    named = any_named
    run = named.user.drop(named.user.spec(serve={"type": named.kind, "ttl": "1h", **named.place}))
    assert named.user.wait(run).state is RunState.SUCCEEDED
    rollout = named.ended(named.ask(serve={"run": run, "endpoint": named.name}))
    assert rollout.state is RolloutState.PROMOTED, rollout.error
    assert named.record.revision(1).run == run
    assert named.answer() == named.record.revision(1).revision
    headlines = named.user.slack(run, f"serves behind endpoint {named.name}")
    assert headlines[-2:] == [
        f":arrows_counterclockwise: noop is being put behind endpoint {named.name}",
        f":white_check_mark: noop serves behind endpoint {named.name}",
    ]
    named.user.publish(OPERATIONS, json.dumps({"cancel": run}).encode())
    named.user.until(lambda: (e := named.user.store.record(run).endpoint) is not None and e.ended)
    assert named.answer(), "the end of the run's own endpoint must not end the named one"


def test_a_retired_endpoint_leaves_nothing_and_its_name_stays_taken(any_named: Named) -> None:
    named = any_named
    run = named.user.drop(named.user.spec())
    named.serves()
    assert named.service() is not None
    named.retire()
    assert named.service() is None
    assert (named.record.state, named.record.stable) == ("RETIRED", 0)
    assert all(revision.paid_since is None for revision in named.record.revisions)
    record = named.user.wait(named.put())
    assert record.state is not RunState.SUCCEEDED
    assert "was retired" in json.dumps([record.problems, record.error and record.error.message])
    named.user.wait(run)


# Each change that is refused, the topic that it comes from, and what the answer says. NAME is an endpoint that serves
# one model of the specs bucket; RUN is a run without a model.
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (OPERATIONS, {"rollback": "no-such-endpoint"}, "there is no endpoint 'no-such-endpoint'"),
    (OPERATIONS, {"rollback": "NAME"}, "has no model before the present one"),
    (OPERATIONS, {"retire": {"endpoint": 7}}, "expected the name of an endpoint"),
    (OPERATIONS, {"extend": {"endpoint": "NAME", "ttl": "a week"}}, "expected how long"),
    (OPERATIONS, {"budget": {"endpoint": "NAME", "usd": 50, "per": "week"}}, "budget/per: unknown value"),
    (REQUESTS, {"budget": {"endpoint": "NAME", "usd": None}}, "belongs to the specs bucket"),
    (OPERATIONS, {"serve": {"run": "no-run-0123456789ab", "endpoint": "NAME"}}, "there is no run"),
    (OPERATIONS, {"serve": {"run": "RUN", "endpoint": "NAME"}}, "has no `serve`"),
    (OPERATIONS, {"serve": {"run": "POOR", "endpoint": "NAME"}}, "exact_match is 0.1"),
    (OPERATIONS, {"serve": {"run": "ELSEWHERE", "endpoint": "NAME"}}, "its URL would change"),
    (OPERATIONS, {"serve": {"run": "ELSEWHERE", "endpoint": "latest"}}, "is not the name of an endpoint"),
    (REQUESTS, {"retire": "NAME"}, "belongs to the specs bucket; the request came from topic dropforge-requests"),
    (REQUESTS, {"serve": {"run": "ELSEWHERE", "endpoint": "NAME"}}, "there is no run"),
]


def test_a_refused_change_is_answered_and_changes_nothing(named: Named) -> None:
    user, serve = named.user, {"type": named.kind, "ttl": "1h"}
    gate = {"holdout_fraction": 0.1, "gate": {"metric": "exact_match", "min": 0.5}}
    runs = {
        "RUN": user.drop(user.spec()),
        "POOR": user.drop(user.spec("poor", evaluation=gate, serve=serve)),
        "ELSEWHERE": user.drop(user.spec(serve={**serve, "region": "europe-west4"})),
    }
    before = named.serves(region="us-central1")
    for run in runs.values():
        user.wait(run)
    texts: dict[str, str] = {}
    with run_events(user) as pull:
        asked = {}
        for topic, change, expected in REFUSALS:
            text = json.dumps(change).replace('"NAME"', f'"{named.name}"')
            for word, run in runs.items():
                text = text.replace(f'"{word}"', f'"{run}"')
            asked[named.ask(topic, **json.loads(text))] = expected

        def all_arrived() -> bool:
            texts.update({event["run"]: event["details"]["text"] for _, event in pull() if event["run"] in asked})
            return texts.keys() == asked.keys()

        user.until(all_arrived)
    for rollout, expected in asked.items():
        assert expected in texts[rollout]
    assert named.record == before
    user.publish(OPERATIONS, json.dumps({"cancel": runs["ELSEWHERE"]}).encode())


def test_an_endpoint_past_its_expiry_is_retired_by_the_sweep(any_named: Named) -> None:
    named = any_named
    named.serves()
    named.ask(extend={"endpoint": named.name, "ttl": "30d"})
    named.user.until(lambda: (e := named.record.expires) is not None and (e - utc_now()).days >= 29)
    named.ask(extend={"endpoint": named.name, "ttl": None})
    named.user.until(lambda: named.record.expires is None)
    call(named.user, "sweep", {}).raise_for_status()
    assert named.record.state == "SERVING"
    named.ask(extend={"endpoint": named.name, "ttl": "1s"})
    named.user.until(lambda: call(named.user, "sweep", {}).ok and named.record.state == "RETIRED")
    assert named.service() is None


def test_a_spent_budget_suspends_an_endpoint_until_its_budget_is_higher(named: Named) -> None:
    """It keeps its URL and its models. Another endpoint, whose budget is not spent, serves all the time."""
    other = Named(named.user, kind=named.kind)
    other.serves(budget={"usd": 1000, "per": "day"}, price_usd_per_hour=2)
    named.serves(price_usd_per_hour=2)
    before = named.serves(price_usd_per_hour=2)
    named.ask(budget={"endpoint": named.name, "usd": 1e-6, "per": "month"})
    named.user.until(lambda: named.record.budget is not None)
    named.user.until(lambda: call(named.user, "sweep", {}).ok and named.record.state == "SUSPENDED")
    suspended = named.record
    assert {each.number for each in suspended.revisions if each.paid_since} == set()
    assert instances(named) == 0
    with pytest.raises(OpenAIError):
        named.answer()
    run = before.revision(2).run
    assert is_told(named, run, f":warning: noop does not serve: endpoint {named.name} has spent its budget of {DUST}")
    assert "has spent its budget" in ran(named.user, "chat", named.name, "Hello", fails=True)
    refused = named.user.wait(named.put())
    assert refused.error is not None
    assert f"has spent its budget of {DUST}; it answers again from" in refused.error.message
    assert {named.name, other.name} & {line["run"] for line in audited()} == set()
    call(named.user, "sweep", {}).raise_for_status()
    assert named.record == suspended, "a sweep deletes nothing of a suspended endpoint, and resumes it too early never"
    assert "answers with revision 2" in ran(named.user, "budget", named.name, "1000/month")
    after = named.record
    assert (after.rollouts[-1].state, after.rollouts[-1].kind) == (RolloutState.PROMOTED, "resume")
    assert (after.url, after.stable, after.previous) == (before.url, before.stable, before.previous)
    assert {each.number for each in after.revisions if each.paid_since} == named.paid
    assert named.answer() == before.revision(2).revision
    assert named.ended(named.ask(rollback=named.name)).state is RolloutState.PROMOTED
    assert named.answer() == before.revision(1).revision
    assert {rollout.kind for rollout in other.record.rollouts} == {"deploy"}
    assert other.answer() == other.record.revision(1).revision
    other.retire()


def instances(named: Named) -> int:
    """The instances of an endpoint: pods, or what Cloud Run is told to start."""
    if named.kind == "gke":
        return sum("/pods/" in name for name in Clusters(named.user.info).of_endpoint(named.name))
    scaling = named.service().scaling
    assert scaling.scaling_mode == run_v2.ServiceScaling.ScalingMode.MANUAL
    return int(scaling.manual_instance_count)


def test_audit_and_sweep_know_endpoints_by_their_records(named: Named) -> None:
    named.serves()
    assert named.name not in {line["run"] for line in audited()}
    named.destroy()
    assert {"difference": "missing", "run": named.name} in [
        {key: line[key] for key in ("difference", "run")} for line in audited()
    ]
    again = named.serves()
    assert again.url.startswith("http://"), "a service that somebody deleted is made again"
    assert named.answer() == again.revision(2).revision
    rollout = named.ended(named.ask(rollback=named.name))
    assert rollout.state is RolloutState.ROLLED_BACK
    assert rollout.error is not None
    assert "does not exist any more" in rollout.error.message
    assert named.answer() == again.revision(2).revision


def test_a_model_that_differs_never_serves_although_nothing_else_is_left(named: Named) -> None:
    """Somebody deleted the endpoint, so the revision that failed would be the only one that could get requests."""
    named.serves("sealed")
    named.destroy()
    record = named.user.wait(named.put("sealed-otherwise"))
    assert record.error is not None
    assert record.error.error_class == "parity"
    assert named.ended(record.run).state is RolloutState.ROLLED_BACK
    named.user.until(lambda: named.service() is None or named.kind == "gke")
    assert named.serves("sealed").stable == 3
    assert named.answer() == named.record.revision(3).revision


def audited() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(CliRunner().invoke(cli, ["audit", "--json"]).stdout)["differences"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_stack_continues_its_rollouts_and_the_model_before_serves_meanwhile(
    own_stack: Callable[[], User], kind: str
) -> None:
    """Kills in each state of a rollout. The stack restarts; each request is answered by the model before or after."""
    user = own_stack()
    named = Named(user, "survivor", kind)
    serving = named.serves().revision(1)
    for state in (RolloutState.DEPLOYING, RolloutState.CHECKING, RolloutState.SHIFTING):
        run = named.put()
        user.wait(run, RunState.DEPLOYING, RunState.SUCCEEDED)
        named.reached(run, state, RolloutState.SHIFTING)
        kill(user)
        user = own_stack()
        named = Named(user, "survivor", kind)
        answered = named.answer()
        record = user.wait(run)
        assert record.state is RunState.SUCCEEDED, record.error
        promoted = named.record.serving
        assert promoted is not None
        assert promoted.run == run
        assert answered in (serving.revision, promoted.revision)
        assert named.answer() == promoted.revision
        serving = promoted
    assert {rollout.state for rollout in named.record.rollouts} == {RolloutState.PROMOTED}
    user.until(lambda: len(named.revisions()) <= 3)  # pods end a while after their Deployment's deletion began
    named.retire()
    assert named.service() is None


def test_the_commands_change_and_call_a_named_endpoint(named: Named) -> None:
    user = named.user
    serve = {"type": named.kind, "ttl": "1h", "region": "us-central1", "price_usd_per_hour": 2}
    run = user.drop(user.spec(serve=serve))
    assert user.wait(run).state is RunState.SUCCEEDED
    user.publish(OPERATIONS, json.dumps({"cancel": run}).encode())
    assert f"{named.name} answers" not in ran(user, "serve", run, "--as", "latest", fails=True)
    said = ran(user, "serve", run, "--as", named.name)
    assert f"{named.record.base_url} answers with revision 1, as model {named.name}" in said
    (listed,) = [each for each in json.loads(ran(user, "endpoints", "--json")) if each["name"] == named.name]
    assert (listed["base_url"], listed["stable"], listed["state"]) == (named.record.base_url, 1, "SERVING")
    assert named.name in ran(user, "endpoints")
    status = ran(user, "status", run)
    assert f"endpoint {named.name} {named.record.base_url}\n  revision 1 serves\n" in status
    assert f"ask it: `dropforge chat {named.name}`" in status
    (behind,) = json.loads(ran(user, "status", run, "--json"))["named_endpoints"]
    assert (behind["name"], behind["serves"], behind["base_url"]) == (named.name, True, named.record.base_url)
    assert ran(user, "token", named.name).strip() == named.token
    assert named.record.base_url in ran(user, "snippet", named.name)
    assert ran(user, "chat", named.name, "Hello") == "ok\n"
    assert "has no model before the present one" in ran(user, "rollback", named.name, fails=True)
    named.serves(region="us-central1", price_usd_per_hour=2)
    assert "revision 1 is kept for a rollback" in ran(user, "status", run)
    assert "answers with revision 1" in ran(user, "rollback", named.name)
    assert "never expires" in ran(user, "extend", named.name, "never")
    assert "expected a length of time" in ran(user, "extend", named.name, "soon", fails=True)
    assert "of $500/month" in ran(user, "budget", named.name, "500/month")
    (listed,) = [each for each in json.loads(ran(user, "endpoints", "--json")) if each["name"] == named.name]
    assert (listed["budget"]["usd"], listed["budget"]["per"], listed["budget_spent_usd"] < 500) == (500, "month", True)
    assert "such as 50/month" in ran(user, "budget", named.name, "50/week", fails=True)
    assert "has no budget" in ran(user, "budget", named.name, "none")
    assert "is retired" in ran(user, "retire", named.name)
    assert "was retired" in ran(user, "retire", named.name, fails=True)
    assert "there is no endpoint 'unheard-of'" in ran(user, "rollback", "unheard-of", fails=True)
    assert named.name not in ran(user, "endpoints")


def ran(user: User, *arguments: str, fails: bool = False) -> str:
    """What a command prints."""
    result = CliRunner(env={"DROPFORGE_STATE": str(user.state)}).invoke(cli, arguments)
    assert (result.exit_code != 0) is fails, result.output
    return result.output


def test_a_spec_whose_model_cannot_get_behind_its_name_is_refused_before_it_costs_money(named: Named) -> None:
    named.serves(region="us-central1")
    elsewhere = named.user.wait(named.put(region="europe-west4"))
    serve = {"type": named.kind, "endpoint": named.name}
    key = uuid.uuid4().hex
    named.user.publish(REQUESTS, json.dumps(named.user.spec(serve=serve)).encode(), idempotency_key=key)
    foreign = named.user.wait(names.run_id_of_message(key))
    for record, why in ((elsewhere, "its URL would change"), (foreign, "belongs to the specs bucket")):
        assert record.state is RunState.REJECTED
        (problem,) = record.problems
        assert problem["pointer"] == "/serve/endpoint"
        assert why in str(problem["message"])
