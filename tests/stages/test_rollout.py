"""Rollouts by single calls: what the function does in each state, with a platform that answers as the test says."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, Conflict, ErrorClass
from dropforge.endpoints.budget import Budget
from dropforge.endpoints.record import Canary, EndpointRecord, EndpointState, Revision, Rollout, RolloutState
from dropforge.endpoints.shared import Adapter, Base, base_of
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.named import Counted, Reached, RevisionGone, Share
from dropforge.platforms.training import Waits
from dropforge.run.artifacts import MANIFEST, ArtifactFile, Manifest, Source, model_prefix, read_manifest
from dropforge.run.proof import with_proof
from dropforge.run.record import Attempt, Parity, Record, RunState
from dropforge.run.seal import ROWS
from dropforge.spec import parse_spec
from dropforge.stages.answers import Answer, Pending
from dropforge.stages.parity import UNSEALED
from dropforge.stages.rollout import advance as module
from dropforge.stages.rollout.advance import advance

from ..deployments import Memory, context_with, settings_with
from .test_ceiling import document

NOW = datetime(2026, 11, 26, tzinfo=UTC)
HOUR = timedelta(hours=1)
SETTINGS = settings_with(runs_bucket="runs", operations_topic="operations", rollout_workflow="rollout")
OLD, NEW = "old-0123456789ab", "new-0123456789ab"
URL = "https://e.run.app"
SERVE = {"type": "cloud_run", "ttl": "1h", "startup_timeout": "20m", "price_usd_per_hour": 3.0}
BASE = Base(uri="acme/tiny", digest="d", serving={})
CANARY = Canary(percent=20, seconds=1800, max_error_rate=0.01, max_latency_ratio=2.0)
LIMIT = Budget(usd=5.0, per="day", by="me", asked=NOW, began=NOW, before_usd=0.0)
TRANSIENT = CloudError(ErrorClass.TRANSIENT, "try again")
REFUSED = CloudError(ErrorClass.CONFIG, "no")


class Platform:
    """A platform that does at once what it is told, or what `answers` says for a verb. `calls` are the changes."""

    keeps_instances = False
    keeps_revisions = True
    drain = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def drain_seconds(self, cloud: Any) -> int:
        return self.drain

    def deploy(self, cloud: Any, candidate: Any, shares: list[Share], fence: Callable[[], None]) -> Any:
        return self._do("deploy", shares, fence, Reached("df-new", "https://new", URL))

    def find(self, *_: Any) -> Any:
        return self._do("find", None, None, Reached("df-new", "https://new", URL))

    def shift(self, cloud: Any, service: str, shares: list[Share], fence: Callable[[], None]) -> Any:
        return self._do("shift", {share.number: share.percent for share in shares}, fence, True)

    def suspend(self, cloud: Any, service: str, shares: list[Share], fence: Callable[[], None]) -> Any:
        return self._do("suspend", [share.number for share in shares], fence, True)

    def resume(self, cloud: Any, service: str, candidates: list[Any], fence: Callable[[], None]) -> Any:
        return self._do("resume", [each.number for each in candidates], fence, True)

    def is_lost(self, *_: Any) -> Any:
        return self.answers.get("is_lost", False)

    def counted(self, *_: Any) -> Any:
        return self._do("counted", None, None, {})

    def delete(self, cloud: Any, service: str) -> Any:
        return self._do("delete", service, None, True)

    def prune(self, cloud: Any, service: str, kept: set[str], last: int) -> None:
        self._do("prune", kept, None, None)

    def of(self, verb: str) -> list[Any]:
        return [arguments for name, arguments in self.calls if name == verb]

    def _do(self, verb: str, arguments: Any, fence: Callable[[], None] | None, usual: Any) -> Any:
        if fence:
            fence()
        self.calls.append((verb, arguments))
        answer = self.answers.get(verb, usual)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Deployment:
    """An endpoint `e` that serves the model of run OLD, and runs OLD and NEW that have committed models."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.platform, self.storage = NOW, Platform(), Memory()
        self.told: list[str] = []
        self.asked: list[str] = []  # the models of the completions
        self.hears, self.status = True, 200
        place: Any = self.platform
        platforms = Platforms(named=lambda _: place, all=list, owner=lambda _: place, server=lambda _: place)
        endpoint = SimpleNamespace(post=self._complete)
        self.context = context_with(SETTINGS, lambda: self.now, platforms, storage=self.storage, endpoint=endpoint)
        patch.setattr(module, "tell", self._tell)
        for run in (OLD, NEW):
            self.commit(run)

    def commit(
        self,
        run: str,
        *,
        cancelled: bool = False,
        sealed: bool = False,
        state: RunState = RunState.SUCCEEDED,
        **serve: Any,
    ) -> None:
        """A run with a committed model."""
        store = self.context.store
        attempt = Attempt(number=1, placement=0, region="us-central1", started=NOW, deadline=NOW + HOUR, ended=NOW)
        fields = {"name": "model", "source": "s", "created": NOW, "attempts": [attempt.model_dump()]}
        history = [{"state": state, "time": NOW}]
        cancel = NOW if cancelled else None
        record = {"run": run, "state": state, "history": history, "cancel_requested": cancel, **fields}
        spec = parse_spec(json.dumps(document(name="model", serve={**SERVE, **serve})).encode())
        source, files = Source(uri="acme/tiny", revision="r"), [("base/model.safetensors", "b"), ("adapter/a", run)]
        files += [("seal.json", run)] if sealed else []
        listed = [ArtifactFile(path=f"attempt-1/{path}", size=1, sha256=sha, crc32c="") for path, sha in files]
        about: dict[str, Any] = {"spec_sha256": "", "base": source, "dataset": source, "files": listed}
        paths = {"serve_path": "attempt-1/base", "adapter_path": "attempt-1/adapter"}
        manifest = Manifest.model_validate({"run": run, "attempt": 1, "created": NOW, **about, **paths})
        for name, content in (
            (names.spec_object(run), spec.model_dump_json(by_alias=True)),
            (names.record_object(run), store.with_key(Record.model_validate(record)).model_dump_json()),
        ):
            self.storage.objects[name] = (content.encode(), 1)
        path, stored = model_prefix(run) + MANIFEST, json.loads(manifest.model_dump_json(exclude={"proof"}))
        self.storage.objects[path] = (with_proof(store.key(run), path, stored), 1)

    def endpoint(self, state: str = "QUEUED", kind: str = "deploy", *, stable: int = 1, **changes: Any) -> None:
        """The endpoint with a rollout `r` in a state; `r_` changes a field of the rollout, `new_` of its revision."""
        of_rollout = {key[2:]: changes.pop(key) for key in list(changes) if key.startswith("r_")}
        of_new = {key[4:]: changes.pop(key) for key in list(changes) if key.startswith("new_")}
        is_made = state != "QUEUED" and kind in ("deploy", "remove")
        about: dict[str, Any] = {"digest": "d", "who": "me", "requested": NOW, "usd_per_hour": 3.0}
        made = [Revision(number=1, run=OLD, revision="df-1", promoted=NOW, **about)]
        if is_made:
            made.append(Revision(**{"number": 2, "run": NEW, "revision": "df-2", **about, **of_new}))
        number = 0 if state == "QUEUED" else 2 if is_made else stable
        usual = {"revision": number, "started": NOW, "deadline": NOW + HOUR} if state != "QUEUED" else {}
        rollout = {"id": "r", "kind": kind, "who": "me", "requested": NOW, "run": NEW, "state": state, **usual}
        place = {"name": "e", "source": "", "type": "cloud_run", "region": "us-central1", "service": "s"}
        fields = {"revisions": made, "rollouts": [Rollout.model_validate({**rollout, **of_rollout})], "stable": stable}
        record = EndpointRecord.model_validate({**place, "created": NOW, **fields, **changes})
        self.storage.objects[names.endpoint_object("e")] = (record.model_dump_json().encode(), 1)

    @property
    def record(self) -> EndpointRecord:
        return self.context.endpoints.record("e")

    @property
    def rollout(self) -> Rollout:
        return self.record.rollout("r")

    @property
    def why(self) -> str:
        return self.rollout.error.message if self.rollout.error else ""

    def advance(self, execution: str = "e-1") -> Answer:
        return advance(self.context, "e", "r", execution)

    def _complete(self, url: str, json: Any, **_: Any) -> Any:
        self.asked.append(json["model"])
        return SimpleNamespace(status_code=self.status, text="", json=lambda: {"choices": [{"message": {}}]})

    def _tell(self, context: Any, record: EndpointRecord, rollout: Rollout) -> bool:
        self.told.append(rollout.state)
        return self.hears


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(monkeypatch)


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_a_rollout_deploys_compares_and_promotes(deployment: Deployment) -> None:
    deployment.endpoint(expires=NOW + HOUR / 2)
    assert deployment.advance().status == "PROMOTED"
    assert deployment.told == ["DEPLOYING", "PROMOTED"]
    assert deployment.platform.of("shift") == [{2: 100, 1: 0}]
    assert deployment.platform.of("prune") == [{"df-new", "df-1"}]
    assert deployment.asked == ["e"]
    found = deployment.record
    assert (found.stable, found.previous, found.expires) == (2, 1, NOW + HOUR)
    assert found.revision(2).parity == Parity(state="unsealed", reason=UNSEALED)


def test_only_the_owner_advances_a_rollout_and_an_end_that_nobody_heard_is_told_again(deployment: Deployment) -> None:
    deployment.endpoint(r_execution="e-0")
    assert deployment.advance("e-1").status == "SUPERSEDED"
    assert deployment.platform.calls == []
    deployment.hears = False
    assert deployment.advance("e-0").status == "PENDING"
    deployment.hears = True
    assert deployment.advance("e-0").status == "PROMOTED"
    assert deployment.told[-2:] == ["PROMOTED", "PROMOTED"]


@pytest.mark.parametrize(
    ("kind", "state"),
    [("deploy", "DEPLOYING"), ("deploy", "SHIFTING"), ("deploy", "UNDOING"), ("suspend", "SUSPENDING")],
)
def test_a_call_that_was_suspended_changes_nothing(deployment: Deployment, kind: str, state: str) -> None:
    """Another call takes the rollout further before the change of this call."""
    deployment.endpoint(state, kind)
    verb = {"DEPLOYING": "deploy", "SUSPENDING": "suspend"}.get(state, "shift")
    change = getattr(deployment.platform, verb)

    def slow(*arguments: Any) -> Any:
        ended = deployment.rollout.model_copy(update={"state": RolloutState.ROLLED_BACK})
        deployment.context.endpoints.update("e", lambda latest: latest.with_rollout(ended))
        return change(*arguments)

    setattr(deployment.platform, verb, slow)
    with pytest.raises(Conflict, match="rollout r is ROLLED_BACK; this call began when it was"):
        deployment.advance()
    assert deployment.platform.calls == []


ends_of_instances = pytest.mark.parametrize(
    ("verb", "kind", "state"), [("suspend", "suspend", "SUSPENDING"), ("delete", "retire", "RETIRING")]
)


@ends_of_instances
def test_an_end_of_instances_is_tried_until_it_succeeds(
    deployment: Deployment, verb: str, kind: str, state: str
) -> None:
    deployment.endpoint(state, kind, r_deadline=NOW)
    deployment.platform.answers[verb] = REFUSED
    with pytest.raises(CloudError):
        deployment.advance()
    assert deployment.rollout.state == state
    deployment.platform.answers[verb] = True
    deployment.advance()
    assert deployment.rollout.state.is_terminal


@ends_of_instances
def test_the_longer_instances_take_to_end_the_rarer_are_the_looks(
    deployment: Deployment, verb: str, kind: str, state: str
) -> None:
    deployment.endpoint(state, kind, r_started=NOW)
    deployment.platform.answers[verb] = False
    waits = []
    for waited in (0, 3, 30, 600):
        deployment.now = NOW + timedelta(seconds=waited)
        answer = deployment.advance()
        assert isinstance(answer, Pending)
        waits.append(answer.wait_seconds)
    assert waits == [2, 7.5, 7.5, 30]


def test_a_rollout_waits_for_its_turn(deployment: Deployment) -> None:
    deployment.endpoint("CHECKING")
    later = Rollout(id="later", kind="retire", who="me", requested=NOW)
    deployment.context.endpoints.update("e", lambda latest: latest.with_rollout(later))
    waits = []
    for waited in (timedelta(0), timedelta(minutes=10), timedelta(days=2)):
        deployment.now = NOW + waited
        answer = advance(deployment.context, "e", "later", "e-1")
        assert isinstance(answer, Pending)
        waits.append(answer.wait_seconds)
    assert waits == [5, 30, 300]
    assert deployment.platform.calls == []


def test_a_temporary_error_is_tried_until_the_deadline_and_a_refusal_is_undone_at_once(deployment: Deployment) -> None:
    deployment.endpoint("SHIFTING")
    deployment.platform.answers["shift"] = TRANSIENT
    with pytest.raises(CloudError):
        deployment.advance()
    assert deployment.rollout.state is RolloutState.SHIFTING
    deployment.endpoint("DEPLOYING")
    deployment.platform.answers = {"deploy": REFUSED}
    assert deployment.advance().status == "ROLLED_BACK"
    assert (deployment.why, deployment.platform.of("shift")[-1]) == ("no", {1: 100})
    assert deployment.record.revision(1).promoted
    assert deployment.platform.of("delete") == []


def unavailable() -> CloudError:
    return CloudError(ErrorClass.TRANSIENT, "try again", did_nothing=True)


def _ask(deployment: Deployment, answer: CloudError | Waits | bool) -> None:
    """A call of the rollout, whose request for instances the platform answers so; the next call comes a minute later.

    It answers a request for another machine, too.
    """
    deployment.platform.answers = {"deploy": answer, "resume": answer, "is_lost": True}
    with suppress(CloudError):
        deployment.advance()
    deployment.now += timedelta(minutes=1)


def test_a_revision_whose_every_request_was_refused_costs_nothing_and_the_record_says_why(
    deployment: Deployment,
) -> None:
    deployment.endpoint("QUEUED")
    for _ in range(3):
        _ask(deployment, unavailable())
        assert (deployment.record.revision(2).cost(deployment.now), deployment.record.paid) == (0, set())
    assert (deployment.rollout.state, deployment.rollout.wait_reason) == (RolloutState.DEPLOYING, "try again")
    deployment.now += HOUR
    _ask(deployment, unavailable())
    assert (deployment.rollout.state, deployment.record.revision(2).cost(deployment.now)) == (
        RolloutState.ROLLED_BACK,
        0,
    )


@pytest.mark.parametrize(
    ("answers", "minutes"),
    [
        ([TRANSIENT, unavailable()], 2),  # the first request may have had an effect
        ([unavailable(), TRANSIENT, unavailable()], 2),
        ([unavailable(), unavailable(), Waits("it starts")], 1),
    ],
)
def test_a_revision_costs_from_the_request_that_may_have_had_an_effect(
    deployment: Deployment, answers: list[CloudError | Waits], minutes: int
) -> None:
    deployment.endpoint("QUEUED")
    for answer in answers:
        _ask(deployment, answer)
    assert deployment.record.revision(2).cost(deployment.now) == pytest.approx(3 * minutes / 60)


def test_a_machine_that_is_refused_when_the_endpoint_resumes_costs_nothing(deployment: Deployment) -> None:
    deployment.platform.keeps_revisions = False
    deployment.endpoint(kind="resume", suspended=NOW)
    for _ in range(2):
        _ask(deployment, unavailable())
        assert (deployment.rollout.state, deployment.record.cost(deployment.now)) == (RolloutState.CHECKING, 0)
    _ask(deployment, False)
    deployment.now += HOUR
    assert deployment.record.cost(deployment.now) == pytest.approx(3 * 61 / 60)


def test_a_revision_that_runs_costs_money_whatever_is_refused_later(deployment: Deployment) -> None:
    deployment.endpoint("QUEUED")
    deployment.platform.answers["find"] = unavailable()
    with pytest.raises(CloudError):
        deployment.advance()
    assert (deployment.rollout.state, deployment.record.paid) == (RolloutState.CHECKING, {2})


def test_a_rollout_that_cannot_be_undone_ends(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment.endpoint("UNDOING")
    deployment.platform.answers["shift"] = REFUSED
    looks = iter(range(10))  # a rollout that never ends would be looked at for ever
    seen = deployment.context.endpoints.record
    monkeypatch.setattr(deployment.context.endpoints, "record", lambda name: (next(looks), seen(name))[1])
    assert deployment.advance().status == "ROLLED_BACK"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"retired": NOW}, "endpoint e was retired"),
        ({"kind": "resume"}, "endpoint e is not suspended"),
        ({"suspended": NOW}, "endpoint e is suspended"),
        ({"budget": LIMIT.model_copy(update={"before_usd": -6.0})}, "endpoint e has spent its budget of 5 USD a day"),
        ({"kind": "rollback"}, "endpoint e has no model before the present one"),
    ],
)
def test_a_rollout_whose_endpoint_has_changed_since_its_request_begins_nothing(
    deployment: Deployment, changes: dict[str, Any], why: str
) -> None:
    deployment.endpoint(**changes)
    assert deployment.advance().status == "ROLLED_BACK"
    assert why in deployment.why
    assert deployment.platform.calls == []


@pytest.mark.parametrize(("state", "waits"), [("SHIFTING", True), ("CHECKING", False)])
def test_a_revision_that_fails_after_the_move_finishes_the_answers_to_requests_that_have_reached_it(
    deployment: Deployment, state: str, waits: bool
) -> None:
    """Even if nobody has noted that the requests have moved: the reply about it may be lost."""
    deployment.platform.drain = 305
    deployment.endpoint(state, r_deadline=NOW)
    moves = iter([TRANSIENT, True, True])
    shift = deployment.platform.shift
    deployment.status = 503
    deployment.platform.shift = lambda *arguments: _raised(next(moves)) and shift(*arguments)  # type: ignore[method-assign]
    if not waits:
        next(moves)
    answer = deployment.advance()
    assert answer == Pending(wait_seconds=305) if waits else answer.status == "ROLLED_BACK"
    assert bool(deployment.platform.of("prune")) is not waits
    deployment.now += timedelta(seconds=306)
    assert deployment.advance().status == "ROLLED_BACK"
    assert deployment.platform.of("prune") == [{"df-1"}]


def test_a_call_that_is_overtaken_while_it_moves_the_requests_changes_nothing_more(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call has promoted the revision meanwhile, and the next rollout has begun a third one."""
    deployment.endpoint("SHIFTING")
    shift = deployment.platform.shift

    def slow(*arguments: Any) -> Any:
        moved = shift(*arguments)
        promoted = deployment.record.promoted("r", URL, None, NOW)
        third = deployment.record.revision(2).model_copy(update={"number": 3, "revision": "df-3"})
        begun = Rollout(id="next", kind="deploy", who="me", requested=NOW, state=RolloutState.SHIFTING, revision=3)
        later = promoted.model_copy(update={"revisions": [*promoted.revisions, third], "stable": 3}).with_rollout(begun)
        deployment.context.endpoints.update("e", lambda latest: later)
        return moved

    monkeypatch.setattr(deployment.platform, "shift", slow)
    lasts: list[int] = []
    monkeypatch.setattr(deployment.platform, "prune", lambda cloud, service, kept, last: lasts.append(last))
    deployment.advance()
    assert deployment.record.stable == 3
    assert lasts == [2]


def test_an_endpoint_whose_machine_has_ended_is_resumed_though_it_was_not_suspended(deployment: Deployment) -> None:
    deployment.endpoint(kind="resume")
    deployment.platform.answers["is_lost"] = True
    assert deployment.advance().status == "PROMOTED"
    assert deployment.platform.of("resume") == [[1]]


def test_no_requests_reach_a_machine_that_was_started_anew_and_never_answered(deployment: Deployment) -> None:
    """Where the endpoint has no other machine: what was started ends, and costs nothing more."""
    deployment.platform.keeps_revisions = False
    deployment.endpoint("CHECKING", "resume", r_deadline=NOW)
    deployment.context.endpoints.update("e", lambda latest: latest.with_revision(1, lambda each: each.paid(NOW)))
    deployment.status = 503
    assert deployment.advance().status == "ROLLED_BACK"
    assert (deployment.platform.of("shift"), deployment.platform.of("suspend")) == ([], [[]])
    assert (deployment.record.stable, deployment.record.revision(1).paid_since) == (1, None)


def test_the_budget_of_a_spec_is_that_of_its_endpoint_and_needs_a_price(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.commit(NEW, endpoint="e", budget={"usd": 50, "per": "month"})
    deployment.endpoint()
    deployment.advance()
    assert str(deployment.record.budget) == "50 USD a month"
    monkeypatch.setattr(module, "serving_price", lambda _: SimpleNamespace(usd_per_hour=None))
    deployment.endpoint()
    assert deployment.advance().status == "ROLLED_BACK"
    assert "the price of the model's machine is unknown" in deployment.why


def adapter(name: str, run: str = OLD, **changes: Any) -> Adapter:
    return Adapter(**{"name": name, "run": run, "digest": "d", "source": "", "sealed": True, **changes})


def shared(deployment: Deployment, adapters: list[Adapter], kind: str = "remove", **changes: Any) -> None:
    """Let the endpoint serve these adapters of run OLD; rollout `r` takes away model `a`, or adds one."""
    about: dict[str, Any] = {"r_model": "a", "r_run": OLD} if kind == "remove" else {}
    deployment.endpoint(kind=kind, base=BASE, **about, **changes)
    served = deployment.record.revision(1).model_copy(update={"adapters": adapters})
    deployment.context.endpoints.update("e", lambda latest: latest.model_copy(update={"revisions": [served]}))


def test_a_removal_sets_no_budget_and_that_of_the_last_model_retires(deployment: Deployment) -> None:
    deployment.commit(OLD, endpoint="e", budget={"usd": 50, "per": "month"})
    compared = Parity(state="sealed")
    shared(deployment, [adapter("a"), adapter("b", sealed=False, parity=compared)])
    assert deployment.advance().status == "PROMOTED"
    (left,) = deployment.record.adapters
    assert (left.name, left.sealed) == ("b", True)
    assert left.parity == Parity(state="unsealed", reason=UNSEALED), "it is compared again in the new revision"
    assert deployment.record.budget is None
    shared(deployment, [adapter("a")])
    assert deployment.advance().status == "RETIRED"
    assert deployment.record.state is EndpointState.RETIRED
    assert deployment.platform.of("delete") == ["s"]


@pytest.mark.parametrize(("run", "is_own"), [(NEW, True), (OLD, False)])
def test_each_adapter_answers_as_its_seal_before_its_revision_gets_requests(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, run: str, is_own: bool
) -> None:
    rows: list[tuple[str, int]] = []

    def compare(context: Any, of: str, known: Any, url: str, model: str, *rest: Any) -> Any:
        rows.append((model, rest[-1]))
        error = CloudError(ErrorClass.PARITY, "it differs") if of == run else None
        return Parity(state="failed" if error else "sealed", reason=""), error

    monkeypatch.setattr(module, "compare", compare)
    adapters = [adapter("b", run=OLD), adapter("a", run=NEW, sealed=False)]
    deployment.endpoint("CHECKING", new_adapters=[each.model_dump() for each in adapters], base=BASE)
    assert deployment.advance().status == "ROLLED_BACK"
    assert deployment.asked == ["b", "a"]
    assert rows == [("b", 4), ("a", ROWS)][: 2 if is_own else 1]
    error = deployment.rollout.error
    assert error is not None
    assert error.error_class is (ErrorClass.PARITY if is_own else ErrorClass.CODE)


def test_a_revision_that_does_not_answer_gets_no_requests_and_is_given_up_at_the_deadline(
    deployment: Deployment,
) -> None:
    deployment.endpoint("CHECKING")
    deployment.status = 503
    assert deployment.advance().status == "PENDING"
    assert deployment.rollout.wait_reason == "the revision does not answer a completion yet"
    deployment.now += HOUR
    assert deployment.advance().status == "ROLLED_BACK"
    assert "was not ready after 3600 s: a completion was answered with 503" in deployment.why


def test_a_revision_that_the_platform_does_not_start_is_given_up_after_startup_timeout(deployment: Deployment) -> None:
    deployment.endpoint("DEPLOYING")
    deployment.platform.answers["deploy"] = Waits("no capacity")
    deployment.now += timedelta(minutes=19, seconds=50)
    assert deployment.advance() == Pending(wait_seconds=10)  # the next look is not after the end
    deployment.now += timedelta(seconds=10)
    assert deployment.advance().status == "ROLLED_BACK"
    assert "was not ready after 1200 s: no capacity" in deployment.why


def test_a_canary_has_its_share_for_its_time(deployment: Deployment) -> None:
    deployment.endpoint(r_canary=CANARY.model_dump())
    good = Counted(requests=100, errors=0, latency_ms=100.0)
    deployment.platform.answers["counted"] = {"df-new": good, "df-1": good}
    assert deployment.advance().status == "PENDING"
    assert deployment.platform.of("shift")[-1] == {1: 80, 2: 20}
    assert deployment.rollout.watched == NOW
    deployment.now += timedelta(minutes=29)
    assert deployment.advance().status == "PENDING"
    deployment.now += timedelta(minutes=1)
    assert deployment.advance().status == "PROMOTED"
    assert deployment.platform.of("shift")[-1] == {2: 100, 1: 0}


def test_the_first_revision_is_no_canary(deployment: Deployment) -> None:
    deployment.endpoint(stable=0, r_canary=CANARY.model_dump())
    assert deployment.advance().status == "PROMOTED"
    assert deployment.platform.of("shift") == [{2: 100}]


def test_a_revision_is_promoted_only_once_the_platform_reports_its_share(deployment: Deployment) -> None:
    deployment.endpoint("SHIFTING")
    deployment.platform.answers["shift"] = False
    assert deployment.advance().status == "PENDING"
    assert deployment.record.stable == 1


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("deploy", NOW + 5 * HOUR, NOW + 5 * HOUR),
        ("deploy", NOW - HOUR, NOW + HOUR),
        ("deploy", None, None),
        ("rollback", NOW + HOUR / 2, NOW + HOUR / 2),
    ],
)
def test_a_new_model_extends_the_life_of_its_endpoint_and_never_shortens_it(
    deployment: Deployment, kind: str, before: datetime | None, after: datetime | None
) -> None:
    deployment.endpoint("SHIFTING", kind, expires=before)
    assert deployment.advance().status == "PROMOTED"
    assert deployment.record.expires == after


@pytest.mark.parametrize(
    ("left", "is_deleted"), [({"r"}, True), (set(), True), ({"r", "another"}, False), (None, False)]
)
def test_only_a_service_that_the_rollout_made_itself_is_deleted(
    deployment: Deployment, left: set[str] | None, is_deleted: bool
) -> None:
    """Somebody has deleted the revision that is to serve again, perhaps with the whole endpoint."""
    deployment.endpoint("UNDOING")
    deployment.platform.answers["shift"] = RevisionGone("df-1 does not exist any more", left=left)
    assert deployment.advance().status == "ROLLED_BACK"
    assert deployment.platform.of("delete") == (["s"] if is_deleted else [])


@pytest.mark.parametrize(
    ("rollout", "state", "ends"),
    [
        ("own", RunState.DEPLOYING, "ROLLED_BACK"),
        ("own", RunState.SUCCEEDED, "PROMOTED"),
        ("later", RunState.DEPLOYING, "PROMOTED"),
    ],
)
def test_the_cancel_of_a_run_ends_the_rollout_that_it_has_begun(
    deployment: Deployment, rollout: str, state: RunState, ends: str
) -> None:
    deployment.commit(NEW, cancelled=True, state=state)
    id_ = NEW if rollout == "own" else "later"
    deployment.endpoint(r_id=id_)
    assert advance(deployment.context, "e", id_, "e-1").status == ends


def test_a_suspended_endpoint_has_a_tag_for_nothing_but_what_serves_and_resumes_with_instances(
    deployment: Deployment,
) -> None:
    deployment.endpoint("SUSPENDING", "suspend", previous=2)
    assert deployment.advance().status == "SUSPENDED"
    assert deployment.platform.of("suspend") == [[1]]
    deployment.endpoint("CHECKING", "resume")
    deployment.platform.answers["resume"] = False
    assert deployment.advance().status == "PENDING"
    deployment.platform.answers["resume"] = True
    assert deployment.advance().status == "PROMOTED"
    assert deployment.platform.of("resume") == [[1], [1]]


@pytest.mark.parametrize(
    ("served", "base", "why"),
    [
        ([], BASE, "its base is acme/tiny"),
        ([adapter("model", source="requests-team")], None, "the name 'model' is taken by run"),
    ],
)
def test_an_adapter_that_does_not_fit_any_more_is_not_added(
    deployment: Deployment, served: list[Adapter], base: Base | None, why: str
) -> None:
    deployment.commit(NEW, sealed=True)
    spec, manifest = deployment.context.store.spec(OLD), read_manifest(deployment.storage, "runs", OLD)
    assert spec.serve is not None
    assert manifest is not None
    shared(deployment, served, kind="deploy")
    fits = base or base_of(manifest, spec.serve)
    deployment.context.endpoints.update("e", lambda latest: latest.model_copy(update={"base": fits}))
    assert deployment.advance().status == "ROLLED_BACK"
    assert why in deployment.why


@pytest.mark.parametrize("damaged", ["seal", "manifest", "record"])
def test_a_model_that_cannot_be_read_ends_its_rollout_and_not_the_endpoint(
    deployment: Deployment, damaged: str
) -> None:
    """Its own container could have damaged it. A rollout that never ended would keep all later ones waiting."""
    deployment.commit(NEW, sealed=True)  # the object of the seal does not exist
    deployment.endpoint()
    name = {"manifest": model_prefix(NEW) + MANIFEST, "record": names.record_object(NEW)}
    if damaged in name:
        proved = with_proof(deployment.context.store.key(NEW), name[damaged], {})
        deployment.storage.objects[name[damaged]] = (proved, 1)
    assert deployment.advance().status == "ROLLED_BACK"
    assert damaged in deployment.why
    assert deployment.record.current is None
