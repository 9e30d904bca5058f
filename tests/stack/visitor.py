"""A visitor of the console, who has followed the link that a command printed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from tests.cli.commands import COMMAND, Process
from tests.patience import PATIENCE_SECONDS

from dropforge.run.record import RunState

from .conftest import User


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
