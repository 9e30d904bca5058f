"""The comparison of an endpoint with its model over several calls of stage deploy, and what deploy makes of it."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from dropforge.base.errors import ErrorClass
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.prices import HourlyPrice
from dropforge.run.artifacts import MANIFEST, ArtifactFile, Manifest, Source, model_prefix
from dropforge.run.proof import with_proof
from dropforge.run.record import Parity, Record, RunState, Transition
from dropforge.run.seal import SEAL, Noise, Seal, SealedRow
from dropforge.run.store import RunStore
from dropforge.stages.deploy import deploy
from dropforge.stages.parity import compare

from ..deployments import SETTINGS, Memory, context_with
from ..platforms.shared import ME, make_run

RUN, MODEL = "demo-0123456789ab", "demo"
ROWS = 5
LINKS = {"adapter_to_merged": 3e-5, "saved_to_reloaded": 0.0}
SPEC = {
    "api_version": "dropforge/v1",
    "name": MODEL,
    "model": {"source": "owner/tiny-1m"},
    "dataset": {"source": "owner/data"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
    "serve": {"type": "cloud_run", "ttl": "1h"},
}


def seal() -> Seal:
    rows = [
        SealedRow(
            row=number,
            messages=[{"role": "user", "content": f"question {number}"}],
            prompt=[2, 10 + number],
            answer=[7, 8],
            top=[([7, 8], [-0.1, -3.0]), ([8, 7], [-0.2, -2.5])],
        )
        for number in range(1, ROWS + 1)
    ]
    return Seal(greedy=True, dtype="bfloat16", rows=rows, noise=Noise(divergence=1e-5, gap=1e-3), links=LINKS)


class Handler(BaseHTTPRequestHandler):
    """Answers a completion as the sealed model does, or as `server.owner` says."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.owner.answer(body)  # type: ignore[attr-defined]
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@dataclass
class Endpoint:
    """An engine over HTTP. `down`, `wrong` and `rounded` are rows.

    It fails for the first ones, answers the second ones wrongly, and the third ones with other probabilities.
    """

    down: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)
    rounded: set[int] = field(default_factory=set)
    chats: set[int] = field(default_factory=set)  # rows whose chat has another answer, as a wrong default gives it
    odd: float | None = None  # the log-probability of every token, in the rows of `rounded`
    asked: list[int] = field(default_factory=list)
    url: str = ""

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        row = self._row(body)
        if row is None:  # the first completion of stage deploy
            return 200, {"choices": [{"message": {"content": "hello"}}]}
        if row.row in self.down:
            return 503, {}
        if "messages" in body:
            self.asked.append(row.row)
            answer = [8, 7] if row.row in self.chats else row.answer
            return 200, {"prompt_token_ids": row.prompt, "choices": [{"token_ids": answer}]}
        if body["prompt"] == row.prompt:
            return 200, {"choices": [{"token_ids": row.answer}]}
        tops = [dict(zip(ids, values, strict=True)) for ids, values in row.top]
        if row.row in self.wrong:
            tops[0] = {9: -0.01, 7: -5.0}
        if row.row in self.rounded:
            tops[1] = {8: -0.25, 7: -2.0} if self.odd is None else dict.fromkeys(tops[1], self.odd)
        logprobs = [{str(token): {"logprob": value} for token, value in top.items()} for top in tops]
        choice = {"prompt_token_ids": body["prompt"], "prompt_logprobs": [None, {"5": {"logprob": -1.0}}, *logprobs]}
        return 200, {"choices": [choice]}

    def _row(self, body: dict[str, Any]) -> SealedRow | None:
        for row in seal().rows:
            if body.get("messages") == row.messages or body.get("prompt") in (row.prompt, [*row.prompt, *row.answer]):
                return row
        return None


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.owner = endpoint  # type: ignore[attr-defined]
        endpoint.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield endpoint
        server.shutdown()
        thread.join()


class Clock:
    """Each reading is `step` after the one before."""

    def __init__(self, step: timedelta) -> None:
        self.time, self.step = datetime(2026, 11, 23, 12, tzinfo=UTC), step

    def __call__(self) -> datetime:
        self.time += self.step
        return self.time


def context(memory: Memory, step: timedelta = timedelta(0), **more: Any) -> Context:
    return context_with(SETTINGS, Clock(step), storage=memory, endpoint=requests.Session(), **more)


def bucket(run: str = RUN, key: str = "") -> Memory:
    """A runs bucket with a committed model and its seal, proved with the run's key; without `key`, of a new run."""
    memory, data = Memory(), seal().model_dump_json().encode()
    if not key:
        now = datetime.now(UTC)
        history = [Transition(state=RunState.ACCEPTED, time=now)]
        store = RunStore(memory, SETTINGS.runs_bucket)
        assert store.create(
            Record(run=run, name=MODEL, source="s", state=RunState.ACCEPTED, created=now, history=history)
        )
        key = store.key(run)
    file = ArtifactFile(path=f"attempt-1/{SEAL}", size=len(data), sha256=hashlib.sha256(data).hexdigest(), crc32c="")
    source = Source(uri="u", revision="r")
    manifest = Manifest(
        run=run,
        attempt=1,
        created=datetime.now(UTC),
        spec_sha256="0" * 64,
        base=source,
        dataset=source,
        metrics={},
        files=[file],
        serve_path="attempt-1/model",
        versions={},
    )
    path = model_prefix(run) + MANIFEST
    proved = with_proof(key, path, json.loads(manifest.model_dump_json(exclude={"proof"})))
    memory.objects |= {model_prefix(run) + f"attempt-1/{SEAL}": (data, 1), path: (proved, 1)}
    return memory


def test_rows_are_compared_once_however_many_calls_it_takes(endpoint: Endpoint) -> None:
    memory, parity, calls = bucket(), None, 0
    while parity is None or not parity.is_over:
        # A call has three minutes. The clock is read once before the first row, and after each row.
        parity, error = compare(context(memory, timedelta(seconds=100)), RUN, parity, endpoint.url, MODEL)
        assert error is None
        calls += 1
    assert (parity.state, parity.rows, parity.tokens, calls) == ("sealed", ROWS, 2 * ROWS, 3)
    assert endpoint.asked == [1, 2, 3, 4, 5]
    assert parity.links == LINKS
    at_once, _ = compare(context(memory), RUN, None, endpoint.url, MODEL)
    assert at_once == parity


def test_an_endpoint_that_is_down_keeps_what_was_compared(endpoint: Endpoint) -> None:
    memory = bucket()
    endpoint.down = {3}
    parity, error = compare(context(memory), RUN, None, endpoint.url, MODEL)
    assert error is not None
    assert (error.error_class, parity.state, parity.rows) == (ErrorClass.TRANSIENT, "checking", 2)
    endpoint.down = set()
    parity, error = compare(context(memory), RUN, parity, endpoint.url, MODEL)
    assert (error, parity.state, endpoint.asked) == (None, "sealed", [1, 2, 3, 4, 5])


def test_a_difference_is_final(endpoint: Endpoint) -> None:
    """A call whose answer was lost is repeated: it must not make the endpoint ready."""
    memory = bucket()
    endpoint.wrong = {4}
    first, error = compare(context(memory), RUN, None, endpoint.url, MODEL)
    assert error is not None
    assert (error.error_class, first.state, first.rows) == (ErrorClass.PARITY, "failed", 3)
    assert "row 4, token 1 of the answer" in first.reason
    endpoint.wrong = set()
    again, repeated = compare(context(memory), RUN, first, endpoint.url, MODEL)
    assert again == first
    assert repeated is not None
    assert (repeated.error_class, repeated.message) == (ErrorClass.PARITY, error.message)


def test_another_answer_to_the_same_ids_is_refused_with_its_cause(endpoint: Endpoint) -> None:
    """All probabilities are right: only the answer of the chat shows a default that samples."""
    endpoint.chats = {3}
    parity, error = compare(context(bucket()), RUN, None, endpoint.url, MODEL)
    assert error is not None
    assert (error.error_class, parity.state, parity.rows) == (ErrorClass.PARITY, "failed", 2)
    assert "row 3, token 1 of the answer" in error.message
    assert "sampling defaults that the evaluation did not use" in error.message


def test_other_probabilities_alone_are_refused_with_the_token_that_differs_most(endpoint: Endpoint) -> None:
    """All likeliest tokens are right, as after a rounding to few bits. Several calls compare the rows."""
    memory, parity, error = bucket(), None, None
    endpoint.rounded = {2}
    while parity is None or not parity.is_over:
        parity, error = compare(context(memory, timedelta(seconds=100)), RUN, parity, endpoint.url, MODEL)
    assert error is not None
    assert (error.error_class, parity.state) == (ErrorClass.PARITY, "failed")
    expected = (
        "most in row 2, token 2 of the answer: token id 8 has a probability of 0.7788, and 0.8187 by the exported "
        "model; likely cause: dtype, quantisation, or the adapter's scale"
    )
    assert error.message.endswith(expected), error.message


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e6, 0.5])
def test_a_log_probability_that_cannot_be_is_a_difference(endpoint: Endpoint, odd: float) -> None:
    """NaN is neither above nor below a limit: it must not pass. The likeliest tokens are right."""
    endpoint.rounded, endpoint.odd = {2}, odd
    parity, error = compare(context(bucket()), RUN, None, endpoint.url, MODEL)
    assert error is not None
    assert (error.error_class, parity.state, parity.rows) == (ErrorClass.PARITY, "failed", 1)
    assert f"row 2 could not be compared: /v1/completions has a log-probability of {odd}" in error.message


def test_a_model_without_a_seal_is_served_unsealed(endpoint: Endpoint) -> None:
    memory = bucket()
    del memory.objects[model_prefix(RUN) + MANIFEST]
    parity, error = compare(context(memory), RUN, None, endpoint.url, MODEL)
    assert (parity.state, error) == ("unsealed", None)
    assert parity.reason
    assert endpoint.asked == []


@dataclass
class Server:
    """A platform whose endpoint exists already."""

    url: str

    def price(self, spec: Any, placement: int | None = None) -> HourlyPrice:
        return HourlyPrice(1.0, None, "a test")

    def resources(self, deployment: Any) -> list[Any]:
        return [SimpleNamespace(kind="run.googleapis.com/Service", name="endpoint")]

    def region(self, deployment: Any) -> str:
        return "us-central1"

    def deploy(self, cloud: Any, deployment: Any) -> str:
        return self.url


class Publisher:
    """Takes every message."""

    def publish(self, *arguments: Any, **attributes: Any) -> Any:
        return SimpleNamespace(result=lambda timeout=None: "id")


def deployed(endpoint: Endpoint, calls: int) -> tuple[Any, Any]:
    """The last answer of `calls` calls of stage deploy, and the run's record."""
    memory = Memory()
    store = RunStore(memory, SETTINGS.runs_bucket)
    run = make_run(store, SPEC)
    memory.objects |= bucket(run, store.key(run)).objects
    platforms = Platforms(server=lambda kind: Server(endpoint.url))  # type: ignore[arg-type,return-value]
    more = {"platforms": platforms, "publisher": Publisher()}
    for _ in range(calls):
        answer = deploy(context(memory, timedelta(seconds=10), **more), run, ME)
    return answer, store.record(run)


def test_deploy_notes_the_comparison_and_its_links(endpoint: Endpoint) -> None:
    answer, record = deployed(endpoint, 1)
    assert answer.status == "READY"
    assert record.parity is not None
    assert (record.parity.state, record.parity.rows, record.parity.links) == ("sealed", ROWS, LINKS)


@pytest.mark.parametrize("calls", [1, 2])
def test_deploy_fails_an_endpoint_that_differs_also_when_it_is_called_again(endpoint: Endpoint, calls: int) -> None:
    endpoint.wrong = {2}
    answer, record = deployed(endpoint, calls)
    assert (answer.status, answer.error.error_class) == ("FAILED", ErrorClass.PARITY)
    assert record.endpoint is None
    assert isinstance(record.parity, Parity)
    assert (record.parity.state, record.parity.rows) == ("failed", 1)
