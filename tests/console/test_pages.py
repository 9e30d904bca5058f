"""The pages as an application, without a socket: what many viewers cost who ask at the same moment."""

from __future__ import annotations

import html
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.testclient import TestClient

from dropforge.base import names
from dropforge.run.record import LedgerEntry, ResourceState, RunState
from dropforge.spec import parse_spec
from dropforge_console.access import Access
from dropforge_console.app import create_app
from dropforge_console.pages import PAGE_ROWS
from dropforge_console.passes import SESSION, Passes

from ..deployments import Memory, context_with
from .deployed import Deployed
from .test_views import EXAMPLES, NOW, attempt, record

HOST = "127.0.0.1:8899"
VIEWERS = 20
MOST_BYTES = 150_000  # of a list of 100 runs with the files of the page, not compressed


class Log:
    """A log that counts its readers and lets them go when the test says so."""

    def __init__(self) -> None:
        self.readers = 0
        self.is_open = threading.Event()

    def __call__(self, resource: str) -> list[str]:
        self.readers += 1
        assert self.is_open.wait(60)
        return ["a line"]


def test_a_page_is_rendered_once_for_all_who_ask_at_the_same_moment(tmp_path: Path) -> None:
    job = LedgerEntry(kind="run.googleapis.com/Job", name="job", attempt=1, state=ResourceState.GONE, intended=NOW)
    run = record((RunState.TRAINING, 1), (RunState.FAILED, 20), attempts=[attempt()], resources=[job])
    storage, log = Memory(), Log()
    storage.blob(names.record_object(run.run)).upload_from_string(run.model_dump_json().encode(), if_generation_match=0)
    passes = Passes(tmp_path, lambda: 1000.0)
    access = Access(HOST, passes)
    app = create_app(context_with(storage=storage), access, log)
    cookies = {access.cookie: passes.issue(SESSION)}

    with TestClient(app, base_url=f"http://{HOST}", cookies=cookies) as client, ThreadPoolExecutor(VIEWERS) as pool:
        asked = [pool.submit(client.get, f"/runs/{run.run}") for _ in range(VIEWERS)]
        while not log.readers:
            time.sleep(0.01)
        log.is_open.set()
        answers = [each.result() for each in asked]
        missing = client.get("/runs/no-such-run-0123456789ab")
    assert [answer.status_code for answer in answers] == [200] * VIEWERS
    assert all("a line" in answer.text for answer in answers)
    assert log.readers == 1
    assert missing.status_code == 404


def test_somebody_starts_with_an_example(tmp_path: Path) -> None:
    """Each is offered, is a valid spec, and is read from no other file."""
    with Deployed().opened(tmp_path, lambda resource: []) as client:
        page = client.get("/new").text
        found = re.findall(r'href="/new\?example=([^"]+)"', page)
        assert len(found) == len(list(EXAMPLES.rglob("*.json")))
        assert found[0].startswith("local")
        for name in found:
            shown = re.search(r"<textarea[^>]*>(.*?)</textarea>", client.get(f"/new?example={name}").text, re.S)
            assert shown is not None
            parse_spec(html.unescape(shown[1]).encode())
        for other in ("../pyproject", "%2e%2e/README", "local", ""):
            assert 'aria-controls="choices"></textarea>' in client.get(f"/new?example={other}").text


def test_the_first_page_is_small_and_the_next_keeps_its_filters(tmp_path: Path) -> None:
    deployed = Deployed()
    for number in range(PAGE_ROWS + 1):
        deployed.add(record((RunState.TRAINING, 1), run=f"r-{number:012x}"))
    with deployed.opened(tmp_path) as client:
        first = client.get("/runs", headers={"accept-encoding": "identity"})
        files = re.findall(r'(?:href|src)="(/static/[^"]+)"', first.text)
        sizes = [len(client.get(path).content) for path in set(files)]
        assert len(first.content) + sum(sizes) < MOST_BYTES, sizes
        page = client.get("/runs?q=text-to&since=2026-11-01&until=x&sort=oldest").text
        assert 'href="/runs?q=text-to&amp;since=2026-11-01&amp;sort=oldest&amp;page=2"' in page
        assert "r-000000000064" in client.get("/runs?q=text-to&since=2026-11-01&page=2").text + page
