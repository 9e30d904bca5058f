"""The console on a real stack: the command, its link, its pages and its stream, through a socket and in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner
from google.cloud import pubsub_v1
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.base.figures import usd
from dropforge.run.record import RunState
from dropforge.stages.answers import Swept
from dropforge.stages.sweep import findings
from dropforge_cli.main import cli

from ..deployments import intend
from ..stage_calls import sweep
from .conftest import User
from .named import Named
from .test_endpoints import named
from .visitor import Visitor, cancel, link, visitor

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium")
__all__ = ["link", "named", "visitor"]  # fixtures
HOSTILE = '<img src=x onerror="document.title=1">'


def test_a_run_from_its_upload_to_its_end(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("succeed"))
    user.wait(run)
    page = visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    assert f'href="/runs/{run}"' in visitor.get("/models").text
    assert "Training loss by step: from 2 to 1" in page
    assert "gone" in page  # its resources
    shown = re.findall(r'<th scope="row" class="d\d">([^<]*)', visitor.get(f"/runs/{run}").text)
    trace = f"{user.info.http}/telemetry/traces/{names.trace_id(run)}"
    user.until(lambda: requests.get(trace, timeout=60).json()["spans"])
    sent = [span["name"] for span in requests.get(trace, timeout=60).json()["spans"] if span["parentSpanId"]]
    assert sorted(label.removesuffix(" 1").removesuffix(" Job") for label in shown) == sorted(sent)
    assert run in visitor.get("/runs?q=noop&state=SUCCEEDED").text
    assert run not in visitor.get("/runs?state=FAILED").text


def test_two_runs_side_by_side(user: User, visitor: Visitor) -> None:
    """The loss of each, each metric, and only the fields in which the specs differ."""
    runs = [user.drop(user.spec("succeed", training={"learning_rate": rate})) for rate in (1e-4, 2e-4)]
    for run in runs:
        user.wait(run)
        visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    page = visitor.get("/compare", params={"run": [*runs, runs[0]], "x": "time"}).text
    assert "Training loss of 2 runs by time" in page
    assert "/training/learning_rate" in page
    assert "/model/source" not in page
    assert "Mark two runs" in visitor.get("/compare").text
    assert visitor.get("/compare?run=no-such-run-0123456789ab").status_code == 404


def test_the_cost_is_grouped_as_on_the_command_line(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("succeed", labels={"behave": "succeed", "team": "pricing"}))
    user.wait(run)
    visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    bill = json.loads(
        CliRunner().invoke(cli, ["cost", "--by", "label:team", "--json", "--state", str(user.state)]).stdout
    )
    amount = next(group for group in bill["groups"] if group["group"] == "pricing")["total_usd"]
    page = visitor.get("/cost?by=label:team").text
    row = re.search(r'<th scope="row">pricing.*?</tr>', page, re.S)
    assert row is not None
    assert html.escape(usd(amount)) in row[0]  # a quick run costs "< $0.0001"
    assert visitor.get("/cost?by=<script>").status_code == 200


def test_health_shows_the_last_sweep_and_where_ledgers_and_cloud_differ(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("succeed"))
    user.wait(run)
    missing = f"projects/{user.settings.project}/locations/us-central1/jobs/df-{run}-a1"
    intend(user.store, run, "run.googleapis.com/Job", missing, 1)
    letters = f"projects/{user.settings.project}/subscriptions/dropforge-on-spec-message-dead-letter"
    user.publish("dropforge-on-spec-message-dead-letter", b"an event that no function could handle")
    page = visitor.wait_for("/health", lambda text: "compared" in text and text.count("read <time") == 2)
    assert "Events wait" in page
    assert "dropforge dead_letters" in page  # an alert
    with pubsub_v1.SubscriberClient() as subscriber:  # other tests of the stack find no alert
        took = subscriber.pull(subscription=letters, max_messages=10, timeout=PATIENCE_SECONDS).received_messages
        subscriber.acknowledge(subscription=letters, ack_ids=[each.ack_id for each in took])
    assert missing in page
    assert "the ledger does not say that it is gone" in page  # what "remaining" means
    sweep()  # it verifies that the job does not exist
    assert missing not in {entry.name for entry in user.store.ledger(run).remaining()}
    page = visitor.wait_for("/health", lambda text: "ended <time" in text)
    assert HOSTILE not in page
    answer = Swept(deleted=[], deleting=[], restarted=[], resubmitted=[], problems=[HOSTILE])
    late = findings.of(answer, datetime(2026, 1, 1, tzinfo=UTC))
    user.store.replace(findings.OBJECT, late.model_dump_json().encode())
    page = visitor.wait_for("/health", lambda text: "Late" in text)
    assert "1 problem" in page
    assert HOSTILE not in page


def test_a_viewer_rolls_an_endpoint_back(visitor: Visitor, named: Named) -> None:
    first, second = (named.serves().revision(number) for number in (1, 2))
    name = named.name
    listed = visitor.wait_for("/models", lambda text: f"{name}, revision 2" in text)
    assert f"{name}, revision 1" not in listed  # it does not serve any more
    bucket = named.user.settings.runs_bucket
    for revision in (first, second):
        assert f"dropforge serve {revision.run} --as NAME" in listed
        assert f"gs://{bucket}/models/{revision.run}/attempt-1/" in listed
    page = visitor.wait_for("/endpoints", lambda text: second.run in text and f"/endpoints/{name}/rollback" in text)
    assert named.record.base_url in page
    assert f"dropforge token {name}" in page
    # The requests of the last hour, of Cloud Monitoring.
    visitor.wait_for("/endpoints", re.compile(r'100 %</td><td class="n">[\d,]+</td><td class="n">0</td>').search)
    if CHROMIUM:
        roll_back_in_browser(visitor, name)
    else:
        assert visitor.post(f"/endpoints/{name}/rollback").status_code == 303
    named.user.until(lambda: named.record.stable == first.number)
    visitor.wait_for("/endpoints", lambda text: f'serves <a href="/runs/{first.run}">' in text)
    assert visitor.post("/endpoints/no-such-name/rollback").status_code == 404


def roll_back_in_browser(visitor: Visitor, name: str) -> None:
    from playwright.sync_api import sync_playwright

    cookie, value = next(iter(visitor.session.cookies.items()))
    with sync_playwright() as started, started.chromium.launch(executable_path=CHROMIUM) as browser:
        context = browser.new_context()
        context.add_cookies([{"name": cookie, "value": value, "url": visitor.root}])
        page = context.new_page()
        page.goto(f"{visitor.root}/endpoints#endpoint-{name}")
        with page.expect_response(lambda answer: answer.request.method == "POST") as answered:
            page.locator(f"#endpoint-{name}").get_by_role("button", name="Roll back").click()
        assert answered.value.status == 303


def test_the_stream_tells_a_page_of_its_own_run(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    visitor.wait_for(f"/runs/{run}", lambda text: "Training" in text)
    with visitor.get(f"/live?run={run}", stream=True) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines(decode_unicode=True)
        versions = (line for line in lines if line.startswith("data: "))
        next(versions)
        user.publish(user.settings.operations_topic, json.dumps({"cancel": run}).encode())
        assert any("cancel requested" in visitor.get(f"/runs/{run}").text for _ in versions)
    user.wait(run)


def test_a_viewer_cancels_a_run(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    visitor.wait_for(f"/runs/{run}", lambda text: "Cancel the run" in text)
    assert visitor.post(f"/runs/{run}/cancel").status_code == 303
    assert user.wait(run).state is RunState.CANCELLED
    assert "Cancel the run" not in visitor.wait_for(f"/runs/{run}", lambda text: "Cancelled" in text)


def test_another_page_cancels_nothing(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    answer = visitor.session.post(
        f"{visitor.root}/runs/{run}/cancel", headers={"sec-fetch-site": "same-site"}, timeout=60
    )
    assert answer.status_code == 403
    assert user.store.record(run).cancel_requested is None
    cancel(user, run)


def test_a_spec_that_is_written_in_the_page_becomes_a_run(user: User, visitor: Visitor) -> None:
    text = json.dumps(user.spec("succeed"))
    assert "valid" in visitor.post("/new", spec=text, do="check").text
    location = visitor.post("/new", spec=text, do="drop").headers["location"]
    record = user.wait(location.removeprefix("/runs/"))
    assert record.state is RunState.SUCCEEDED
    assert "/specs/noop-" in record.source
    visitor.wait_for(f"/new?from={record.run}", lambda text: "owner/tiny-1m" in text)


TPU_VM = {"type": "tpu_vm", "accelerator_type": "v5litepod-8", "placements": [{"zone": "us-central1-a"}]}


def test_check_asks_the_deployment_and_dropping_does_not_wait_for_that(user: User, visitor: Visitor) -> None:
    """By the same words as `dropforge preflight`; "not asked" is not called ok."""
    spec = user.spec("succeed", target=TPU_VM, dataset={"source": "gs://no-such-bucket/rows.jsonl"})
    told = visitor.post("/new", spec=json.dumps(spec), do="check").text
    rows = [html.unescape(re.sub(r"<[^>]+>", " ", row)) for row in re.findall(r"<tr>(.*?)</tr>", told)]
    failed, unasked, good = ([row for row in rows if f" {status} " in row] for status in ("failed", "not asked", "ok"))
    assert any("/dataset/source" in row for row in failed), told
    assert any("the zone has such TPU VMs" in row for row in good)
    assert any("quota for" in row and "the local stack does not emulate" in row for row in unasked)
    assert not [row for row in good if "quota" in row]
    answer = visitor.post("/new", spec=json.dumps(spec), do="type").text
    assert "Preflight" not in answer


@pytest.mark.parametrize("text", ["", "{", '{"api_version": "dropforge/v1"}', "\ud800", "x" * 200_000, "[" * 5000])
def test_a_wrong_spec_is_explained_and_starts_nothing(user: User, visitor: Visitor, text: str) -> None:
    before = list(user.store.runs())
    body = text.encode("utf-8", "surrogatepass")
    answer = visitor.session.post(
        f"{visitor.root}/new", data={"spec": body, "do": "drop"}, headers={"origin": visitor.root}, timeout=60
    )
    assert answer.status_code == 422
    assert "problem" in answer.text
    assert list(user.store.runs()) == before


def test_the_rules_of_size_and_time_are_those_of_the_command_line(user: User, visitor: Visitor, tmp_path: Path) -> None:
    """A model that does not fit, and a budget without an attempt: in the words of `dropforge validate`."""
    spec = user.spec(
        model={"source": "google/gemma-3-27b-it"},
        training={"adapter": {"type": "none"}},
        limits={"max_cost_usd": 0.0001},
    )
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    told = CliRunner().invoke(cli, ["validate", str(tmp_path / "spec.json")]).stdout
    problems = [line.partition("spec.json: ")[2] for line in told.splitlines()]
    assert len(problems) >= 2
    answer = visitor.post("/new", spec=json.dumps(spec), do="drop")
    assert answer.status_code == 422
    listed = re.findall(r"<li>(.*?)(?: <button.*?)?</li>", answer.text)
    assert [html.unescape(text) for text in listed] == problems


def test_a_form_of_any_size_is_answered(visitor: Visitor) -> None:
    assert visitor.post("/new", spec="x" * 4_000_000).status_code == 413


def test_hostile_text_is_text(user: User, visitor: Visitor) -> None:
    spec = user.spec("succeed", **{HOSTILE: 1})
    run = user.drop(spec)
    user.wait(run)
    page = visitor.wait_for(f"/runs/{run}", lambda text: "The spec was refused" in text)
    assert HOSTILE not in page
    assert run not in visitor.get("/models").text
    assert "&lt;img" in page
    assert HOSTILE not in visitor.get("/runs", params={"q": HOSTILE, "state": HOSTILE}).text


@pytest.mark.parametrize("path", ["/runs/no-such-run-0123456789ab", "/runs/..%2f..%2fetc", "/static/../app.py", "/x"])
def test_what_does_not_exist_is_not_found(visitor: Visitor, path: str) -> None:
    assert visitor.get(path).status_code == 404


@pytest.mark.parametrize(
    "to", ["//attacker.example", "/\\attacker.example", "https://attacker.example", "javascript:1"]
)
def test_a_link_leads_nowhere_else(visitor: Visitor, to: str) -> None:
    answer = visitor.post("/enter", token="wrong", next=to)
    assert answer.status_code == 403
    assert "location" not in answer.headers


def test_many_viewers_at_once(user: User, visitor: Visitor) -> None:
    """Fifty streams are open, and the pages are still answered."""
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    streams = [visitor.get(f"/live?run={run}", stream=True) for _ in range(50)]
    try:
        with ThreadPoolExecutor(10) as pool:
            pages = list(pool.map(lambda _: visitor.get(f"/runs/{run}").status_code, range(20)))
        assert pages == [200] * 20
        cancel(user, run)
        for stream in streams:
            changes = (line for line in stream.iter_lines() if line.startswith(b"data: "))
            assert next(changes) != next(changes)
    finally:
        for stream in streams:
            stream.close()
