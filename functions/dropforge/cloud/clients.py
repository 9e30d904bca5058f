"""The one place where clients of other services are made. It reads emulator endpoints from the environment; no other
module does.

    STORAGE_EMULATOR_HOST          http://host:port   (the client library's own variable)
    PUBSUB_EMULATOR_HOST           host:port          (the client library's own variable)
    CLOUD_RUN_EMULATOR_HOST        http://host:port
    GKE_EMULATOR_HOST              http://host:port   (each cluster names the address of its Kubernetes API)
    TPU_EMULATOR_HOST              http://host:port
    COMPUTE_EMULATOR_HOST          http://host:port
    SECRET_MANAGER_EMULATOR_HOST   http://host:port
    STS_EMULATOR_HOST              http://host:port   (the Security Token Service)
    METADATA_EMULATOR_HOST         http://host:port   (the metadata server's identity tokens)
    WORKFLOWS_EMULATOR_HOST        host:port          (gRPC: the executions client has no REST transport)
    SLACK_EMULATOR_HOST            http://host:port   (the Web API; a webhook is a whole URL in its secret)
    GITHUB_EMULATOR_HOST           http://host:port/path
    WEBHOOK_EMULATOR_HOST          http://host:port   (the one address outside of the internet that a webhook may have)
    SMTP_EMULATOR_HOST             host:port          (the same for a mail server)
    TELEMETRY_EMULATOR_HOST        http://host:port   (Google Cloud's Telemetry API)
    MONITORING_EMULATOR_HOST       http://host:port   (Cloud Monitoring)
    DNS_EMULATOR_HOST              http://host:port   (Cloud DNS)
    DROPFORGE_EMULATOR_TOKEN       the bearer token that emulated endpoints, clusters and callbacks accept

Each SDK is imported when its client is first made: an import costs 0.3-0.6 s and 60-70 MB, and most functions need one
or two of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from .hub import Hub
from .retrying import FIRST_SECONDS, Retrying

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.auth.transport.requests import Request as AuthRequest
    from google.cloud import container_v1, pubsub_v1, run_v2, secretmanager_v1, storage, tpu_v2
    from google.cloud.workflows import executions_v1
    from kubernetes.client import ApiClient
    from slack_sdk import WebClient, WebhookClient

    from .run_access import RunCredentials
    from .sessions import GoogleSession, LeanSession, RetryingSession

# Bounds one request; the functions' own deadline is 540 s.
TIMEOUT_SECONDS = 30.0
PAIR_SECONDS = 0.005  # how long a message waits for another, so that one request sends both
TELEMETRY_API = "https://telemetry.googleapis.com"

_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
_SHORTEST_SECONDS = 240  # google-auth renews a token when it has less than 225 s left

_SILENT = logging.getLogger(f"{__name__}.slack")  # the SDK logs the webhook's URL, which is a secret
_SILENT.addFilter(lambda record: False)  # logging.config.dictConfig, which servers call, enables disabled loggers again


C = TypeVar("C", bound=Callable[..., Any])


def _once(make: C) -> C:
    """A method that makes its client on the first call and returns the same client afterwards."""

    name = make.__name__

    @wraps(make)
    def client(self: Clients) -> Any:
        if name not in self._made:
            with self._making:
                if name not in self._made:
                    self._made[name] = make(self)
        return self._made[name]

    return client  # type: ignore[return-value]


class Clients:
    """The clients of one process, each made on first use. `environment` names the emulators, if any.

    `retrying` is how a container of a run repeats what it asks.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, first_wait_seconds: float = FIRST_SECONDS) -> None:
        self.environment = environment
        self.retrying = Retrying(environment, first_wait_seconds)
        self.kubernetes = lru_cache(maxsize=8)(self._kubernetes)
        self._made: dict[str, Any] = {}
        self._making = RLock()  # a client may need another

    @_once
    def storage(self) -> storage.Client:
        """google.cloud.storage.Client. In a container of a run, it has the run's own token for the runs bucket."""
        from google.cloud import storage

        # Otherwise the client reads the bucket metadata for tracing after each 404: one more thread and request.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        if (run := self.run_credentials()) is not None:
            return storage.Client(project=self._project(), credentials=run, _http=self._run_session(run))
        if self.environment.get("STORAGE_EMULATOR_HOST"):
            from .sessions import loopback_session

            return storage.Client(project=self._project(), credentials=_anonymous(), _http=loopback_session())
        return storage.Client(project=self._project(), credentials=self._credentials(), _http=self._google())

    @_once
    def run_credentials(self) -> RunCredentials | None:
        """RunCredentials in a container that has access to the objects of its run; None elsewhere."""
        from .run_access import RunCredentials, has_access

        if not has_access(self.environment):
            return None
        own = _anonymous() if self.environment.get("STORAGE_EMULATOR_HOST") else self._credentials()
        return RunCredentials(self.environment, own, self.retrying)

    def run_token(self) -> tuple[str, int]:
        """The present token of the run's credentials, and its seconds to live. Raises what RunCredentials raises."""
        credentials = self.run_credentials()
        assert credentials is not None, "only a container that has access to its run asks"
        return credentials.present(self._run_request())

    def run_spec(self) -> Any:
        """The spec of the run, a JSON object, as the function `access` gave it; None if it gave none.

        Raises what RunCredentials raises.
        """
        credentials = self.run_credentials()
        return None if credentials is None else credentials.spec(self._run_request())

    def _run_session(self, credentials: RunCredentials) -> RetryingSession:
        from .sessions import RetryingSession

        session = RetryingSession(credentials, self.retrying, auth_request=self._run_request())
        session.trust_env = not self.environment.get("STORAGE_EMULATOR_HOST")
        return session

    def _run_request(self) -> AuthRequest:
        """The transport for requests for tokens; on the local stack, their servers are on loopback."""
        from google.auth.transport.requests import Request

        from .sessions import loopback_session

        return Request(loopback_session() if self.environment.get("STORAGE_EMULATOR_HOST") else None)

    def bounded_token(self, boundary: Mapping[str, Any]) -> tuple[str, int]:
        """An access token of this process's account within a Credential Access Boundary, and its seconds to live.

        https://cloud.google.com/iam/docs/downscoping-short-lived-credentials. Raises GoogleAuthError.
        """
        from google.auth.transport.requests import Request
        from google.oauth2.sts import Client

        from .sessions import loopback_session

        emulator = self.environment.get("STS_EMULATOR_HOST")
        service = Client(f"{emulator or 'https://sts.googleapis.com'}/v1/token")
        answer = service.exchange_token(
            Request(loopback_session()) if emulator else Request(),
            "urn:ietf:params:oauth:grant-type:token-exchange",
            self._bearer()(),
            _ACCESS_TOKEN,
            requested_token_type=_ACCESS_TOKEN,
            additional_options=boundary,
        )
        # Without expires_in, the token lives as long as its source token, which is valid for at least some minutes.
        return str(answer["access_token"]), int(answer.get("expires_in", _SHORTEST_SECONDS))

    @_once
    def publisher(self) -> pubsub_v1.PublisherClient:
        """A publisher that sends two messages in one request: each waits PAIR_SECONDS for another.

        The library sends a batch before the message that would be its last. In a container of a run, a thread of the
        library repeats a request that failed for the moment.
        """
        from google.cloud import pubsub_v1

        from .run_access import has_access

        options = pubsub_v1.types.PublisherOptions()
        if has_access(self.environment):
            options = options._replace(retry=self.retrying.policy())
        credentials = None if self.environment.get("PUBSUB_EMULATOR_HOST") else self._credentials()
        settings = pubsub_v1.types.BatchSettings(max_messages=3, max_latency=PAIR_SECONDS)
        return pubsub_v1.PublisherClient(settings, options, credentials=credentials)

    @_once
    def run_jobs(self) -> run_v2.JobsClient:
        """google.cloud.run_v2.JobsClient."""
        from google.cloud import run_v2

        return self._rest(run_v2.JobsClient, "CLOUD_RUN_EMULATOR_HOST")

    @_once
    def run_rest(self) -> tuple[LeanSession, str]:
        """A requests session that may call Cloud Run, and the URL below which its API is.

        For values that run_v2 does not know: its 0.16.2 lacks the medium DISK of an ephemeral disk.
        """
        endpoint = self.environment.get("CLOUD_RUN_EMULATOR_HOST", "https://run.googleapis.com")
        return self._session("CLOUD_RUN_EMULATOR_HOST"), f"{endpoint}/v2"

    @_once
    def run_executions(self) -> run_v2.ExecutionsClient:
        """google.cloud.run_v2.ExecutionsClient (executions of Cloud Run jobs)."""
        from google.cloud import run_v2

        return self._rest(run_v2.ExecutionsClient, "CLOUD_RUN_EMULATOR_HOST")

    @_once
    def run_tasks(self) -> run_v2.TasksClient:
        """google.cloud.run_v2.TasksClient."""
        from google.cloud import run_v2

        return self._rest(run_v2.TasksClient, "CLOUD_RUN_EMULATOR_HOST")

    @_once
    def run_services(self) -> run_v2.ServicesClient:
        """google.cloud.run_v2.ServicesClient."""
        from google.cloud import run_v2

        return self._rest(run_v2.ServicesClient, "CLOUD_RUN_EMULATOR_HOST")

    @_once
    def run_revisions(self) -> run_v2.RevisionsClient:
        """google.cloud.run_v2.RevisionsClient."""
        from google.cloud import run_v2

        return self._rest(run_v2.RevisionsClient, "CLOUD_RUN_EMULATOR_HOST")

    @_once
    def gke(self) -> container_v1.ClusterManagerClient:
        """google.cloud.container_v1.ClusterManagerClient."""
        from google.cloud import container_v1

        return self._rest(container_v1.ClusterManagerClient, "GKE_EMULATOR_HOST")

    @_once
    def tpu(self) -> tpu_v2.TpuClient:
        """google.cloud.tpu_v2.TpuClient."""
        from google.cloud import tpu_v2

        return self._rest(tpu_v2.TpuClient, "TPU_EMULATOR_HOST")

    @_once
    def compute(self) -> tuple[LeanSession, str]:
        """A requests session that may call Compute Engine, and the URL below which its API is.

        Three calls do not justify google-cloud-compute: 136 MiB of memory on import.
        """
        endpoint = self.environment.get("COMPUTE_EMULATOR_HOST", "https://compute.googleapis.com")
        return self._session("COMPUTE_EMULATOR_HOST"), f"{endpoint}/compute/v1"

    @_once
    def monitoring(self) -> tuple[LeanSession, str]:
        """A requests session that may call Cloud Monitoring, and the URL below which its API is: for one call."""
        endpoint = self.environment.get("MONITORING_EMULATOR_HOST", "https://monitoring.googleapis.com")
        return self._session("MONITORING_EMULATOR_HOST"), f"{endpoint}/v3"

    @_once
    def dns(self) -> tuple[LeanSession, str]:
        """A requests session that may call Cloud DNS, and the URL below which its API is: for three calls."""
        endpoint = self.environment.get("DNS_EMULATOR_HOST", "https://dns.googleapis.com")
        return self._session("DNS_EMULATOR_HOST"), f"{endpoint}/dns/v1"

    def authority_of(self, host: str, port: int) -> str:
        """host:port at which clients reach a server by a name of Cloud DNS.

        On the local stack nobody resolves such names: the emulator forwards connections from a port of its own.
        """
        emulator = self.environment.get("DNS_EMULATOR_HOST")
        if not emulator:
            return f"{host}:{port}"
        from .sessions import loopback_session

        query = {"host": host, "port": str(port)}
        answer = loopback_session().get(f"{emulator}/dns/_authority", params=query, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        return str(answer.json()["authority"])

    def _kubernetes(self, host: str, authority: str) -> ApiClient:
        """kubernetes.client.ApiClient for the API at `host`, an https URL, with a Google token that is never stale.

        `authority` is the certificate that signs the server's certificate, in PEM; "" if a public authority signs it.
        """
        from kubernetes import client
        from urllib3 import Retry

        configuration: Any = client.Configuration(host=host, ca_cert_data=authority or None)
        configuration.api_key = {"authorization": ""}  # without a key the client never calls the hook
        # The client repeats a request once after a broken connection, if the method is idempotent. Other retries are
        # off: the client would sleep as long as the server's Retry-After says.
        configuration.retries = Retry(1, status=0, redirect=0, respect_retry_after_header=False)
        bearer = self._bearer()

        def refresh(used: Any) -> None:  # the client calls it before each request
            used.api_key = {"authorization": f"Bearer {bearer()}"}

        configuration.refresh_api_key_hook = refresh
        return client.ApiClient(configuration)

    @_once
    def secrets(self) -> secretmanager_v1.SecretManagerServiceClient:
        """google.cloud.secretmanager_v1.SecretManagerServiceClient."""
        from google.cloud import secretmanager_v1

        return self._rest(secretmanager_v1.SecretManagerServiceClient, "SECRET_MANAGER_EMULATOR_HOST")

    @_once
    def workflow_executions(self) -> executions_v1.ExecutionsClient:
        """google.cloud.workflows.executions_v1.ExecutionsClient."""
        from google.cloud.workflows import executions_v1

        address = self.environment.get("WORKFLOWS_EMULATOR_HOST")
        if not address:
            return executions_v1.ExecutionsClient(credentials=self._credentials())
        import grpc
        from google.cloud.workflows.executions_v1.services.executions.transports import ExecutionsGrpcTransport

        return executions_v1.ExecutionsClient(transport=ExecutionsGrpcTransport(channel=grpc.insecure_channel(address)))

    @_once
    def callbacks(self) -> LeanSession:
        """A requests session that may call workflow callbacks (permission workflows.callbacks.send)."""
        return self._session("DROPFORGE_EMULATOR_TOKEN")

    def endpoint(self, audience: str, key: str = "") -> LeanSession:
        """A requests session for a served model: with its API key, or with a token for Cloud Run."""
        from .sessions import LeanSession, session_with

        token = key or self.endpoint_token(audience)
        return session_with(token) if token else LeanSession()

    def endpoint_token(self, audience: str) -> str:
        """A token of this process's account for a served model on Cloud Run; "" for a server that checks nothing."""
        if token := self.environment.get("DROPFORGE_EMULATOR_TOKEN"):
            return token
        if audience.startswith("http://"):  # the server checks nothing, and the network could read a token
            return ""
        from google.auth.transport.requests import Request
        from google.oauth2 import id_token

        return str(id_token.fetch_id_token(Request(), audience))

    def identity_token(self, audience: str) -> str:
        """A token of this process's account that only `audience` accepts, from the metadata server.

        https://cloud.google.com/run/docs/securing/service-identity#identity_tokens
        """
        if host := self.environment.get("METADATA_EMULATOR_HOST"):
            return self._emulated_identity(host, audience)
        from google.auth.transport.requests import Request
        from google.oauth2 import id_token

        return str(id_token.fetch_id_token(Request(), audience))

    @staticmethod
    def _emulated_identity(host: str, audience: str) -> str:
        import requests

        url = f"{host}/computeMetadata/v1/instance/service-accounts/default/identity"
        answer = requests.get(
            url, {"audience": audience}, headers={"Metadata-Flavor": "Google"}, timeout=TIMEOUT_SECONDS
        )
        answer.raise_for_status()
        return answer.text

    def hub(self) -> Hub:
        """The Hugging Face Hub."""
        return Hub(self.environment)

    def slack(self, webhook: str) -> WebhookClient:
        """slack_sdk.WebhookClient for the URL of an incoming webhook."""
        # Import the package first: a thread that imports only a module of the package does not wait for another thread
        # that imports the package, and then meets half-made modules ("cannot import name 'WebhookClient'").
        from slack_sdk import WebhookClient

        return WebhookClient(webhook, timeout=int(TIMEOUT_SECONDS), logger=_SILENT)

    def slack_bot(self, token: str) -> WebClient:
        """slack_sdk.WebClient for the token of a bot."""
        from slack_sdk import WebClient

        host = self.environment.get("SLACK_EMULATOR_HOST")
        base = f"{host}/slack/api/" if host else WebClient.BASE_URL
        return WebClient(token, base_url=base, timeout=int(TIMEOUT_SECONDS), logger=_SILENT)

    def github(self) -> tuple[str, str]:
        """The URL of GitHub's API, and host:port of its emulator, if there is one."""
        emulator = self.environment.get("GITHUB_EMULATOR_HOST", "")
        return emulator or "https://api.github.com", _address(emulator)

    def webhook_emulator(self) -> str:
        """host:port of the one server outside of the internet that a webhook may have; "" in the cloud."""
        return _address(self.environment.get("WEBHOOK_EMULATOR_HOST", ""))

    def smtp_emulator(self) -> str:
        """host:port of the one mail server outside of the internet; "" in the cloud."""
        return self.environment.get("SMTP_EMULATOR_HOST", "")

    def telemetry(self, endpoint: str) -> tuple[str, dict[str, str]]:
        """The base URL of a receiver of OTLP, and the headers for it: only Google's Telemetry API gets a token.

        That API asks for the project whose quota a request uses
        (https://cloud.google.com/stackdriver/docs/otlp/migrate-collector-to-otlp-exporters).
        """
        if endpoint != TELEMETRY_API:
            return endpoint, {}
        headers = {"Authorization": f"Bearer {self._bearer()()}", "x-goog-user-project": self._project() or ""}
        return self.environment.get("TELEMETRY_EMULATOR_HOST", endpoint), headers

    def _bearer(self) -> Callable[[], str]:
        """A function that returns an access token which is valid for some minutes at least."""
        if token := self.environment.get("DROPFORGE_EMULATOR_TOKEN"):
            return lambda: token
        from google.auth.transport.requests import Request

        credentials = self._credentials()

        def fresh() -> str:
            if not credentials.valid:  # becomes false shortly before the token expires
                credentials.refresh(Request())
            return str(credentials.token)

        return fresh

    def _project(self) -> str | None:
        return self.environment.get("DROPFORGE_PROJECT")

    def _rest(self, client: Any, variable: str) -> Any:
        """A client over gRPC in the cloud, or over plain HTTP to the emulator that `variable` names."""
        endpoint = self.environment.get(variable)
        if not endpoint:
            return client(credentials=self._credentials())
        made = client(transport="rest", credentials=_anonymous(), client_options={"api_endpoint": endpoint})
        made.transport._session.trust_env = False  # else it looks for proxies and netrc before each call
        return made

    def _session(self, variable: str) -> LeanSession:
        """The session for Google's APIs, or a session for the emulator that `variable` names."""
        if not self.environment.get(variable):
            return self._google()
        from .sessions import loopback_session

        return loopback_session(self.environment.get("DROPFORGE_EMULATOR_TOKEN", ""))

    @_once
    def _google(self) -> GoogleSession:
        """The session of all REST calls to Google: one pool of connections, one token."""
        from .sessions import GoogleSession

        return GoogleSession(self._credentials())  # type: ignore[call-arg]

    @_once
    def _credentials(self) -> Credentials:
        """The process's Google credentials: all clients share them, so one renewal of the token serves all.

        A container of a run has them from the metadata server. google.auth.default would look for others, and give up
        when that server does not answer within seconds.
        """
        import google.auth

        from .run_access import has_access

        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        if has_access(self.environment):
            from google.auth import compute_engine

            return compute_engine.Credentials(scopes=scopes)
        credentials, _ = google.auth.default(scopes=scopes)
        return credentials


def _address(url: str) -> str:
    """host:port of an emulator's URL, http://host:port or with a path."""
    return url.partition("://")[2].partition("/")[0]


def _anonymous() -> Credentials:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()
