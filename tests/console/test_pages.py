"""The pages as an application, without a socket: what many viewers cost who ask at the same moment."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.testclient import TestClient

from dropforge.base import names
from dropforge.run.record import LedgerEntry, ResourceState, RunState
from dropforge_console.access import Access
from dropforge_console.app import create_app
from dropforge_console.passes import SESSION, Passes

from ..deployments import Memory, context_with
from .test_views import NOW, attempt, record

HOST = "127.0.0.1:8899"
VIEWERS = 20


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
