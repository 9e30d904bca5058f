"""What an endpoint kind is: its verbs on the served model of one run, and what all kinds have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from dropforge.base import names
from dropforge.base.errors import CloudError
from dropforge.base.settings import Settings
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.spec import JobSpec

from .prices import HourlyPrice
from .training import Launch

START_HINT = "see the endpoint's log; raise serve.startup_timeout if it was still loading"


@dataclass(frozen=True)
class Deployment:
    """The endpoint of one run, with all that its resources are made from; `trained` is the attempt that succeeded."""

    run: str
    spec: JobSpec
    settings: Settings
    expires: datetime
    trained: Launch | None = None


class Server(Protocol):
    """A place where a model is served. Errors of the cloud are raised as CloudError."""

    def region(self, deployment: Deployment) -> str:
        """Where the endpoint runs."""

    def price(self, spec: JobSpec) -> HourlyPrice:
        """What one instance costs for an hour while it runs."""

    def resources(self, deployment: Deployment) -> list[Any]:
        """What `deploy` creates, in order; pure. The first one stands for the endpoint."""

    def deploy(self, cloud: Cloud, deployment: Deployment) -> str | None:
        """Advance towards a ready endpoint; its URL once the platform calls it ready."""

    def why_not_ready(self, cloud: Cloud, deployment: Deployment) -> CloudError:
        """What the platform says of an endpoint that has been waited for long enough."""

    def exists(self, cloud: Cloud, deployment: Deployment) -> bool:
        """Whether the cloud still has what answers; also when that cannot be told yet."""

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """Every resource of every endpoint in the project, by the cloud. Raises Unlisted at the end."""

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        """Delete one resource; True once it is seen not to exist. Gone already is success."""


def endpoint_labels(deployment: Deployment) -> dict[str, str]:
    """Whose the endpoint is, and when it ends even if nobody ever looks at it again."""
    expires = {names.EXPIRES_LABEL: str(int(deployment.expires.timestamp()))}
    owner = {names.DEPLOYMENT_LABEL: deployment.settings.deployment}
    return names.labels(deployment.run, deployment.spec.labels, **owner, **expires)


def server_environment(deployment: Deployment, max_model_len: int, max_num_seqs: int) -> list[dict[str, str]]:
    """What containers/serve_vllm is told, as a container's `env`."""
    values = {
        "DROPFORGE_MODEL_URI": f"gs://{deployment.settings.runs_bucket}/models/{deployment.run}",
        "DROPFORGE_SERVED_MODEL_NAME": deployment.spec.name,
        "DROPFORGE_MAX_MODEL_LEN": str(max_model_len),
        "DROPFORGE_MAX_NUM_SEQS": str(max_num_seqs),
    }
    return [{"name": name, "value": value} for name, value in values.items()]
