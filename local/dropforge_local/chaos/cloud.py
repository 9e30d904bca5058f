"""The whole simulated cloud: every client of clients.py that the control plane uses, over one world."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import requests
from google.api_core.exceptions import NotFound

from dropforge.base.settings import Settings
from dropforge.platforms.lookup import Platforms

from .cloudrun import CloudRun
from .disks import Disks
from .events import Events
from .functions import Functions, event_of
from .gke import STANDING, Gke
from .seam import context_of
from .storage import Storage
from .tpu import Tpu
from .trainer import Trainer
from .workflows import WORKFLOW, Post, Workflows
from .world import LOCATION, PROJECT, World

SPECS, RUNS = "chaos-specs", "chaos-runs"
REQUESTS, TEAM_REQUESTS, OPERATIONS = "requests", "requests-team", "operations"
SUBSCRIBERS = {**dict.fromkeys((REQUESTS, TEAM_REQUESTS, OPERATIONS), "on_spec_message"), "job-events": "on_job_event"}
TOKEN_SECONDS = 3600  # that a token of the Security Token Service lives
ACCESS_URL = "https://access.chaos"
SECRETS = {"slack-webhook": b"https://slack.chaos/hook"}


def deployment(policy: str = "", access_url: str = "") -> Settings:
    """The settings that Terraform would set, with this policy as JSON, and with the address of `access`."""
    return Settings(
        project=PROJECT,
        location=LOCATION,
        specs_bucket=SPECS,
        runs_bucket=RUNS,
        workflow=WORKFLOW.rsplit("/", 1)[1],
        requests_topic=REQUESTS,
        operations_topic=OPERATIONS,
        job_events_topic="job-events",
        run_events_topic="run-events",
        train_trl_image="train",
        serve_vllm_image="serve",
        train_maxtext_image="train-tpu",
        train_ray_image="train-ray",
        serve_vllm_tpu_image="serve-tpu",
        trainer_service_account="trainer@chaos",
        server_service_account="server@chaos",
        nodes_service_account="nodes@chaos",
        gke_cluster=STANDING,
        slack_webhook_secret="slack-webhook",
        policy=policy,
        access_url=access_url,
    )


class Platform(Protocol):
    """A service that has machines."""

    def clients(self) -> dict[str, Callable[..., Any]]:
        """The simulated clients, by their names in clients.py."""

    def living(self) -> list[str]:
        """Every resource that exists."""

    def answers(self, url: str) -> bool:
        """Whether what serves at a URL would answer a request."""


class Services(NamedTuple):
    """The constructors of the services that have quotas in another simulation (limited.py)."""

    functions: Callable[[World], Functions] = Functions
    events: Callable[[World, Functions, Mapping[str, str]], Events] = Events
    storage: Callable[[World, tuple[str, ...]], Storage] = Storage
    workflows: Callable[[World, Post], Workflows] = Workflows
    run: Callable[[World], CloudRun] = CloudRun
    trainer: Callable[[World, Functions, Storage, Events, str], Trainer] = Trainer


class Cloud:
    """The services, connected with each other. `clusters` are the regions with a standing GKE cluster."""

    def __init__(
        self,
        world: World,
        clusters: tuple[str, ...] = (),
        policy: str = "",
        services: Services | None = None,
        access_url: str = "",
        platforms: Platforms | None = None,
    ) -> None:
        make = services or Services()
        self.world = world
        self.secrets = dict(SECRETS)
        self.functions = make.functions(world)
        self.events = make.events(world, self.functions, SUBSCRIBERS)
        self.storage = make.storage(world, (SPECS, RUNS))
        self.storage.uploaded = self._uploaded
        self.storage.deleted = self._deleted
        self.workflows = make.workflows(world, self.functions.post)
        self.trainer = make.trainer(world, self.functions, self.storage, self.events, RUNS)
        disks, run = Disks(world), make.run(world)
        self.tpu = tpu = Tpu(world, disks, self.storage, self.events)
        gke = Gke(world, clusters)
        run.launched = tpu.launched = gke.launched = self.trainer.start
        run.serving = self.trainer.serve
        self.platforms: tuple[Platform, ...] = (run, tpu, disks, gke)
        self.functions.connect(context_of(world, self.clients(), deployment(policy, access_url), platforms))

    def clients(self) -> dict[str, Callable[..., Any]]:
        """By the names of clients.py, and Slack's."""
        none = SimpleNamespace
        platforms = {name: make for platform in self.platforms for name, make in platform.clients().items()}
        return {
            **platforms,
            "storage": lambda: self.storage,
            "publisher": lambda: self.events,
            "bounded_token": self._bounded_token,
            "secrets": lambda: none(get_secret_version=self._secret, access_secret_version=self._secret),
            "workflow_executions": lambda: self.workflows,
            "callbacks": lambda: none(post=lambda url, **_: self.workflows.call_back(url)),
            "endpoint": lambda audience, key="": none(post=self._complete, get=self._is_healthy),
            "hub": lambda: none(config=self._no_config),
            "slack": self._webhook,
        }

    def living(self) -> list[str]:
        """Every resource that exists."""
        return [name for platform in self.platforms for name in platform.living()]

    def sweep(self) -> None:
        """Call the sweep as Cloud Scheduler does, which ignores the answer."""
        self.functions.post("sweep", {}, lambda _: None)

    def _uploaded(self, bucket: str, name: str, generation: int, size: int) -> None:
        if bucket == SPECS:
            data = self._data(bucket, name, generation, size)
            about = {"object": name, "generation": str(generation)}
            self.events.send("on_spec_uploaded", event_of(_source(bucket), data), about, may_drop=True)

    def _deleted(self, bucket: str, name: str, generation: int) -> None:
        if bucket == SPECS:
            data = self._data(bucket, name, generation, 0)
            about = {"object": name, "message": f"deleted {generation}"}
            self.events.send("on_spec_deleted", event_of(_source(bucket), data), about)

    def _data(self, bucket: str, name: str, generation: int, size: int) -> dict[str, Any]:
        """The data of an event about an object."""
        return {"bucket": bucket, "name": name, "generation": str(generation), "size": str(size)}

    def _bounded_token(self, boundary: dict[str, Any]) -> tuple[str, int]:
        """A token of the Security Token Service; its text is its boundary."""
        token = json.dumps(boundary)
        return self.world.effect("sts", lambda: (token, TOKEN_SECONDS))

    def _no_config(self, source: str, revision: str) -> bytes:
        raise OSError("the simulated cloud has no Hub")

    def _secret(self, name: str, timeout: float) -> Any:
        def read() -> Any:
            secret = name.split("/")[3]
            if secret not in self.secrets:
                raise NotFound(f"Secret [{secret}] not found or has no versions.")
            data = self.secrets[secret]
            return SimpleNamespace(state=SimpleNamespace(name="ENABLED"), payload=SimpleNamespace(data=data))

        return self.world.effect("secrets.get", read)

    def _complete(self, url: str, **_: Any) -> Any:
        """POST of a completion to an endpoint."""

        def answer() -> Any:
            endpoint = url.removesuffix("/v1/chat/completions")
            if not self._answers(endpoint):
                return SimpleNamespace(status_code=503, text="not ready", json=dict)
            self.world.fact("completion", url=endpoint)
            return SimpleNamespace(status_code=200, text="", json=lambda: {"choices": [{"message": {}}]})

        return self.world.effect("endpoint", answer, error=_broken)

    def _is_healthy(self, url: str, **_: Any) -> Any:
        """GET of an endpoint's health."""

        def answer() -> Any:
            return SimpleNamespace(ok=self._answers(url.removesuffix("/health")))

        return self.world.effect("endpoint.health", answer, error=_broken)

    def _answers(self, url: str) -> bool:
        return any(platform.answers(url) for platform in self.platforms)

    def _webhook(self, url: str, **_: Any) -> Any:
        """slack_sdk.WebhookClient."""

        def accept(text: str, blocks: list[dict[str, Any]]) -> Any:
            status = self._slack_status(url)
            event_id = blocks[-1]["elements"][0]["text"].rsplit(" · ", 1)[1]
            self.world.fact("slack", event=event_id, text=text, status=status)
            return SimpleNamespace(status_code=status, body="ok" if status == 200 else "down")

        def send(text: str, blocks: list[dict[str, Any]], unfurl_links: bool, unfurl_media: bool) -> Any:
            return self.world.effect(
                "slack", lambda: accept(text, blocks), changes=True, error=lambda _: TimeoutError("timed out")
            )

        return SimpleNamespace(send=send)

    def _slack_status(self, url: str) -> int:
        """The status of Slack's answer to a message for a webhook."""
        return 503 if self.world.happens(self.world.faults.slack_down) else 200


def _source(bucket: str) -> str:
    return f"//storage.googleapis.com/projects/_/buckets/{bucket}"


def _broken(timed_out: bool) -> Exception:
    return requests.ConnectionError("connection reset")
