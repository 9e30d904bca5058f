"""What messages say: at most ten lines in every state, and the lines that people need."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dropforge.base.errors import ErrorClass
from dropforge.run.events import run_event_message
from dropforge.run.record import Attempt, Endpoint, Notice, Parity, RunError, RunState, Transition
from dropforge.tell.facts import MAX_LINE, MAX_TITLE
from dropforge.tell.news import MAX_LINES, News, notice_news, state_news
from dropforge.tell.slack import message_of
from dropforge_local.emulators.slack.rules import check_payload

from ..deployments import SETTINGS, settings_with
from .stories import NOW, news_of, record_of, spec_of

RUN_EVENT_SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "run_event.schema.json"
TOLD = (
    RunState.ACCEPTED,
    RunState.REJECTED,
    RunState.TRAINING,
    RunState.SUCCEEDED,
    RunState.FAILED,
    RunState.CANCELLED,
)
texts = st.text(max_size=30).map(lambda text: text * 200) | st.sampled_from(["\n" * 5000, "\x1b[2J\r\n\u202e" * 900])


def shown(news: News) -> list[str]:
    return list(map(str, news.lines))


def lines_of_slack(news: News) -> int:
    blocks = message_of(news).blocks
    parts = [part for block in blocks for part in [block.get("text"), *block.get("elements", ())] if part]
    return sum(len(part["text"].splitlines()) for part in parts)


@settings(max_examples=60, deadline=None)
@given(state=st.sampled_from(TOLD), foreign=texts, number=st.floats())
@example(state=RunState.SUCCEEDED, foreign="loss", number=math.nan)
@example(state=RunState.SUCCEEDED, foreign="loss", number=math.inf)
def test_no_message_has_more_than_ten_lines(state: RunState, foreign: str, number: float) -> None:
    """The largest record in each state, with foreign texts and numbers."""
    attempt = Attempt(
        number=50, placement=0, region="northamerica-northeast1", started=NOW, deadline=NOW, usd_per_hour=1e9
    )
    endpoint = Endpoint(
        url="https://" + "x" * 300, model="n" * 40, service="s", region="us-central1", ready=NOW,
        expires=NOW + timedelta(days=9999), limit="max_cost_usd",
    )  # fmt: skip
    metrics: dict[str, float | None] = {}
    for index in range(100):
        metrics |= {f"{foreign[:50]}{index}": number, f"{foreign[:50]}{index}_before": number}
    record = record_of(
        state, name=foreign, source=foreign, attempts=[attempt] * 50, metrics=metrics,
        endpoint=None if state is RunState.REJECTED else endpoint,
        parity=Parity(state="unsealed", reason=foreign),
        error=RunError(error_class=ErrorClass.OUT_OF_MEMORY, message=foreign, hint=foreign),
        problems=[{"pointer": foreign, "message": foreign, "found": foreign, "expected": foreign}] * 100,
    )  # fmt: skip
    news = state_news(record, spec_of(), settings_with(console_url="https://console.example/" + "y" * 200), NOW)
    assert news
    assert len(news.title) <= MAX_TITLE
    assert all(len(line.text) <= MAX_LINE and line.text.isprintable() for line in news.lines)
    assert len(news.lines) + 2 <= MAX_LINES
    assert lines_of_slack(news) <= MAX_LINES
    check_payload({"text": "x", "blocks": message_of(news).blocks})


def test_success_shows_before_and_after_cost_time_address_and_a_call() -> None:
    trained = Attempt(
        number=1, placement=0, region="us-central1", started=NOW - timedelta(hours=1), deadline=NOW, usd_per_hour=2,
        running=NOW - timedelta(hours=1), ended=NOW,
    )  # fmt: skip
    endpoint = Endpoint(
        url="https://df-x.run.app", model="demo", service="s", region="us-central1", ready=NOW,
        expires=NOW + timedelta(hours=10),
    )  # fmt: skip
    states = [(RunState.ACCEPTED, 90), (RunState.TRAINING, 60), (RunState.DEPLOYING, 10), (RunState.SUCCEEDED, 0)]
    history = [Transition(state=state, time=NOW - timedelta(minutes=ago), attempt=1) for state, ago in states]
    raw = dict.fromkeys(["tokens_per_second", "tokens", "steps", "train_seconds", "batch"], 4.0)
    metrics: dict[str, float | None] = {**raw, "exact_match": 1.0, "exact_match_before": 0.0, "loss": 0.41234}
    metrics |= {"loss_before": 2.31, "rows_eval": 150, "train_loss": 0.3}
    news = news_of(
        RunState.SUCCEEDED, spec_of(), history=history, attempts=[trained], endpoint=endpoint, metrics=metrics,
        serving_usd_per_hour=1.0, parity=Parity(state="sealed"),
    )  # fmt: skip
    assert shown(news) == [
        "result: exact match 0 → 1 · loss 2.31 → 0.4123 · 150 held-out rows",
        "from: s",
        "cost: at most $1.00 an hour now, $2.17 so far, at most $12.17 until the endpoint ends at 2026-11-20 10:00 UTC",
        "time: 1 h 30 min in all, 50 min of it training",
        "endpoint: https://df-x.run.app/v1 until 2026-11-20 10:00 UTC; parity sealed",
        'call: curl https://df-x.run.app/v1/chat/completions -H "Authorization: Bearer '
        "$(gcloud auth print-identity-token)\" -H 'Content-Type: application/json' -d "
        '\'{"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}\'',
        f"log: dropforge logs {news.event.run}",
        f"end the endpoint: dropforge cancel {news.event.run}",
    ]


@pytest.mark.parametrize(
    ("secret", "token"), [("key", "$(gcloud secrets versions access latest --secret=key)"), ("", "")]
)
def test_the_call_of_a_private_endpoint_reads_the_key_of_the_deployment(secret: str, token: str) -> None:
    endpoint = Endpoint(
        url="http://10.0.0.5:8000", model="n", service="s", region="us-central1", ready=NOW, expires=NOW
    )
    record = record_of(RunState.SUCCEEDED, endpoint=endpoint)
    spec = spec_of(serve={"type": "gke", "price_usd_per_hour": 10})
    news = state_news(record, spec, settings_with(endpoint_key_secret=secret), NOW)
    assert news
    call = next(line.text for line in news.lines if line.is_code)
    assert (token in call, "Authorization" in call) == (True, bool(secret))


@pytest.mark.parametrize(
    ("serve", "shown_token"),
    [({"type": "cloud_run"}, True), ({"type": "gke", "price_usd_per_hour": 10}, False)],
)
def test_a_deployment_may_name_its_own_command_for_the_token(serve: dict[str, Any], shown_token: bool) -> None:
    """An endpoint that demands no token gets none, whatever the command."""
    endpoint = Endpoint(url="http://e", model="n", service="s", region="us-central1", ready=NOW, expires=NOW)
    record, settings = record_of(RunState.SUCCEEDED, endpoint=endpoint), settings_with(token_command="dropforge token")
    news = state_news(record, spec_of(serve=serve), settings, NOW)
    assert news
    call = next(line.text for line in news.lines if line.is_code)
    assert ('-H "Authorization: Bearer $(dropforge token job-0123456789ab)"' in call) is shown_token
    assert "gcloud" not in call


def test_a_failure_says_which_run_why_what_to_do_from_where_and_what_it_cost() -> None:
    error = RunError(error_class=ErrorClass.STOCKOUT, message="no more\ncapacity", hint="add placements")
    news = news_of(RunState.FAILED, error=error)
    assert news.title == "n failed: stockout (0123456789ab)"
    assert shown(news) == [
        "why: no more capacity",
        "do: add placements",
        "from: s",
        "cost: $0.00 an hour now, $0.00 so far",
        "details: dropforge status job-0123456789ab",
    ]


def test_a_cancel_says_who_or_what_requested_it() -> None:
    news = news_of(RunState.CANCELLED, cancel_requested=NOW, cancel_cause="the deletion of gs://s/specs/n.json")
    assert news.title == "n cancelled by the deletion of gs://s/specs/n.json (0123456789ab)"
    assert "by: the deletion of gs://s/specs/n.json" in shown(news)


@pytest.mark.parametrize(
    ("error_class", "field"),
    [
        (ErrorClass.BUDGET, "limits.max_cost_usd"),
        (ErrorClass.DEADLINE, "limits.max_duration"),
        (ErrorClass.STUCK, "limits.stuck_after"),
        (ErrorClass.GATE, "evaluation.gate"),
    ],
)
def test_an_end_names_the_limit_that_decided_it(error_class: ErrorClass, field: str) -> None:
    error = RunError(error_class=error_class, message="m")
    assert f"by: {field}" in shown(news_of(RunState.FAILED, error=error))


@pytest.mark.parametrize("metrics", [{}, {"loss": 1.0}])
def test_a_failure_names_a_prefix_only_if_it_has_files(metrics: dict[str, float]) -> None:
    """The metrics are those of the manifest, which the trainer writes after all files."""
    attempt = Attempt(number=1, placement=0, region="us-central1", started=NOW, deadline=NOW)
    error = RunError(error_class=ErrorClass.GATE, message="m")
    lines = shown(news_of(RunState.FAILED, error=error, attempts=[attempt], metrics=metrics))
    assert ("files: gs://x/models/job-0123456789ab/" in lines) is bool(metrics)


def test_a_command_that_the_hint_names_is_not_told_twice() -> None:
    attempt = Attempt(number=1, placement=0, region="us-central1", started=NOW, deadline=NOW, ended=NOW)
    hint = "read its log (`dropforge logs job-0123456789ab`)"
    error = RunError(error_class=ErrorClass.STUCK, message="m", hint=hint)
    assert str(news_of(RunState.FAILED, error=error, attempts=[attempt])).count("dropforge logs") == 1


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_each_class_of_failure_says_what_to_do_next(error_class: ErrorClass) -> None:
    news = news_of(RunState.FAILED, error=RunError(error_class=error_class, message="m"))
    assert [bool(line.text) for line in news.lines if line.label == "do"] == [True]
    assert news.error_class is error_class


def test_a_rejection_shows_four_problems_from_where_and_where_the_others_are() -> None:
    problems: list[dict[str, Any]] = [{"pointer": f"/{i}", "message": "wrong", "found": "x"} for i in range(7)]
    source = "gs://specs/specs/a.json#1"
    news = news_of(RunState.REJECTED, problems=problems, source=source, submitter="sam@example.com")
    assert news.title == "n rejected: /0 wrong (0123456789ab)"
    assert shown(news)[0] == "/0: wrong; found x"
    assert shown(news)[4:] == [
        "and 3 more problems",
        f"from: {source} by sam@example.com",
        "cost: $0.00 an hour now, $0.00 so far",
        "details: dropforge status job-0123456789ab",
    ]


def test_a_waiting_attempt_costs_nothing_yet_and_the_message_says_what_it_will_cost() -> None:
    attempt = Attempt(number=1, placement=0, region="us-central1", started=NOW, deadline=NOW, usd_per_hour=4)
    record = record_of(RunState.PROVISIONING, attempts=[attempt])
    news = notice_news(record, Notice("waits-a1", "waits to train", "text"), SETTINGS, NOW + timedelta(hours=1))
    assert "cost: $0.00 an hour now, $0.00 so far, $4.00 an hour once it trains" in shown(news)


def test_a_name_of_any_length_leaves_room_for_the_id() -> None:
    news = news_of(RunState.FAILED, name="x" * 200, error=RunError(error_class=ErrorClass.CODE, message="m"))
    assert len(news.title) == MAX_TITLE
    assert news.title.endswith(" (0123456789ab)")


def test_a_message_links_the_run_in_the_console_if_there_is_one() -> None:
    record = record_of(RunState.CANCELLED)
    deployment = settings_with(console_url="https://console.example/")
    news = state_news(record, None, deployment, NOW)
    assert news
    assert news.link == "https://console.example/runs/job-0123456789ab"
    notice = notice_news(record, Notice("budget-50", "has used 50 %", "a"), deployment, NOW)
    assert notice.link == news.link
    published = json.loads(run_event_message(news.event)[0])
    jsonschema.validate(published, json.loads(RUN_EVENT_SCHEMA.read_text()))
    assert published["link"] == news.link
    assert f"<{news.link}|open the run>" in json.dumps(message_of(news).blocks)


def test_without_a_console_every_message_links_what_the_functions_logged_about_the_run() -> None:
    record = record_of(RunState.TRAINING)
    notice = notice_news(record, Notice("budget-50", "has used 50 %", "a"), SETTINGS, NOW)
    query = quote(f'jsonPayload.run="{record.run}"\ntimestamp>="2026-11-20T00:00:00+00:00"', safe="")
    assert notice.link == f"https://console.cloud.google.com/logs/query;query={query}?project=x"
    assert f"<{notice.link}|open the run>" in json.dumps(message_of(notice).blocks)


def test_a_state_without_a_message_has_none() -> None:
    assert state_news(record_of(RunState.DEPLOYING), None, SETTINGS, NOW) is None


def test_a_notice_says_which_run_why_what_it_costs_and_what_to_do() -> None:
    attempt = Attempt(
        number=1, placement=0, region="us-central1", started=NOW, deadline=NOW, usd_per_hour=4, running=NOW
    )
    now, record = NOW + timedelta(hours=2), record_of(RunState.TRAINING, attempts=[attempt])
    news = notice_news(record, Notice("budget-50", "has used 50 %", "a\nb"), SETTINGS, now)
    assert news.title == "n has used 50 % (0123456789ab)"
    assert shown(news) == [
        "why: a b",
        "cost: $4.00 an hour now, $8.00 so far",
        "log: dropforge logs job-0123456789ab",
        "end the run: dropforge cancel job-0123456789ab",
    ]
    assert news.event.id == f"{news.event.run}/notice/budget-50"
    assert (news.event.title, list(news.event.actions.values())) == (news.title, [line.text for line in news.lines[2:]])
    assert news.event.details["cost_usd"]["per_hour_at_most"] == 4  # type: ignore[call-overload, index]


def test_a_number_that_is_huge_stays_short() -> None:
    metrics: dict[str, float | None] = {"loss": 1e300, "loss_before": -math.pi}
    assert shown(news_of(RunState.SUCCEEDED, metrics=metrics))[0] == "result: loss -3.142 → 1e+300"
