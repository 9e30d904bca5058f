"""The playground asks a real server over a socket, as `dropforge chat` does. No page and no answer has the token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from starlette.testclient import TestClient

from dropforge.base import names
from dropforge.run.record import Endpoint, RunState
from dropforge.spec import parse_spec
from dropforge_console.access import Access
from dropforge_console.app import create_app
from dropforge_console.asking import Unanswered
from dropforge_console.lending import KEPT_SECONDS, Lender
from dropforge_console.passes import SESSION, Passes
from dropforge_console.playground import Callee

from ..cli.openai_server import MODEL, OpenAiServer, openai_server
from ..deployments import Memory, context_with
from .test_run_page import SPEC
from .test_views import NOW, record

HOST = "127.0.0.1:8899"
RUN, OTHER, ENDED = "text-to-sql-0123456789ab", "other-ba9876543210", "ended-aa9876543210"
TOKEN = "the-token-of-the-endpoint"
TEMPLATE = {"prompt": "Question: {question}\nContext: {context}", "completion": "{answer}", "system": "Write SQL."}


@dataclass
class Console:
    """A console with its session, and the bucket that it reads."""

    client: TestClient
    storage: Memory

    def serve(self, url: str, run: str = RUN, columns: Any = None, **endpoint: Any) -> None:
        """Put a run with an endpoint into the bucket."""
        spec = {
            "api_version": "dropforge/v1",
            "name": MODEL,
            "model": {"source": "owner/tiny-1m"},
            "dataset": {"source": "owner/rows", **({"columns": columns} if columns else {})},
            "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
            "serve": {"type": "cloud_run", "ttl": "1h"},
        }
        served = Endpoint(
            url=url, model=MODEL, service="s", region="r", ready=NOW, expires=NOW + timedelta(days=9999), **endpoint
        )
        found = record((RunState.TRAINING, 1), (RunState.SUCCEEDED, 20), run=run, endpoint=served)
        for name, data in (
            (names.spec_object(run), json.dumps(spec)),
            (names.record_object(run), found.model_dump_json()),
        ):
            self.storage.blob(name).upload_from_string(data.encode(), if_generation_match=0)

    def ask(self, of: str = RUN, **question: Any) -> list[dict[str, str]]:
        """Ask, and return the events of the answer."""
        answer = self.client.post("/ask", json={"of": of, **question}, headers={"origin": f"http://{HOST}"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert TOKEN not in answer.text
        return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]

    def page(self, *of: str) -> str:
        text = self.client.get("/ask", params={"of": of}).text
        assert TOKEN not in text
        return text


@contextmanager
def console(directory: Path) -> Iterator[Console]:
    passes, storage = Passes(directory, lambda: 1000.0), Memory()
    access = Access(HOST, passes)

    def token_of(callee: Callee) -> str:
        assert callee.spec.name == MODEL
        return TOKEN

    app = create_app(context_with(storage=storage), access, None, token_of)
    cookies = {access.cookie: passes.issue(SESSION)}
    with TestClient(app, base_url=f"http://{HOST}", cookies=cookies) as client:
        yield Console(client, storage)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Console]:
    with console(tmp_path) as here:
        yield here


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with openai_server() as server:
        yield server


def test_a_question_becomes_the_prompt_of_the_training(here: Console, server: OpenAiServer) -> None:
    here.serve(server.url, columns=TEMPLATE)
    page = here.page(RUN)
    assert 'name="field:question"' in page
    assert 'name="field:context"' in page
    values = {"question": "how many?", "context": "t"}
    assert here.ask(values=values, temperature=0, max_tokens=9) == [{"text": "select "}, {"text": "1"}, {"end": "stop"}]
    assert here.ask(values={**values, "message": "as it is"}, is_raw=True, system="Be {short}.")[-1] == {"end": "stop"}
    assert server.prompts == [
        [("system", "Write SQL."), ("user", "Question: how many?\nContext: t")],
        [("system", "Be {short}."), ("user", "as it is")],
    ]
    assert server.tokens == [f"Bearer {TOKEN}"] * 2
    assert (server.requests[0]["temperature"], server.requests[0]["max_tokens"]) == (0, 9)
    assert "needs a text for context" in here.ask(values={"question": "x"})[0]["error"]


def test_a_model_without_a_template_gets_the_conversation(here: Console, server: OpenAiServer) -> None:
    here.serve(server.url)
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    here.ask(values={"message": "c"}, history=history)
    assert server.prompts == [[("user", "a"), ("assistant", "b"), ("user", "c")]]


def test_two_models_beside_each_other_and_why_one_cannot_be_asked(here: Console, server: OpenAiServer) -> None:
    here.serve(server.url, columns=TEMPLATE)
    here.serve(server.url, run=ENDED, ended=NOW)
    with openai_server() as second:
        here.serve(second.url, run=OTHER)
        page = here.page(RUN, OTHER)
        assert page.count("data-side=") == 2
        assert 'name="field:message"' in page  # the second model has no template
        second.parts = ["two"]
        assert here.ask(OTHER, values={"message": "x"})[0] == {"text": "two"}
    assert "no run and no endpoint &#39;nobody" in here.page(RUN, "nobody<script>")
    [event] = here.ask(ENDED, values={"message": "x"})
    assert event == {"error": "the endpoint ended at 2026-11-24 09:30 UTC", "hint": ""}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"refusal": (403, {"error": {"message": "denied"}})}, "answered HTTP 403: denied"),
        ({"refusal": (503, {"error": {"message": "x" * 9000}})}, "answered HTTP 503: "),
        ({"finish": None}, "the answer has no end"),
        ({"parts": [7]}, "sent what is no chat completion"),
    ],
)
def test_an_answer_that_fails_says_why(here: Console, server: OpenAiServer, change: Any, expected: str) -> None:
    here.serve(server.url)
    for name, value in change.items():
        setattr(server, name, value)
    last = here.ask(values={"message": "x"})[-1]
    assert expected in last["error"]
    assert len(last["error"]) < 3000


def test_an_endpoint_that_is_gone_says_so(here: Console) -> None:
    here.serve("http://127.0.0.1:1")
    [event] = here.ask(values={"message": "x"})
    assert "cannot be reached" in event["error"]
    assert f"dropforge status {RUN}" in event["hint"]


class Clients:
    """Clients of a process whose account has an identity."""

    def identity_token(self, audience: str) -> str:
        return f"an identity for {audience}"


def test_a_console_in_a_project_asks_by_a_token_that_it_borrows_and_refuses_what_it_cannot_reach() -> None:
    asked: list[tuple[str, Any]] = []

    def post(url: str, **options: Any) -> Any:
        asked.append((options["headers"]["Authorization"], options["json"]))
        found = options["json"]["of"] == RUN
        content = {"token": TOKEN} if found else {"error": "no endpoint <b>"}
        return SimpleNamespace(status_code=200 if found else 404, text=json.dumps(content), json=lambda: content)

    now = [0.0]
    lender = Lender("https://functions/ask", Clients(), lambda: now[0])  # type: ignore[arg-type]
    with patch("requests.post", post):
        assert [lender(callee(RUN)), lender(callee(RUN))] == [TOKEN, TOKEN]
        assert asked == [("Bearer an identity for https://functions/ask", {"of": RUN})]  # once: it is kept
        now[0] = KEPT_SECONDS
        lender(callee(RUN))
        assert len(asked) == 2
        with pytest.raises(Unanswered, match="the function ask answered 404 for other-ba9876543210"):
            lender(callee(OTHER, "https://other"))
        with pytest.raises(Unanswered, match=r"the endpoint of private-0 \(gke\) is inside the network"):
            lender(callee("private-0", serve={"type": "gke", "accelerator": "nvidia-l4", "ttl": "1h"}))
    assert len(asked) == 3


def callee(name: str, url: str = "https://endpoint", serve: Any = None) -> Callee:
    spec = parse_spec(json.dumps({**SPEC, "serve": serve or {"type": "cloud_run", "ttl": "1h"}}).encode())
    endpoint = Endpoint(url=url, model=MODEL, service="s", region="r", ready=NOW, expires=NOW)
    return Callee(name, RUN, spec, endpoint)


def test_what_is_no_question_is_refused(here: Console) -> None:
    headers = {"origin": f"http://{HOST}"}
    for question in ({}, {"of": RUN, "temperature": 9}, {"of": RUN, "history": [{"role": "tool", "content": ""}]}):
        assert here.client.post("/ask", json=question, headers=headers).status_code == 422
    assert here.client.post("/ask", content=b"x" * (2 << 20), headers=headers).status_code == 413
    assert here.client.post("/ask", json={"of": RUN}).status_code == 403  # of another page
