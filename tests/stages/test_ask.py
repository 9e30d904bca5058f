"""The function ask lends a token for an endpoint on Cloud Run that answers, and for nothing else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dropforge.base.errors import NotFound
from dropforge.run.record import Endpoint, RunState
from dropforge.stages.ask import ask

from ..console.deployed import Deployed
from ..console.test_run_page import SPEC
from ..console.test_views import NOW, record
from ..deployments import context_with

RUN, URL = "text-to-sql-0123456789ab", "https://df-text-to-sql.run.app"
CLOUD_RUN = {"type": "cloud_run", "ttl": "1h"}
GKE = {"type": "gke", "accelerator": "nvidia-l4", "ttl": "1h"}


class Tokens:
    """Notes the audiences for which it was asked."""

    def __init__(self) -> None:
        self.audiences: list[str] = []

    def __call__(self, audience: str) -> str:
        self.audiences.append(audience)
        return f"for {audience}"


def lent(serve: Any, of: str = RUN, **endpoint: Any) -> tuple[str, list[str]]:
    deployed, tokens = Deployed(NOW), Tokens()
    served = Endpoint(
        url=URL, model="m", service="s", region="r", ready=NOW, expires=NOW + timedelta(hours=1), **endpoint
    )
    found = record((RunState.TRAINING, 1), (RunState.SUCCEEDED, 20), run=RUN, endpoint=served)
    deployed.add(found, {**SPEC, "serve": serve})
    context = context_with(storage=deployed.storage)
    context.cloud.clients.identity_token = tokens  # type: ignore[method-assign]
    return ask(context, of).token, tokens.audiences


def test_the_token_is_for_the_endpoint_alone() -> None:
    assert lent(CLOUD_RUN) == (f"for {URL}", [URL])


@pytest.mark.parametrize(
    ("serve", "of", "endpoint"),
    [
        (CLOUD_RUN, "nobody-0123456789ab", {}),
        (CLOUD_RUN, "no-such-endpoint", {}),
        (CLOUD_RUN, RUN, {"ended": NOW}),
        (GKE, RUN, {}),  # its key opens every endpoint of the deployment
    ],
)
def test_nothing_else_is_lent(serve: Any, of: str, endpoint: Any) -> None:
    with pytest.raises(NotFound):
        lent(serve, of, **endpoint)
