"""Records, specs and messages for the tests of channels."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from google.api_core.exceptions import NotFound

from dropforge.cloud.clients import Clients
from dropforge.context import Context
from dropforge.run.record import Record, RunState, Transition
from dropforge.spec import JobSpec
from dropforge.tell.news import News, state_news

from ..deployments import SETTINGS, Memory, cloud_with

NOW = datetime(2026, 11, 20, tzinfo=UTC)
RUN = "job-0123456789ab"
SPEC: dict[str, Any] = {
    "api_version": "dropforge/v1",
    "name": "n",
    "model": {"source": "owner/tiny-1m"},
    "dataset": {"source": "owner/data"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
    "serve": {"type": "cloud_run"},
}


def spec_of(**fields: Any) -> JobSpec:
    """Return a spec with these fields."""
    return JobSpec.model_validate_json(json.dumps({**SPEC, **fields}))


def record_of(state: RunState, **fields: Any) -> Record:
    """Return the record of a run that has entered only this state."""
    own = {"name": "n", "source": "s", "history": [Transition(state=state, time=NOW)], "created": NOW, **fields}
    return Record(run=RUN, state=state, **own)


def news_of(state: RunState, spec: JobSpec | None = None, **fields: Any) -> News:
    """Return the message for the record of a run in this state."""
    news = state_news(record_of(state, **fields), spec, SETTINGS, NOW)
    assert news
    return news


def context_at(environment: dict[str, str], now: datetime = NOW, **secrets: str) -> Context:
    """Return a context whose clients call the emulators of an environment, with a bucket and these secrets."""

    def access(name: str, timeout: float) -> Any:
        secret = name.split("/")[3]
        if secret not in secrets:
            raise NotFound(secret)
        return SimpleNamespace(payload=SimpleNamespace(data=secrets[secret].encode()))

    clients, memory = Clients(environment), Memory()
    clients.secrets = lambda: SimpleNamespace(access_secret_version=access)  # type: ignore[method-assign]
    clients.storage = lambda: memory  # type: ignore[method-assign]
    return Context(replace(cloud_with(now=now), clients=clients))
