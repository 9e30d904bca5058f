"""The clients of a simulated container: its token comes from the real function `access`, and is its only right.

A client repeats what may pass as the session of a real container does (dropforge/cloud/retrying.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from google.api_core.exceptions import Forbidden, RetryError, Unauthorized
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import TransportError

from dropforge.cloud.classify import may_pass
from dropforge.cloud.retrying import FIRST_SECONDS, MOST_SECONDS, Retrying
from dropforge.cloud.run_access import RunCredentials
from dropforge.run.series import decoded
from dropforge_local.iam.boundary import boundary_of
from dropforge_local.iam.policy import described

from .events import Events
from .functions import Functions
from .storage import Storage, StoredObject
from .virtual_host import Program
from .world import World

T = TypeVar("T")
RENEWED_SECONDS = 225.0  # google-auth renews a token that has less time left
_LIST_PREFIX = "storage.googleapis.com/objectListPrefix"


class _Refused(Exception):
    """The service answers 429 or 5xx."""


class VirtualRetrying(Retrying):
    """Waits in simulated time."""

    def __init__(self, world: World, environment: Mapping[str, str]) -> None:
        super().__init__(environment, clock=lambda: world.now)
        self._world = world

    def __call__(self, call: Callable[[], T]) -> T:
        wait, until = FIRST_SECONDS, self._world.now + self._seconds_left()
        while True:
            try:
                return call()
            except Exception as error:
                if not may_pass(error):
                    raise
                pause = self._world.random.uniform(0, 2 * wait)
                if self._world.now + pause > until:
                    raise RetryError("the time of the attempt is over", error) from error
                self._world.scheduler.wait(pause)
                wait = min(2 * wait, MOST_SECONDS)


class ContainerClients:
    """dropforge.cloud.clients.Clients of a training container."""

    def __init__(
        self,
        program: Program,
        environment: Mapping[str, str],
        functions: Functions,
        storage: Storage,
        events: Events,
        account: str,
    ) -> None:
        self.environment = environment
        self._account = account
        self.world = program.world
        self.retrying = VirtualRetrying(program.world, environment)
        self._functions, self._events = functions, events
        self._credentials = RunCredentials(environment, AnonymousCredentials(), self.retrying, program.host.threads)
        self._storage = _OwnStorage(self, storage)
        self._ends = 0.0  # when the token ends

    def storage(self) -> Any:
        return self._storage

    def publisher(self) -> Any:
        return self

    def run_spec(self) -> Any:
        self.renew()
        return self._credentials.spec(self._request)

    def renew(self) -> None:
        """Renew the token if it ends soon."""
        if self.world.now > self._ends - RENEWED_SECONDS:
            self._credentials.token = None  # type: ignore[assignment]  # as google-auth has it before the first token
        self._credentials.present(self._request)

    def demand(self, permission: str, resource: str, attributes: dict[str, Any] | None = None) -> None:
        """Refuse what the container's token does not allow, as Cloud Storage does."""
        if self.world.now > self._ends:
            raise Unauthorized("the token has expired")
        if not boundary_of(str(self._credentials.token)).allows(permission, described(resource, attributes or {})):
            self.world.fact("forbidden", permission=permission, resource=resource)
            raise Forbidden(f"no {permission} on {resource}")

    def publish(self, topic: str, data: bytes, timeout: float = 0, **attributes: str) -> Any:
        """PublisherClient.publish; its future."""
        event = json.loads(data)

        def accept() -> str:
            about = {key: event[key] for key in ("run", "attempt", "sequence", "type")}
            resumed = {"resumed": event["resumed_step"]} if event["type"] == "started" else {}
            failed = {"error_class": event["error_class"]} if event["type"] == "failed" else {}
            self.world.fact("told", **about, step=event.get("step"), **resumed, **failed)
            self._events.job_message(event, data, attributes, self._key)
            return "sent"

        def send() -> str:
            return self.world.effect("pubsub.publish job-events", accept, changes=True)

        return SimpleNamespace(result=lambda timeout=None: self.retrying(send))

    @property
    def _key(self) -> str:
        return self.environment["DROPFORGE_RUN_KEY"]

    def _request(
        self, url: str, method: str = "GET", body: bytes = b"", headers: Mapping[str, str] | None = None, **_: Any
    ) -> Any:
        """google.auth.transport.Request: of the metadata server, and of the function `access`."""
        is_access = url == self.environment["DROPFORGE_ACCESS_URL"]
        try:
            return self.world.effect(
                "access" if is_access else "metadata.identity",
                (lambda: self._access(body, headers or {})) if is_access else self._identity,
                error=lambda timed_out: TransportError("timed out") if timed_out else _Refused(),
            )
        except _Refused:
            return SimpleNamespace(status=(429, 500, 503)[self.world.id() % 3], data=b"a fault")

    def _identity(self) -> Any:
        claims = base64.urlsafe_b64encode(json.dumps({"email": self._account}).encode()).decode().rstrip("=")
        return SimpleNamespace(status=200, data=f"head.{claims}.signature".encode())

    def _access(self, body: bytes, headers: Mapping[str, str]) -> Any:
        status, granted = self._functions.ask("access", json.loads(body), headers)
        if status == 200:
            self._ends = self.world.now + granted["expires_in"]
        return SimpleNamespace(status=status, data=json.dumps(granted).encode())


class _Asking:
    """The world of a container's storage: each call of it has a token, and is repeated while its error may pass."""

    def __init__(self, clients: ContainerClients) -> None:
        self._clients = clients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients.world, name)

    def effect(self, name: str, action: Callable[[], T], **options: Any) -> T:
        def ask() -> T:
            self._clients.renew()
            return self._clients.world.effect(name, action, **options)

        return self._clients.retrying(ask)


class _OwnStorage(Storage):
    """Cloud Storage with the rights of a container's token."""

    def __init__(self, clients: ContainerClients, storage: Storage) -> None:
        super().__init__(_Asking(clients), ())  # type: ignore[arg-type]  # it has all that a client uses of a world
        self.objects = storage.objects
        self._clients, self._of_cloud = clients, storage

    def put(self, bucket: str, name: str, data: bytes, *arguments: Any, **options: Any) -> int:
        self._demand("create", bucket, name)
        if name in self.objects[bucket]:
            self._demand("delete", bucket, name)
        if "/series/" in name:
            self._tell_point(data)
        return self._of_cloud.put(bucket, name, data, *arguments, **options)

    def get(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        self._demand("get", bucket, name)
        return self._of_cloud.get(bucket, name, generation)

    def remove(self, bucket: str, name: str) -> None:
        self._demand("delete", bucket, name)
        self._of_cloud.remove(bucket, name)

    def _names(self, bucket: str, prefix: str) -> Any:
        self._clients.demand("storage.objects.list", f"projects/_/buckets/{bucket}", {_LIST_PREFIX: prefix})
        return self._of_cloud._names(bucket, prefix)

    def _demand(self, verb: str, bucket: str, name: str) -> None:
        self._clients.demand(f"storage.objects.{verb}", f"projects/_/buckets/{bucket}/objects/{name}")

    def _tell_point(self, data: bytes) -> None:
        """Record the last point of a series, which is written next."""
        environment = self._clients.environment
        run, attempt = environment["DROPFORGE_RUN"], int(environment["DROPFORGE_ATTEMPT"])
        series = decoded(data, run, attempt)
        if series is not None:
            about = {"run": run, "attempt": attempt, "sequence": self.world.id(), "type": "progress"}
            self.world.fact("told", **about, step=series.step[-1])
