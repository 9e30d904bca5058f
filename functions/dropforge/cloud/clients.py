"""The one place where Google clients are made. It reads emulator endpoints from the environment; nothing else does.

    STORAGE_EMULATOR_HOST          http://host:port   (the client library's own variable)
    PUBSUB_EMULATOR_HOST           host:port          (likewise)
    CLOUD_RUN_EMULATOR_HOST        http://host:port
    GKE_EMULATOR_HOST              http://host:port   (its clusters say themselves where their Kubernetes API is)
    TPU_EMULATOR_HOST              http://host:port
    COMPUTE_EMULATOR_HOST          http://host:port
    SECRET_MANAGER_EMULATOR_HOST   http://host:port
    WORKFLOWS_EMULATOR_HOST        host:port          (gRPC: the executions client has no REST transport)
    DROPFORGE_EMULATOR_TOKEN       the bearer token that emulated endpoints, clusters and callbacks accept

SDKs are imported on use: an import costs 0.3-0.6 s and 60-70 MB, and most functions need only one or two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

# Bounds one request; the functions' own deadline is 540 s.
TIMEOUT_SECONDS = 30.0
CONNECTIONS = 32  # that are kept: as many as a sweep has threads; of the ten by default most would be made anew


@cache
def storage() -> Any:
    """google.cloud.storage.Client."""
    from google.cloud import storage

    # Or it looks at the bucket, for tracing that nobody has switched on: a thread and a request after every 404.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(project=_project(), credentials=_anonymous(), _http=_loopback())
    import requests

    client = storage.Client(project=_project())
    client._http.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))
    return client


@cache
def publisher() -> Any:
    """A publisher that sends each message at once: our messages are few and somebody waits for them."""
    from google.cloud import pubsub_v1

    return pubsub_v1.PublisherClient(pubsub_v1.types.BatchSettings(max_messages=1))


@cache
def run_jobs() -> Any:
    """google.cloud.run_v2.JobsClient."""
    from google.cloud import run_v2

    return _rest(run_v2.JobsClient, "CLOUD_RUN_EMULATOR_HOST")


@cache
def run_executions() -> Any:
    """google.cloud.run_v2.ExecutionsClient (executions of Cloud Run jobs)."""
    from google.cloud import run_v2

    return _rest(run_v2.ExecutionsClient, "CLOUD_RUN_EMULATOR_HOST")


@cache
def run_tasks() -> Any:
    """google.cloud.run_v2.TasksClient."""
    from google.cloud import run_v2

    return _rest(run_v2.TasksClient, "CLOUD_RUN_EMULATOR_HOST")


@cache
def run_services() -> Any:
    """google.cloud.run_v2.ServicesClient."""
    from google.cloud import run_v2

    return _rest(run_v2.ServicesClient, "CLOUD_RUN_EMULATOR_HOST")


@cache
def gke() -> Any:
    """google.cloud.container_v1.ClusterManagerClient."""
    from google.cloud import container_v1

    return _rest(container_v1.ClusterManagerClient, "GKE_EMULATOR_HOST")


@cache
def tpu() -> Any:
    """google.cloud.tpu_v2.TpuClient."""
    from google.cloud import tpu_v2

    return _rest(tpu_v2.TpuClient, "TPU_EMULATOR_HOST")


@cache
def compute() -> tuple[Any, str]:
    """A requests session that may call Compute Engine, and the URL below which its API is.

    Three calls do not justify google-cloud-compute: 136 MiB of memory on import.
    """
    if endpoint := os.environ.get("COMPUTE_EMULATOR_HOST"):
        return _session(os.environ.get("DROPFORGE_EMULATOR_TOKEN", "")), f"{endpoint}/compute/v1"
    from google.auth.transport.requests import AuthorizedSession

    return AuthorizedSession(_credentials()), "https://compute.googleapis.com/compute/v1"


@lru_cache(maxsize=8)
def kubernetes(host: str, authority: str) -> Any:
    """kubernetes.client.ApiClient for the API at `host`, an https URL, with a Google token that is never stale.

    `authority` is the certificate that signs the server's, in PEM; "" for one that everybody trusts.
    """
    from kubernetes import client
    from urllib3 import Retry

    configuration: Any = client.Configuration(host=host, ca_cert_data=authority or None)
    configuration.api_key = {"authorization": ""}  # without a key it would never ask the hook for one
    # A broken connection is tried once more when that can do nothing twice. Nothing else is: the client would sleep as
    # long as the server's Retry-After says.
    configuration.retries = Retry(1, status=0, redirect=0, respect_retry_after_header=False)
    bearer = _bearer()

    def refresh(found: Any) -> None:  # the client calls it before each request
        found.api_key = {"authorization": f"Bearer {bearer()}"}

    configuration.refresh_api_key_hook = refresh
    return client.ApiClient(configuration)


@cache
def secrets() -> Any:
    """google.cloud.secretmanager_v1.SecretManagerServiceClient."""
    from google.cloud import secretmanager_v1

    return _rest(secretmanager_v1.SecretManagerServiceClient, "SECRET_MANAGER_EMULATOR_HOST")


@cache
def workflow_executions() -> Any:
    """google.cloud.workflows.executions_v1.ExecutionsClient."""
    from google.cloud.workflows import executions_v1

    address = os.environ.get("WORKFLOWS_EMULATOR_HOST")
    if not address:
        return executions_v1.ExecutionsClient()
    import grpc
    from google.cloud.workflows.executions_v1.services.executions.transports import ExecutionsGrpcTransport

    return executions_v1.ExecutionsClient(transport=ExecutionsGrpcTransport(channel=grpc.insecure_channel(address)))


@cache
def callbacks() -> Any:
    """A requests session that may call workflow callbacks (permission workflows.callbacks.send)."""
    if token := os.environ.get("DROPFORGE_EMULATOR_TOKEN"):
        return _session(token)
    from google.auth.transport.requests import AuthorizedSession

    return AuthorizedSession(_credentials())


def endpoint(audience: str) -> Any:
    """A requests session for a served model: with a token for Cloud Run, for an http:// address of the VPC without."""
    if token := os.environ.get("DROPFORGE_EMULATOR_TOKEN"):
        return _session(token)
    if audience.startswith("http://"):  # nobody there asks for a token, and everybody on the way could read it
        import requests

        return requests.Session()
    from google.auth.transport.requests import Request
    from google.oauth2 import id_token

    return _session(id_token.fetch_id_token(Request(), audience))


def _bearer() -> Callable[[], str]:
    """What gives an access token that is valid for some minutes at least."""
    if token := os.environ.get("DROPFORGE_EMULATOR_TOKEN"):
        return lambda: token
    from google.auth.transport.requests import Request

    credentials = _credentials()

    def fresh() -> str:
        if not credentials.valid:  # false already shortly before it expires
            credentials.refresh(Request())
        return str(credentials.token)

    return fresh


def _credentials() -> Any:
    import google.auth

    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    return credentials


def _project() -> str | None:
    return os.environ.get("DROPFORGE_PROJECT")


def _anonymous() -> Any:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()


def _rest(client: Any, variable: str) -> Any:
    """A client over gRPC in the cloud, over plain HTTP to an emulator when `variable` names one."""
    if endpoint := os.environ.get(variable):
        return client(transport="rest", credentials=_anonymous(), client_options={"api_endpoint": endpoint})
    return client()


def _session(token: str) -> Any:
    import requests

    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {token}"
    return session


def _loopback() -> Any:
    """A requests session for an emulator on this machine: no proxy or netrc of the environment has to do with it, and
    looking for them takes a quarter of a call; every thread that calls keeps its connection."""
    import requests

    session = requests.Session()
    session.trust_env = False
    session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))
    return session
