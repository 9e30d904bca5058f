"""A named endpoint of a test, and clients that ask it all the time."""

from __future__ import annotations

import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.error import HTTPError

from google.api_core.exceptions import NotFound
from openai import DefaultHttpxClient, OpenAI, OpenAIError

from dropforge.base import names
from dropforge.base.clock import Clock
from dropforge.base.errors import NotFound as NoRecord
from dropforge.cloud.dns import find_record
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.endpoints.store import EndpointStore
from dropforge.platforms.serving import endpoint_key
from dropforge.run.record import RunState

from ..deployments import clients, here
from .clusters import Clusters
from .conftest import User

OPERATIONS = "dropforge-operations"
KINDS = ("cloud_run", "gke")  # the platforms whose named endpoints keep the revision before
EVERY = (*KINDS, "tpu_vm")  # the platforms with named endpoints
ZONE = "us-west4-a"  # of endpoints on TPU VMs
PARTS = 10  # of a stream: a second
PAUSE_SECONDS = 0.2  # after each answer of a Load: without a pause, its clients take every core
ENDED = tuple(state for state in RolloutState if state.is_terminal)


class Named:
    """A named endpoint that only one test uses, on one of EVERY."""

    def __init__(self, user: User, name: str = "", kind: str = "cloud_run") -> None:
        self.user = user
        self.kind = kind
        self.name = name or f"e-{uuid.uuid4().hex[:8]}"
        self.store = EndpointStore(user.store, Clock())

    @property
    def record(self) -> EndpointRecord:
        return self.store.record(self.name)

    @property
    def place(self) -> dict[str, str]:
        """The field of `serve` that says where, for a type whose place does not follow from the target."""
        return {"zone": ZONE} if self.kind == "tpu_vm" else {}

    def put(self, behave: str = "succeed", **serve: Any) -> str:
        """Drop a spec whose model gets behind the name; return its run."""
        serve = {"type": self.kind, "endpoint": self.name, **self.place, **serve}
        return self.user.drop(self.user.spec(behave, serve=serve))

    def serves(self, behave: str = "succeed", **serve: Any) -> EndpointRecord:
        """Put a model behind the name and wait until it serves."""
        record = self.user.wait(self.put(behave, **serve))
        assert record.state is RunState.SUCCEEDED, record.error
        return self.record

    def ask(self, topic: str = OPERATIONS, **change: Any) -> str:
        """Publish a change; return the id of its rollout."""
        key = uuid.uuid4().hex
        self.user.publish(topic, json.dumps(change).encode(), idempotency_key=key)
        return names.rollout_id(topic, key)

    def ended(self, rollout: str) -> Rollout:
        """Wait until a rollout has ended."""
        return self.reached(rollout, *ENDED)

    def reached(self, rollout: str, *states: RolloutState) -> Rollout:
        found: Rollout | None = None

        def has_reached() -> bool:
            nonlocal found
            with suppress(NoRecord):
                found = self.record.find(rollout)
            return found is not None and found.state in (*states, *ENDED)

        self.user.until(has_reached)
        assert found is not None
        return found

    @property
    def paid(self) -> set[int]:
        """The numbers of the revisions that may cost money once no rollout is under way."""
        record = self.record
        return {record.stable, record.previous} - {0} if self.kind == "gke" else {record.stable}

    def machines(self) -> list[str]:
        """The full names of the nodes of an endpoint on TPU VMs."""
        parent = f"projects/{self.user.settings.project}/locations/{ZONE}"
        nodes = clients.tpu().list_nodes(parent=parent)
        return [node.name for node in nodes if node.labels.get(names.ENDPOINT_LABEL) == self.name]

    def service(self) -> Any:
        """The service of the endpoint in the cloud, or on GKE all its objects; None if there is none."""
        if self.kind == "gke":
            return Clusters(self.user.info).of_endpoint(self.name) or None
        if self.kind == "tpu_vm":
            return find_record(here().cloud, self.record.service) or self.machines() or None
        try:
            return clients.run_services().get_service(name=self.record.service)
        except NotFound:
            return None

    def shares(self) -> dict[str, int]:
        """The percent of each revision with requests, as the platform has it."""
        if self.kind == "gke":
            route = Clusters(self.user.info).get(self.record.service)
            assert route is not None
            references = route["spec"]["rules"][0]["backendRefs"]
            return {each["name"]: each["weight"] for each in references if each["weight"]}
        return {each.revision: each.percent for each in self.service().traffic if each.percent}

    def revisions(self) -> set[str]:
        """The short names of the revisions that the cloud has."""
        if self.kind == "gke":
            listed = Clusters(self.user.info).of_endpoint(self.name)
            return {name.rpartition("/")[2] for name in listed if "/deployments/" in name}
        if self.kind == "tpu_vm":
            return {name.rpartition("/")[2] for name in self.machines()}
        listed = clients.run_revisions().list_revisions(parent=self.record.service)
        return {revision.name.rpartition("/")[2] for revision in listed}

    def destroy(self) -> None:
        """Delete the endpoint as a person does in the console."""
        if self.kind == "gke":
            for name in Clusters(self.user.info).of_endpoint(self.name):
                with suppress(HTTPError):  # a pod may go with its Deployment
                    Clusters(self.user.info).delete(name)
            self.user.until(lambda: self.service() is None)
        elif self.kind == "tpu_vm":
            for name in self.machines():
                queued = name.replace("/nodes/", "/queuedResources/")
                clients.tpu().delete_queued_resource({"name": queued, "force": True}).result(timeout=60)
        else:
            clients.run_services().delete_service(name=self.record.service).result(timeout=60)

    @property
    def token(self) -> str:
        """The token that a request needs."""
        spec = self.user.store.spec(self.record.revisions[-1].run)
        return endpoint_key(here().cloud, spec) or self.user.info.environment["DROPFORGE_EMULATOR_TOKEN"]

    def client(self) -> OpenAI:
        base_url = self.record.base_url
        return OpenAI(base_url=base_url, api_key=self.token, max_retries=0, timeout=60, http_client=Http())

    def answer(self) -> str:
        """Ask once; return the cloud's name of the revision that has answered."""
        messages: Any = [{"role": "user", "content": "Hello"}]
        found = self.client().chat.completions.create(model=self.name, messages=messages).system_fingerprint
        assert found is not None
        return found

    def retire(self) -> None:
        assert self.ended(self.ask(retire=self.name)).state is RolloutState.RETIRED


class Http(DefaultHttpxClient):
    """The OpenAI client's own HTTP client, but without the machine's certificates, which take 40 ms for each client.

    The endpoints of a stack speak HTTP.
    """

    def __init__(self) -> None:
        super().__init__(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def __del__(self) -> None:
        self.close()


def is_told(named: Named, run: str, headline: str) -> bool:
    """Wait until Slack has a message about a run, wherever it stands among the others; whether it has it once."""
    named.user.until(lambda: headline in named.user.slack(run, ""))
    return named.user.slack(run, "").count(headline) == 1


@contextmanager
def repeated(ask: Callable[[], object], pause_seconds: float) -> Iterator[None]:
    """Let a thread ask again and again, with a pause before each time."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(pause_seconds):
            ask()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Load:
    """Clients that ask an endpoint all the time: two by whole answers, with a pause after each, and two by streams."""

    def __init__(self, named: Named, model: str = "", pause_seconds: float = PAUSE_SECONDS) -> None:
        self._model = model or named.name
        self._pause_seconds = pause_seconds
        self._client = named.client()
        self._stop = threading.Event()
        self.problems: list[str] = []
        self.streams = 0
        self.answers: list[str] = []  # the revision of each answer, in the order of their ends

    @contextmanager
    def running(self) -> Iterator[Load]:
        with ThreadPoolExecutor(4) as threads:
            works = [threads.submit(self._repeat, work) for work in (self._ask, self._ask, self._stream, self._stream)]
            try:
                yield self
            finally:
                self._stop.set()
            for work in works:
                work.result()

    def has_seen(self, revision: str, times: int = 5) -> bool:
        """Whether the last answers are from a revision."""
        return self.answers[-times:] == [revision] * times

    def _repeat(self, ask: Callable[[], str]) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(ask())
            except (OpenAIError, AssertionError) as error:
                self.problems.append(repr(error))

    def _ask(self) -> str:
        messages: Any = [{"role": "user", "content": "Hello"}]
        answer = self._client.chat.completions.create(model=self._model, messages=messages)
        assert answer.choices[0].message.content == "ok", answer
        self._stop.wait(self._pause_seconds)
        return str(answer.system_fingerprint)

    def _stream(self) -> str:
        messages: Any = [{"role": "user", "content": "Hello"}]
        chunks = list(
            self._client.chat.completions.create(model=self._model, messages=messages, stream=True, max_tokens=PARTS)
        )
        parts = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert (parts, ends) == (["ok"] * PARTS, ["stop"]), (parts, ends)
        assert len({chunk.system_fingerprint for chunk in chunks}) == 1
        self.streams += 1
        return str(chunks[0].system_fingerprint)
