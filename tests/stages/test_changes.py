"""Messages that change a named endpoint, and what the sweep does for it, by single calls."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, Malformed
from dropforge.cloud.listing import Listed
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.run.artifacts import MANIFEST, model_prefix
from dropforge.run.events import Request
from dropforge.run.record import Notice, RunError
from dropforge.stages.rollout import messages, requests, telling
from dropforge.stages.rollout.messages import change_endpoint
from dropforge.stages.rollout.telling import TRIED_FOR, notice_of, tell
from dropforge.stages.rollout.trial import check_change
from dropforge.stages.sweep import named
from dropforge.stages.sweep.named import tend

from .test_rollout import BASE, CANARY, HOUR, LIMIT, NEW, NOW, OLD, SETTINGS, Deployment, adapter

OPERATORS, TEAM = "operations", "requests-team"
SERVICE = f"projects/p/locations/us-central1/services/{names.named_endpoint('e')}"
SPENT = LIMIT.model_copy(update={"before_usd": -6.0})


class Changes(Deployment):
    """The deployment of test_rollout.py, whose rollouts do not begin, and which keeps its answers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.begun: list[str] = []
        self.deleted: list[str] = []
        self.is_gone = False  # what a deletion answers
        self.answers: list[str] = []
        self.problem = ""
        self.live: str | None = None  # the execution of the rollout that lives, though no record names it yet
        for module in (requests, named):
            patch.setattr(module, "start_rollout", lambda cloud, endpoint, rollout: self.begun.append(rollout))
            patch.setattr(module, "find_rollout", lambda cloud, endpoint, rollout, since: self.live)
        patch.setattr(messages, "answer_refused", self._answer)
        place: Any = self.platform
        place.region = lambda _: "us-central1"
        place.service_name = lambda *_: "s"
        place.why_whole = lambda _: ""
        place.teardown = self._delete

    def change(self, change: str, arguments: Any, topic: str = OPERATORS, key: str = "k") -> str:
        """Change the endpoint by a message; why it was refused, or "". A trial before says the same."""
        known, expected = len(self.answers), self.tried(change, arguments, topic)
        change_endpoint(self.context, {change: arguments}, Request(topic, key, f"m-{key}"))
        refused = "".join(self.answers[known:])
        assert self.problem or refused == expected
        return refused

    def tried(self, change: str, arguments: Any, topic: str) -> str:
        """Why a message would be refused, or ""."""
        before, begun = dict(self.storage.objects), list(self.begun)
        try:
            check_change(self.context, {change: arguments}, topic)
        except requests.Refused as refused:
            return f"{change}: {refused.message}"
        finally:
            assert (self.storage.objects, self.begun) == (before, begun), "a trial changes nothing"
        return ""

    def serve(self, endpoint: str = "e", run: str = NEW, key: str = "k", **about: Any) -> str:
        return self.change("serve", {"run": run, "endpoint": endpoint, **about}, key=key)

    def at_rest(self, **changes: Any) -> None:
        """The endpoint without a rollout."""
        self.endpoint(**changes)
        self.context.endpoints.update("e", lambda latest: latest.model_copy(update={"rollouts": []}))

    def tend(self, *listed: Listed) -> str:
        return tend(self.context, "e", listed, self.now)

    def _delete(self, cloud: Any, kind: str, name: str) -> bool:
        self.deleted.append(name)
        return self.is_gone

    def _answer(self, context: Any, rollout: str, request: Request, text: str, hint: str) -> str:
        if not self.problem:
            self.answers.append(text)
        return self.problem


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Changes:
    return Changes(monkeypatch)


def test_a_request_is_carried_out_once_and_started_again_if_its_execution_never_began(deployment: Changes) -> None:
    deployment.at_rest()
    assert deployment.serve() == ""
    asked = [each.id for each in deployment.record.rollouts]
    deployment.serve()
    assert [each.id for each in deployment.record.rollouts] == asked == deployment.begun
    deployment.now += requests.START_WITHIN
    deployment.live = "e-1"
    deployment.serve()
    assert deployment.begun == asked, "its execution waits for its turn"
    deployment.live = None
    deployment.serve()
    assert deployment.begun == asked * 2
    assert [each.id for each in deployment.record.rollouts] == asked


def test_a_model_that_serves_already_is_served_again_only_if_the_message_says_so(deployment: Changes) -> None:
    deployment.at_rest()
    before = deployment.record
    assert "serves this model already, as revision 1: nothing was changed" in deployment.serve(run=OLD)
    assert (deployment.record, deployment.begun) == (before, [])
    assert deployment.serve(run=OLD, key="again", again=True) == ""
    assert [each.run for each in deployment.record.rollouts] == [OLD]
    deployment.endpoint("DEPLOYING")
    assert deployment.serve(run=OLD, key="later") == "", "another model is about to serve"
    shared = [adapter("a", run=OLD), adapter("b", run=NEW)]
    deployment.at_rest()
    deployment.context.endpoints.update(
        "e", lambda r: r.with_revision(1, lambda each: each.model_copy(update={"adapters": shared}))
    )
    assert "serves this model already" in deployment.serve(run=NEW, key="shared")


def test_a_request_that_is_delivered_after_its_model_serves_is_not_refused(deployment: Changes) -> None:
    deployment.at_rest()
    assert deployment.serve(key="k") == ""
    promoted = deployment.record.rollouts[0].model_copy(update={"state": RolloutState.PROMOTED, "ended": NOW})
    deployment.endpoint("SHIFTING", stable=2)
    deployment.context.endpoints.update("e", lambda latest: latest.model_copy(update={"rollouts": [promoted]}))
    change_endpoint(deployment.context, {"serve": {"run": NEW, "endpoint": "e"}}, Request(OPERATORS, "k", "m-k"))
    assert deployment.answers == []


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        ("serve", {"run": NEW, "endpoint": "e"}),
        ("rollback", "e"),
        ("retire", "e"),
        ("extend", {"endpoint": "e", "ttl": "7d"}),
        ("budget", {"endpoint": "e", "usd": 5, "per": "day"}),
    ],
)
def test_a_topic_changes_only_its_own_endpoints_and_nothing_changes_a_retired_one(
    deployment: Changes, change: str, arguments: Any
) -> None:
    deployment.at_rest(previous=1)
    before = deployment.record
    assert "there is no run" in (refused := deployment.change(change, arguments, TEAM)) or "belongs to" in refused
    assert deployment.record == before
    assert deployment.change(change, arguments, OPERATORS) == ""
    assert deployment.record != before
    deployment.at_rest(previous=1, retired=NOW)
    assert "was retired at" in deployment.change(change, arguments, key="again")
    assert deployment.record.rollouts == []


def test_a_topic_serves_only_its_own_runs(deployment: Changes) -> None:
    deployment.at_rest(source=TEAM)
    assert "there is no run" in deployment.change("serve", {"run": NEW, "endpoint": "e"}, TEAM)
    assert deployment.record.rollouts == []


def test_only_a_model_that_may_be_served_gets_behind_a_name(deployment: Changes) -> None:
    deployment.at_rest()
    wrong = RunError(error_class=ErrorClass.GATE, message="the gate was missed")
    deployment.context.store.update(NEW, lambda latest: latest.model_copy(update={"error": wrong}))
    assert "the gate was missed" in deployment.serve()
    deployment.context.store.update(NEW, lambda latest: latest.model_copy(update={"error": None}))
    del deployment.storage.objects[model_prefix(NEW) + MANIFEST]
    assert "has no committed model" in deployment.serve()
    assert deployment.record.rollouts == []


def test_the_url_of_an_endpoint_stays(deployment: Changes) -> None:
    platform: Any = deployment.platform
    deployment.at_rest()
    platform.region = lambda _: "europe-west4"
    assert "its URL would change" in deployment.serve()
    platform.region = lambda _: "us-central1"
    platform.service_name = lambda *_: "another"
    assert "its URL would change" in deployment.serve()
    assert deployment.record.rollouts == []


def test_an_endpoint_keeps_its_service_and_has_a_canary_only_if_that_gives_shares(deployment: Changes) -> None:
    """A platform may make another kind of service for new names; the URL of an endpoint stays."""
    platform: Any = deployment.platform
    platform.service_name = lambda _, existing="": existing or "new"
    platform.why_whole = lambda service: "" if service == "new" else "it is whole"
    deployment.at_rest()
    kept = deployment.record.service
    canary = {"percent": 5, "for": "1h"}
    assert deployment.serve(canary=canary) == "serve: it is whole"
    assert deployment.record.rollouts == []
    assert deployment.serve() == ""
    assert deployment.record.service == kept
    assert deployment.serve("another", canary=canary, key="2") == ""
    assert deployment.context.endpoints.record("another").service == "new"


@pytest.mark.parametrize(
    ("endpoint", "about", "why"),
    [
        ("No Name", {}, "is not the name of an endpoint"),
        ("e", {"canary": {"percent": 0, "for": "1h"}}, "canary/percent"),
    ],
)
def test_what_no_message_may_ask_for_is_answered(
    deployment: Changes, endpoint: str, about: dict[str, Any], why: str
) -> None:
    deployment.at_rest()
    assert why in deployment.serve(endpoint, **about)
    assert deployment.record.rollouts == []


def test_a_refusal_that_nobody_heard_is_delivered_again(deployment: Changes) -> None:
    deployment.problem = "the topic does not answer"
    with pytest.raises(CloudError, match="the topic does not answer"):
        deployment.change("retire", "none-of-that-name")


def test_without_the_workflow_of_rollouts_a_change_is_refused(deployment: Changes) -> None:
    deployment.at_rest()
    settings = replace(SETTINGS, rollout_workflow="")
    deployment.context = replace(deployment.context, cloud=replace(deployment.context.cloud, settings=settings))
    assert "no workflow for rollouts" in deployment.serve()
    assert deployment.record.rollouts == []


def test_a_shared_endpoint_has_no_canary(deployment: Changes) -> None:
    deployment.commit(NEW, share=True)
    deployment.at_rest()
    assert "a shared endpoint has no canary" in deployment.serve(canary={"percent": 5, "for": "1h"})


def test_a_rollback_needs_a_model_before_and_money_and_ends_a_canary(deployment: Changes) -> None:
    deployment.at_rest()
    assert "has no model before the present one" in deployment.change("rollback", "e")
    deployment.at_rest(previous=1, budget=SPENT)
    assert "has spent its budget" in deployment.change("rollback", "e")
    deployment.endpoint("WATCHING", previous=1, r_canary=CANARY.model_dump(), r_watched=NOW)
    assert deployment.change("rollback", "e") == ""
    canary, asked = deployment.record.rollouts
    assert (canary.state, asked.ends, deployment.record.back(asked)) == (RolloutState.UNDOING, "r", 1)


def test_a_platform_that_keeps_no_machine_takes_no_rollback(deployment: Changes) -> None:
    deployment.at_rest(previous=1)
    deployment.platform.keeps_revisions = False
    assert "keeps no machine for a rollback" in deployment.change("rollback", "e")
    assert deployment.record.rollouts == []


def test_a_budget_needs_prices_and_resumes_only_what_it_can_pay(deployment: Changes) -> None:
    deployment.at_rest(budget=SPENT, suspended=NOW)
    assert deployment.change("budget", {"endpoint": "e", "usd": 6, "per": "day"}, key="1") == ""
    assert deployment.record.rollouts == []
    assert deployment.change("budget", {"endpoint": "e", "usd": 7, "per": "day"}, key="2") == ""
    assert [each.kind for each in deployment.record.rollouts] == ["resume"]
    deployment.endpoint(kind="suspend", budget=SPENT)  # it waits, and is not done
    assert deployment.change("budget", {"endpoint": "e", "usd": 7, "per": "day"}, key="3") == ""
    assert [each.kind for each in deployment.record.rollouts] == ["suspend", "resume"]
    unpriced = deployment.record.revision(1).model_copy(update={"usd_per_hour": None})
    deployment.at_rest()
    deployment.context.endpoints.update("e", lambda latest: latest.with_revision(1, lambda _: unpriced))
    refused = deployment.change("budget", {"endpoint": "e", "usd": 5, "per": "day"}, key="4")
    assert "a price is unknown" in refused


def test_a_suspended_endpoint_gets_no_model_until_it_is_resumed(deployment: Changes) -> None:
    deployment.at_rest(suspended=NOW, budget=LIMIT)
    assert "is suspended" in deployment.serve()


def test_a_suspension_ends_the_rollout_under_way_and_leaves_an_endpoint_with_money(deployment: Changes) -> None:
    deployment.endpoint("CHECKING", budget=SPENT)
    before = deployment.record
    requests.suspend(deployment.context, before, "s-1", "the sweep")
    requests.suspend(deployment.context, before, "s-2", "the sweep")
    assert [(each.id, each.state) for each in deployment.record.rollouts] == [("r", "UNDOING"), ("s-1", "QUEUED")]
    deployment.at_rest(budget=LIMIT)  # somebody has raised it since the sweep has looked
    requests.suspend(deployment.context, before, "s-3", "the sweep")
    assert deployment.record.rollouts == []


def test_the_sweep_suspends_warns_and_resumes(deployment: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(named, "warn_of_budget", lambda context, record: warned.append(record.name))
    deployment.at_rest(budget=LIMIT.model_copy(update={"before_usd": -4.5}))
    assert deployment.tend() == ""
    assert warned == ["e"]
    deployment.at_rest(budget=SPENT)
    deployment.tend()
    assert [each.kind for each in deployment.record.rollouts] == ["suspend"]
    deployment.at_rest(budget=SPENT, suspended=NOW)
    deployment.tend()
    assert deployment.record.rollouts == []
    deployment.now += timedelta(days=1)
    deployment.tend()
    assert [each.kind for each in deployment.record.rollouts] == ["resume"]
    deployment.at_rest(budget=SPENT, suspended=NOW, expires=deployment.now)
    deployment.tend()
    assert [each.kind for each in deployment.record.rollouts] == ["retire"]
    assert len(warned) == 1


def test_the_sweep_gives_a_rollout_another_execution_only_if_its_own_has_ended(
    deployment: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named, "live_executions", lambda cloud, workflow: {"e-1"} if "rollout" in workflow else set())
    deployment.endpoint()
    assert deployment.tend() == "", "its first execution begins"
    deployment.endpoint("CHECKING", r_execution="e-1")
    assert deployment.tend() == ""
    assert deployment.begun == []
    deployment.endpoint("CHECKING", r_execution="e-0")
    deployment.live = "e-2"
    assert deployment.tend() == ""
    assert deployment.begun == [], "its next execution waits for its turn"
    deployment.endpoint("CHECKING", r_execution="e-0")
    deployment.live = None
    assert deployment.tend() == "r"
    assert (deployment.rollout.execution, deployment.rollout.superseded) == (None, ["e-0"])
    assert deployment.begun == ["r"]


def test_the_sweep_replaces_a_machine_that_has_ended_and_tries_again_an_hour_after_a_failure(
    deployment: Changes,
) -> None:
    deployment.at_rest()
    assert deployment.tend() == ""
    deployment.platform.answers["is_lost"] = True
    begun = deployment.tend()
    (asked,) = deployment.record.rollouts
    assert (asked.id, asked.kind) == (begun, "resume")
    assert deployment.tend() == "", "it has begun"
    failed = asked.entered(RolloutState.ROLLED_BACK, NOW)
    deployment.context.endpoints.update("e", lambda latest: latest.with_rollout(failed))
    deployment.now += named.RESTORES_AFTER - timedelta(seconds=1)
    assert deployment.tend() == ""
    deployment.now += timedelta(seconds=2)
    assert deployment.tend() not in ("", begun)
    deployment.at_rest(suspended=NOW, budget=SPENT)
    assert deployment.tend() == ""
    assert deployment.record.rollouts == []


def test_the_sweep_replaces_no_machine_of_an_endpoint_that_has_changed_meanwhile(deployment: Changes) -> None:
    deployment.at_rest()
    before = deployment.record
    for changed in ({"suspended": NOW}, {"stable": 0}):
        deployment.at_rest(**changed)
        requests.restore(deployment.context, before, "s-1", "the sweep")
        assert deployment.record.rollouts == []
    deployment.endpoint()
    requests.restore(deployment.context, before, "s-1", "the sweep")
    assert [each.id for each in deployment.record.rollouts] == ["r"]


def test_the_sweep_deletes_what_is_left_of_a_suspended_endpoint_that_keeps_nothing(deployment: Changes) -> None:
    left = Listed("tpu.googleapis.com/Node", "nodes/df-r1-e", {}, NOW)
    deployment.at_rest(suspended=NOW, budget=SPENT)
    deployment.tend(left)
    assert deployment.deleted == []
    deployment.platform.keeps_revisions = False
    listed = (left, left._replace(name="rrsets/e.other.zone./A"), left._replace(name="s"))
    deployment.tend(*listed)
    assert deployment.deleted == ["s"], "no machine ends before its name is gone"
    deployment.is_gone = True
    deployment.tend(*listed)
    assert deployment.deleted[1:] == ["s", left.name], "people may have records of their own in the zone"


def test_the_sweep_deletes_the_name_of_an_endpoint_that_serves_nothing_and_no_other_name(deployment: Changes) -> None:
    """A record of Cloud DNS tells no time, and people may have records of their own in the zone."""
    name = Listed("dns.googleapis.com/ResourceRecordSet", "s", {})
    deployment.tend(name)
    assert deployment.deleted == [], "no endpoint has ever had this name"
    deployment.at_rest(stable=0)
    deployment.tend(name._replace(name="other"))
    assert deployment.deleted == []
    deployment.tend(name)
    assert deployment.deleted == ["s"]


def test_a_suspended_endpoint_loses_no_model(deployment: Changes) -> None:
    """Its other models would need a new revision with instances: the removal would be refused, and the sweep fail."""
    deployment.at_rest(suspended=NOW, budget=SPENT, base=BASE)
    served = [adapter("a", expires=NOW), adapter("b")]
    deployment.context.endpoints.update(
        "e", lambda r: r.with_revision(1, lambda each: each.model_copy(update={"adapters": served}))
    )
    assert deployment.tend() == ""


def test_the_sweep_deletes_only_an_old_service_with_the_name_of_the_endpoint(deployment: Changes) -> None:
    def service(name: str, age: timedelta) -> Listed:
        return Listed("run.googleapis.com/Service", name, {}, NOW - age)

    assert deployment.tend(service(SERVICE, timedelta(seconds=10))) == ""
    assert deployment.deleted == []
    with pytest.raises(CloudError, match="its label says endpoint e, its name does not"):
        deployment.tend(service(f"{SERVICE}-other", HOUR))
    assert deployment.deleted == []
    deployment.tend(service(SERVICE, HOUR))
    assert deployment.deleted == [SERVICE]


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_notice_is_sent_until_somebody_hears_it_or_for_two_minutes(
    deployment: Changes, monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    heard: list[Notice] = []

    def warn(context: Any, record: Any, spec: Any, notice: Notice) -> Any:
        heard.append(notice)
        return SimpleNamespace(notices=[notice.key] if is_heard else [])

    monkeypatch.setattr(telling, "warn", warn)
    deployment.endpoint("PROMOTED", r_ended=NOW)
    record, rollout = deployment.record, deployment.rollout
    assert tell(deployment.context, record, rollout) is is_heard
    deployment.now += TRIED_FOR + timedelta(seconds=1)
    assert tell(deployment.context, record, rollout)
    nothing = record.model_copy(update={"revisions": []})
    assert tell(deployment.context, nothing, rollout.model_copy(update={"revision": 0, "ended": NOW})), "it is not told"
    deployment.at_rest(budget=LIMIT.model_copy(update={"before_usd": -4.5}))
    telling.warn_of_budget(deployment.context, deployment.record)
    budget = deployment.record.budget
    assert budget is not None
    assert budget.warned is is_heard
    assert heard[0] == notice_of(record, rollout, NOW)


def test_the_record_of_another_endpoint_is_not_believed(deployment: Changes) -> None:
    deployment.at_rest()
    deployment.storage.objects[names.endpoint_object("f")] = deployment.storage.objects[names.endpoint_object("e")]
    with pytest.raises(Malformed, match="is the record of endpoint 'e'"):
        deployment.context.endpoints.record("f")


def test_a_model_that_fits_no_endpoint_leaves_no_record(deployment: Changes) -> None:
    deployment.commit(NEW, sealed=True, share=True)
    assert "is the name of the endpoint" in deployment.serve("model")
    assert deployment.context.endpoints.find("model") is None


def test_a_change_of_a_record_is_made_again_after_a_lost_race(deployment: Changes) -> None:
    deployment.at_rest()
    tries: list[EndpointRecord] = []

    def change(latest: EndpointRecord) -> EndpointRecord:
        if not tries:
            tries.append(latest)
            deployment.context.endpoints.update("e", lambda r: r.with_expiry(NOW))
        return latest.with_rollout(Rollout(id="x", kind="retire", who="me", requested=NOW))

    found = deployment.context.endpoints.update("e", change)
    assert (found.expires, [each.id for each in found.rollouts]) == (NOW, ["x"])
