"""The protocol of an endpoint type: the operations on the served model of a run."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud.classify import classify, client_errors
from dropforge.cloud.container_secrets import VARIABLE
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.cloud.secrets import read_secret
from dropforge.run.proof import ACCESS_NAME, proof
from dropforge.spec import JobSpec

from .prices import HourlyPrice
from .training import Launch, Waits, access_variables, key_variable

KEY_HINT = "add a version to the secret: docs/deploy.md, the key of endpoints"
COMPILE_CACHE = "dropforge-compiled"  # below the temporary directory, which is the same in every container
START_HINT = "see the endpoint's log; raise serve.startup_timeout if it was still loading"


class Served(NamedTuple):
    """An adapter of a shared endpoint: its name in requests, its run, the digest of its files, the run's key."""

    name: str
    run: str
    digest: str
    key: str


@dataclass(frozen=True)
class Deployment:
    """The endpoint of a run: all inputs for the creation of its resources.

    `trained` is the attempt that succeeded. `endpoint` is the named endpoint that gets the model; "": the run's own.
    `adapters` are those of a shared endpoint; the run's model is then their base.
    """

    run: str
    spec: JobSpec
    settings: Settings
    expires: datetime
    trained: Launch | None = None
    endpoint: str = ""
    adapters: tuple[Served, ...] = ()

    @property
    def model(self) -> str:
        """The model's name in requests: that of the named endpoint, which stays when the model changes."""
        return self.endpoint or self.spec.name

    @property
    def run_key(self) -> str:
        """The run's key (run/proof.py); "" for a run without one."""
        return self.trained.key if self.trained else ""


class Server(Protocol):
    """A place where a model is served. Verbs raise CloudError when a Google API refuses or fails."""

    @abstractmethod
    def region(self, deployment: Deployment) -> str:
        """The region or zone of the endpoint."""

    @abstractmethod
    def price(self, spec: JobSpec, placement: int | None = None) -> HourlyPrice:
        """The price of a running instance for an hour.

        `placement` is that of the attempt that trained, None before one has. Only an endpoint that keeps the training
        machine has different prices: before the training, the highest counts.
        """

    @abstractmethod
    def resources(self, deployment: Deployment) -> list[Any]:
        """The resources that `deploy` creates, in order. Pure. The first resource stands for the endpoint."""

    @abstractmethod
    def deploy(self, cloud: Cloud, deployment: Deployment) -> str | Waits:
        """Advance towards a ready endpoint; its URL once the platform reports it as ready."""

    @abstractmethod
    def why_not_ready(self, cloud: Cloud, deployment: Deployment) -> CloudError:
        """The platform's reason why an endpoint did not become ready in time."""

    @abstractmethod
    def exists(self, cloud: Cloud, deployment: Deployment) -> bool:
        """Whether the cloud still has the resource that answers; True if the platform does not know yet."""

    @abstractmethod
    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """Every resource of every endpoint in the project, as the cloud lists them.

        Raises Unlisted at the end if some places could not be listed.
        """

    @abstractmethod
    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        """Delete a resource; True once a read shows that it does not exist. A missing resource is a success."""


def endpoint_labels(deployment: Deployment) -> dict[str, str]:
    """The labels that say which run owns the endpoint and when it expires; the sweep then deletes it by the label."""
    expires = {names.EXPIRES_LABEL: str(int(deployment.expires.timestamp()))}
    owner = {names.DEPLOYMENT_LABEL: deployment.settings.deployment}
    return names.labels(deployment.run, deployment.spec.labels, **owner, **expires)


def endpoint_key(cloud: Cloud, spec: JobSpec) -> str:
    """The API key of the endpoint of a spec; "" if it has none. Raises CloudError, whose text never has the key."""
    secret = cloud.settings.endpoint_key_secret
    if spec.serve is None or not spec.serve.has_key or not secret:
        return ""
    try:
        key = read_secret(cloud, secret)
    except LookupError as error:
        raise CloudError(ErrorClass.CONFIG, f"the API key of endpoints: {error}", KEY_HINT) from None
    except client_errors() as error:
        raise classify(error) from error
    if not key:
        raise CloudError(ErrorClass.CONFIG, f"the API key of endpoints: secret {secret!r} is empty", KEY_HINT)
    return key


def key_reference(deployment: Deployment) -> dict[str, str]:
    """The variable by which the server finds its API key in Secret Manager; empty for an endpoint without a key.

    The server reads the value by its own account (cloud/container_secrets.py). vLLM knows it as VLLM_API_KEY.
    """
    spec, settings = deployment.spec, deployment.settings
    if spec.serve is None or not spec.serve.has_key or not settings.endpoint_key_secret:
        return {}
    version = names.secret_version(settings.project, settings.endpoint_key_secret)
    return {VARIABLE: json.dumps({"VLLM_API_KEY": version})}


def adapters_variable(adapters: tuple[Served, ...]) -> dict[str, str]:
    """The variable by which a server finds its adapters (containers/serve_vllm/adapters.py), with the access to each.

    A server has the access of the runs whose adapters it serves, one by one: a Credential Access Boundary of all of
    them would be longer than Google allows.
    """
    if not adapters:
        return {}
    documents = [
        {
            "name": adapter.name,
            "run": adapter.run,
            "digest": adapter.digest,
            "proof": proof(adapter.key, ACCESS_NAME, adapter.run.encode()),
        }
        for adapter in adapters
    ]
    return {"DROPFORGE_ADAPTERS": json.dumps(documents)}


def compile_variables(image: str, directory: str = COMPILE_CACHE) -> list[dict[str, str]]:
    """The variables by which a server keeps what it compiles, below `directory` (containers/serve_vllm/compiled.py)."""
    values = {"DROPFORGE_COMPILE_CACHE": directory, "DROPFORGE_IMAGE": image}
    return [{"name": name, "value": value} for name, value in values.items()]


def server_environment(deployment: Deployment, max_model_len: int, max_num_seqs: int) -> list[dict[str, str]]:
    """The environment variables of containers/serve_vllm, as a container's `env`."""
    serve = deployment.spec.serve
    assert serve is not None, "only an endpoint has a server"
    values = {
        "DROPFORGE_PROJECT": deployment.settings.project,
        "DROPFORGE_MODEL_URI": f"gs://{deployment.settings.runs_bucket}/models/{deployment.run}",
        "DROPFORGE_SERVED_MODEL_NAME": deployment.model,
        "DROPFORGE_MAX_MODEL_LEN": str(max_model_len),
        "DROPFORGE_MAX_NUM_SEQS": str(max_num_seqs),
        "DROPFORGE_SAMPLING": serve.sampling,
        **key_reference(deployment),
        **key_variable(deployment.run_key),
        **access_variables(deployment.run, deployment.settings, deployment.run_key),
        **adapters_variable(deployment.adapters),
    }
    return [{"name": name, "value": value} for name, value in values.items()]
