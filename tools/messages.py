"""An example of every kind of message and run event, for docs/messages.md, made by the functions that write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from dropforge.base.changes import evolve
from dropforge.base.errors import ErrorClass
from dropforge.base.settings import Settings
from dropforge.endpoints.budget import Budget
from dropforge.endpoints.record import Canary, EndpointRecord, Revision, Rollout, RolloutState
from dropforge.money.limits import due, due_of_budget
from dropforge.run.events import Request, RunEvent, run_event_message
from dropforge.run.record import About, Attempt, Endpoint, Notice, Parity, Record, RunError, RunState, Transition
from dropforge.spec import JobSpec
from dropforge.stages.rollout.telling import budget_notice, notice_of
from dropforge.tell import notices
from dropforge.tell.news import notice_news, state_news
from dropforge.tell.run_events import answer_ignored, answer_refused, answer_unknown, notice_event, state_event

RUN, NOW = "my-job-0123456789ab", datetime(2026, 11, 24, 9, 0, tzinfo=UTC)
SETTINGS = replace(
    Settings(**{field.name: "x" for field in fields(Settings) if field.default is MISSING}),  # type: ignore[arg-type]
    project="my-project",
    runs_bucket="my-project-dropforge-runs",
    console_url="https://console.example.com",
)
SPEC = JobSpec.model_validate(
    {
        "api_version": "dropforge/v1",
        "name": "gemma-text-to-sql",
        "model": {"source": "google/gemma-2b"},
        "dataset": {"source": "b-mc2/sql-create-context"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": {"type": "cloud_run"},
        "limits": {"max_cost_usd": 20, "max_duration": "2h"},
    }
)
ENDPOINT = Endpoint(
    url="https://df-my-job-0123456789ab-serve-abc-uc.a.run.app",
    model=SPEC.name,
    service="projects/my-project/locations/us-central1/services/df-my-job-0123456789ab-serve",
    region="us-central1",
    ready=NOW + timedelta(minutes=52),
    expires=NOW + timedelta(minutes=52, days=1),
)
METRICS: dict[str, float | None] = {"exact_match": 0.81, "exact_match_before": 0.12, "rows_eval": 150}
_PATH = [(RunState.ACCEPTED, 0), (RunState.PROVISIONING, 1), (RunState.TRAINING, 3)]
_SERVED = [*_PATH, (RunState.DEPLOYING, 48), (RunState.TEARING_DOWN, 52), (RunState.SUCCEEDED, 53)]


def text() -> str:
    """Every kind: the states of a run, the answers to requests, the notices."""
    return "\n".join(part for kind in (states, answers, told) for part in kind())


def states() -> Iterator[str]:
    """Each state with its message, if people get one, and its run event."""
    yield "## The states of a run\n"
    for record in records():
        yield f"### {record.state}\n"
        now = record.history[-1].time
        if news := state_news(record, SPEC, SETTINGS, now):
            yield _block("text", str(news))
        yield _event(state_event(record, record.state, SETTINGS, now))


def records() -> Iterator[Record]:
    """A record in each state, as a run enters it."""
    for length in range(1, len(_SERVED) + 1):
        yield record_of(_SERVED[:length])
    refused = RunError(error_class=ErrorClass.STOCKOUT, message="no L4 is left in us-central1")
    yield record_of([*_PATH, (RunState.TEARING_DOWN, 4), (RunState.FAILED, 5)], error=refused)
    wish = RunError(error_class=ErrorClass.CANCELLED, message="cancelled while it trained")
    path = [*_PATH, (RunState.TEARING_DOWN, 20), (RunState.CANCELLED, 21)]
    yield record_of(path, error=wish, cancel_requested=NOW, cancel_cause="sam@example.com in the console")
    problem = {"pointer": "/training/epochs", "message": "out of range", "found": "0", "expected": "more than 0"}
    yield record_of([(RunState.REJECTED, 0)], problems=[problem])


def record_of(path: list[tuple[RunState, int]], **changes: Any) -> Record:
    """The record of a run that entered these states, each so many minutes after its acceptance."""
    entered = {state: NOW + timedelta(minutes=minutes) for state, minutes in path}
    trained = entered.get(RunState.DEPLOYING) or entered.get(RunState.TEARING_DOWN)
    attempt = Attempt(
        number=1,
        placement=0,
        region="us-central1",
        started=entered.get(RunState.PROVISIONING, NOW),
        deadline=NOW + timedelta(hours=2),
        usd_per_hour=0.71,
        running=entered.get(RunState.TRAINING),
        ended=trained,
    )
    has_attempt = RunState.PROVISIONING in entered
    history = [
        Transition(state=state, time=time, attempt=int(has_attempt and state is not RunState.ACCEPTED))
        for state, time in entered.items()
    ]
    served: dict[str, Any] = {}
    if RunState.DEPLOYING in entered:
        served = {"serving_usd_per_hour": 0.71, "metrics": METRICS}
    if RunState.SUCCEEDED in entered:
        served |= {"endpoint": ENDPOINT, "parity": Parity(state="sealed")}
    fields_ = {
        "name": SPEC.name,
        "source": "gs://my-project-dropforge-specs/specs/my-job.json#1764000000000000",
        "created": NOW,
        "about": None if path[0][0] is RunState.REJECTED else About(target="cloud_run", model="m", most_usd=18.5),
        "attempts": [attempt] if has_attempt else [],
        **served,
        **changes,
    }
    return Record(run=RUN, state=path[-1][0], history=history, **fields_)


def answers() -> Iterator[str]:
    """The run events that answer requests which change nothing."""
    yield "## Answers to requests that change nothing\n"
    sent: list[str] = []

    def publish(topic: str, data: bytes, **_: Any) -> Any:
        sent.append(data.decode())
        return SimpleNamespace(result=lambda timeout: "id")

    clients = SimpleNamespace(publisher=lambda: SimpleNamespace(publish=publish))
    cloud, asked = SimpleNamespace(clients=clients), Request("dropforge-requests", "key", "1234567890")
    context: Any = SimpleNamespace(settings=SETTINGS, now=lambda: NOW, published=set[str](), cloud=cloud)
    unknown = "cancel is 'my-job'; expected the id of a run, such as my-job-0123456789ab. Nothing was cancelled"
    answer_unknown(context, "message-0123456789ab", asked, unknown, [RUN])
    refusal = "endpoint 'prod' does not exist"
    answer_refused(context, "rollout-0123456789ab", asked, refusal, "`dropforge endpoints` lists the endpoints")
    uri = "gs://my-project-dropforge-specs/specs/my-job.yaml"
    answer_ignored(context, RUN, uri, f"{uri} started nothing: its name ends in .yaml; a job spec is a JSON document")
    yield from (_block("json", event) for event in sent)


def told() -> Iterator[str]:
    """Each notice as its message, and the run event of the first."""
    yield "## Notices\n"
    for number, (record, notice, now) in enumerate([*of_runs(), *of_endpoints()]):
        yield _block("text", str(notice_news(record, notice, SETTINGS, now)))
        if number == 0:
            yield _event(notice_event(record, notice, SETTINGS, now))


def of_runs() -> Iterator[tuple[Record, Notice, datetime]]:
    """The notices about runs, each with its record and its time."""
    accepted, waiting, training, served = (record_of(path) for path in (_PATH[:1], _PATH[:2], _PATH, _SERVED))
    late = NOW + timedelta(minutes=100)
    yield from ((training, notice, late) for notice in due(training, SPEC, late))
    dear = evolve(SPEC.limits, max_cost_usd=2.0)
    budget = evolve(SPEC, limits=dear)
    for record, hours in ((training, 1.5), (served, 1.5)):
        now = NOW + timedelta(hours=hours)
        yield from ((record, notice, now) for notice in due_of_budget(record, budget, now))
    soon = NOW + timedelta(minutes=12)
    yield accepted, notices.queued("max_runs", 3, "it starts when enough earlier runs have ended"), soon
    yield accepted, notices.joined("gs://my-project-dropforge-specs/specs/my-job.json#2", RUN), soon
    reason = "The zone us-central1-a does not have enough resources available to fulfill the request"
    yield waiting, notices.waits(evolve(waiting.attempts[0], wait_reason=reason)), soon
    silent = "attempt 1 is stuck: no progress since step 40, for 30 min. The cloud reports that it runs"
    yield training, notices.stuck(1, silent, "Another attempt resumes from the last checkpoint"), late
    for notice in (
        notices.not_finite({"perplexity": float("inf")}),
        notices.truncated({"rows_truncated": 40, "rows_train": 900}, 512),
        notices.dated(NOW.date()),
        notices.beyond({"answers_beyond": 12, "max_new_tokens": 128}),
        notices.unused(["system", "source"]),
    ):
        if notice is not None:
            yield training, notice, late
    end = ENDPOINT.expires
    gone = evolve(served, endpoint=evolve(ENDPOINT, ended=end))
    yield served, notices.endpoint_lost(served, ENDPOINT, late), late
    yield gone, notices.endpoint_ended(gone, ENDPOINT, "its ttl of 24h is over", end), end


def of_endpoints() -> Iterator[tuple[Record, Notice, datetime]]:
    """The notices about named endpoints, each with the record of the run whose model it is about, and its time."""
    now, served = NOW + timedelta(hours=2), record_of(_SERVED)
    served = evolve(served, endpoint=None)
    revision = Revision(
        number=2, run=RUN, digest="d", who="w", requested=NOW, usd_per_hour=0.71, paid_since=NOW, spent_usd=0.0
    )
    former = evolve(revision, number=1, paid_since=None, spent_usd=3.2)
    budget = Budget(usd=5, per="day", by="", asked=NOW, began=NOW, before_usd=0)
    record = EndpointRecord(
        name="prod", source="", type="cloud_run", region="us-central1", service="df-ep-prod", created=NOW, stable=1,
        previous=1, url="https://df-ep-prod-abc-uc.a.run.app", revisions=[former, revision], budget=budget,
    )  # fmt: skip
    yield served, budget_notice(record, budget, 4.0, now), now
    error = RunError(error_class=ErrorClass.PARITY, message="the endpoint makes other ids from the same messages")
    canary = Canary(percent=10, seconds=1800, max_error_rate=0.01, max_latency_ratio=1.5)
    for kind, state in (
        ("deploy", RolloutState.DEPLOYING), ("deploy", RolloutState.WATCHING), ("deploy", RolloutState.PROMOTED),
        ("rollback", RolloutState.PROMOTED), ("deploy", RolloutState.ROLLED_BACK), ("suspend", RolloutState.SUSPENDED),
        ("resume", RolloutState.ROLLED_BACK), ("retire", RolloutState.RETIRED), ("remove", RolloutState.DEPLOYING),
        ("remove", RolloutState.PROMOTED), ("remove", RolloutState.ROLLED_BACK), ("remove", RolloutState.RETIRED),
    ):  # fmt: skip
        failed = error if state is RolloutState.ROLLED_BACK else None
        rollout = Rollout.model_validate(
            {"id": RUN, "kind": kind, "who": "w", "requested": NOW, "run": RUN, "state": state, "revision": 2,
             "error": failed, "canary": canary, "model": "sql"}
        )  # fmt: skip
        is_over = state in (RolloutState.SUSPENDED, RolloutState.RETIRED)
        shown = evolve(record, revisions=[former, revision.unpaid(now)]) if is_over else record
        yield served, notice_of(shown, rollout, now), now


def _event(event: RunEvent) -> str:
    return _block("json", json.dumps(json.loads(run_event_message(event)[0]), ensure_ascii=False))


def _block(language: str, content: str) -> str:
    return f"```{language}\n{content}\n```\n"
