"""The console on a real stack: the command, its link, its pages and its stream, through a socket and in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from click.testing import CliRunner
from tests.cli.commands import COMMAND, Process
from tests.patience import PATIENCE_SECONDS

from dropforge.base.figures import usd
from dropforge.run.record import RunState
from dropforge.stages.answers import Swept
from dropforge.stages.sweep import findings
from dropforge_cli.main import cli

from ..stage_calls import sweep
from . import axe
from .conftest import User
from .named import Named
from .test_endpoints import named

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium")
__all__ = ["named"]  # a fixture
HOSTILE = '<img src=x onerror="document.title=1">'


class Visitor:
    """A browser's session: it has followed the link that the command printed."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.root = "http://" + urlsplit(link).netloc
        self.session = requests.Session()

    def enter(self) -> requests.Response:
        query = parse_qs(urlsplit(self.link).query)
        return self.post("/enter", token=query["token"][0], next=query["next"][0])

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.session.get(self.root + path, timeout=60, allow_redirects=False, **options)

    def post(self, path: str, **form: str) -> requests.Response:
        headers = {"origin": self.root}
        return self.session.post(self.root + path, data=form, headers=headers, timeout=60, allow_redirects=False)

    def wait_for(self, path: str, condition: Callable[[str], object]) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(text := self.get(path).text):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        return text


@pytest.fixture(scope="module")
def link(shared_stack: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the console as a user does; yield its link. Ctrl-C ends it, also with open streams."""
    process = Process([*COMMAND, "console", "--state", str(shared_stack)], tmp_path_factory.mktemp("console"))
    process.wait_for("open, within ten minutes: ")
    yield process.text().rpartition("open, within ten minutes: ")[2].strip()
    process.popen.send_signal(signal.SIGINT)
    assert process.code(30) == 0, process.text()


@pytest.fixture(scope="module")
def visitor(link: str) -> Visitor:
    visitor = Visitor(link)
    assert visitor.get("/runs").status_code == 401
    assert visitor.get("/enter").status_code == 200  # a preview of the link spends nothing
    assert visitor.enter().headers["location"] == "/runs"
    assert visitor.enter().status_code == 403  # it opens once
    return visitor


def cancel(user: User, *runs: str) -> None:
    for run in runs:
        user.publish(user.settings.operations_topic, json.dumps({"cancel": run}).encode())
        assert user.wait(run).state is RunState.CANCELLED


def test_a_run_from_its_upload_to_its_end(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("succeed"))
    user.wait(run)
    page = visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    assert f'href="/runs/{run}"' in visitor.get("/models").text
    assert "Training loss by step: from 2 to 1" in page
    assert "gone" in page  # its resources
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
    assert usd(amount) in row[0]
    assert visitor.get("/cost?by=<script>").status_code == 200


def test_health_shows_the_last_sweep_and_where_ledgers_and_cloud_differ(user: User, visitor: Visitor) -> None:
    run = user.drop(user.spec("succeed"))
    user.wait(run)
    missing = f"projects/{user.settings.project}/locations/us-central1/jobs/df-{run}-a1"
    user.store.intend(run, "run.googleapis.com/Job", missing, 1)
    page = visitor.wait_for("/health", lambda text: "compared" in text)
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
    assert visitor.post(f"/endpoints/{name}/rollback").status_code == 303
    named.user.until(lambda: named.record.stable == first.number)
    visitor.wait_for("/endpoints", lambda text: f'serves <a href="/runs/{first.run}">' in text)
    assert visitor.post("/endpoints/no-such-name/rollback").status_code == 404


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
    assert "/specs/console/noop-" in record.source
    visitor.wait_for(f"/new?from={record.run}", lambda text: "owner/tiny-1m" in text)


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
    listed = re.findall(r"<li>(.*?)</li>", answer.text)
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser test: build/venv/bin/pip install playwright==1.65.2"
    )
    if CHROMIUM is None:
        pytest.skip("no browser test: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, visitor: Visitor, width: int, scheme: str, *, is_watched: bool = True) -> Iterator[Any]:
    """A page in the visitor's session. If it is watched, nothing of it was broken or forbidden by its own policy."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    name, value = next(iter(visitor.session.cookies.items()))
    context.add_cookies([{"name": name, "value": value, "url": visitor.root}])
    page, broken = context.new_page(), []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.on("console", lambda message: broken.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert broken == [] or not is_watched


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_a_browser_follows_a_run(user: User, visitor: Visitor, browser: Any, scheme: str, width: int) -> None:
    """The pages fit, change without a reload, work from the keyboard, and break no rule of their own policy."""
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    with opened(browser, visitor, width, scheme) as page:
        follow(page, visitor, user, run, width)


def follow(page: Any, visitor: Visitor, user: User, run: str, width: int) -> None:
    page.goto(f"{visitor.root}/runs")
    page.keyboard.press("/")
    page.keyboard.type(run)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"q=" + run))
    page.keyboard.press("Tab")
    page.locator("body").press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{visitor.root}/runs/{run}")
    page.get_by_text("Training", exact=True).first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cancel(user, run)
    page.get_by_text("Cancelled", exact=True).first.wait_for()  # without a reload
    assert "Cancelled" in page.title()
    page.goto(f"{visitor.root}/runs?q=noop")
    page.get_by_label(f"Compare {run}").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("link", name="noop").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 360)])
def test_every_page_fits_and_is_accessible(user: User, visitor: Visitor, browser: Any, scheme: str, width: int) -> None:
    """axe-core finds nothing against WCAG 2.2 AA: names of controls, contrast, headings, landmarks, sizes."""
    runs = [user.drop(user.spec("succeed")) for _ in range(2)]
    for run in runs:
        user.wait(run)
        visitor.wait_for(f"/runs/{run}", lambda text: "Succeeded" in text)
    checker = axe.script()
    with opened(browser, visitor, width, scheme) as page:
        for path in (
            "/runs", f"/runs/{runs[0]}", f"/compare?run={runs[0]}&run={runs[1]}", "/models", "/endpoints", "/cost",
            "/health", "/new", "/enter?token=x&next=/runs",
        ):  # fmt: skip
            page.goto(visitor.root + path)
            page.get_by_role("heading", level=1).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            page.evaluate(checker)
            assert page.evaluate(axe.RUN) == [], path
