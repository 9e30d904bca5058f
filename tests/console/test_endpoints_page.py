"""The page Endpoints: the share of each revision, its requests, and a command that asks the endpoint."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.endpoints.record import Canary, EndpointRecord, Revision, Rollout, RolloutState
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.named import Counted
from dropforge.run.record import RunState
from dropforge.stages.rollout import traffic
from dropforge.stages.rollout.traffic import Traffic
from dropforge_console import views

from ..deployments import context_with
from .deployed import Deployed
from .test_run_page import OTHER, RUN, SPEC, sample
from .test_views import NOW, at, attempt, record

SERVICE = "projects/p1/locations/us-central1/services/df-search"
WATCHED = Canary(percent=10, seconds=600, max_error_rate=0.01, max_latency_ratio=1.5)


def endpoint(**changes: Any) -> EndpointRecord:
    """An endpoint whose second revision has been promoted, with a third one as its canary."""
    revisions = [
        Revision(number=number, run=run, digest="d", who="w", requested=at(number), revision=f"df-search-{number}",
                 promoted=at(number) if number < 3 else None, usd_per_hour=1.0, spent_usd=number)
        for number, run in ((1, OTHER), (2, RUN), (3, OTHER))
    ]  # fmt: skip
    watching = Rollout(id="x", kind="deploy", who="w", requested=at(3), state=RolloutState.WATCHING, revision=3,
                       canary=WATCHED)  # fmt: skip
    fields = {"stable": 2, "previous": 1, "revisions": revisions, "rollouts": [watching], **changes}
    return EndpointRecord(name="search", source="", type="cloud_run", region="us-central1", service=SERVICE,
                          created=at(0), url="https://df-search.run.app", **fields)  # fmt: skip


def test_each_revision_has_its_share_and_its_requests() -> None:
    counted = {"df-search-2": Counted(requests=1200, errors=3, latency_ms=812.4), "df-search-3": Counted(requests=9)}
    shown = views.versions(endpoint(), NOW, Traffic({"search": counted}, {}))
    assert [(each.number, each.share, each.status.word) for each in shown] == [
        (3, "10 %", "canary"),
        (2, "90 %", "serves"),
        (1, views.UNKNOWN, "before"),
    ]
    assert [(each.requests, each.errors, each.latency) for each in shown] == [
        ("9", "0", views.UNKNOWN),
        ("1,200", "3", "812 ms"),
        ("0", "0", views.UNKNOWN),
    ]
    unknown = views.versions(endpoint(rollouts=[]), NOW, None)
    assert [(each.share, each.requests) for each in unknown][:2] == [(views.UNKNOWN,) * 2, ("100 %", views.UNKNOWN)]
    assert {each.share for each in views.versions(endpoint(suspended=NOW), NOW, None)} == {views.UNKNOWN}


class Platform:
    """Counts the requests of the platform, or fails."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails
        self.since: list[Any] = []

    def why_whole(self, service: str) -> str:
        return ""

    def counted(self, cloud: Any, service: str, since: Any) -> dict[str, Counted]:
        if self._fails:
            raise CloudError(ErrorClass.PERMISSION, "no access, Bearer abcdefghijklmnopqrstuvwxyz0123456789")
        self.since.append(since)
        return {"df-search-2": Counted(requests=5)}


@pytest.mark.parametrize("fails", [False, True])
def test_the_requests_are_of_the_last_hour_and_a_failure_has_its_reason(fails: bool) -> None:
    platform: Any = Platform(fails)
    context = context_with(now=lambda: NOW, platforms=Platforms(named=lambda kind: platform))
    found = traffic.traffic(context, [endpoint(), endpoint(retired=NOW)])
    if fails:
        assert "no access" in found.problems["search"]
        assert "abcdefghij" not in found.problems["search"]
    else:
        assert found.counted == {"search": {"df-search-2": Counted(requests=5)}}
        assert platform.since == [NOW - timedelta(hours=1)]


def test_the_page_has_a_command_that_asks_without_a_row_of_the_data(tmp_path: Path) -> None:
    deployed = Deployed(NOW)
    spec = {**SPEC, "serve": {"type": "cloud_run", "ttl": "1h"}}
    spec["dataset"] = {"source": "owner/data", "columns": {"prompt": "Question: {question}", "completion": "{answer}"}}
    deployed.add(record((RunState.SUCCEEDED, 1), run=RUN, attempts=[attempt()]), spec)
    deployed.commit(RUN, [sample("a held-out question", "x")])
    deployed.put(names.endpoint_object("search"), endpoint().model_dump_json().encode())
    with deployed.opened(tmp_path) as client:
        page = client.get("/endpoints").text
    assert "https://df-search.run.app/v1/chat/completions" in page
    assert "dropforge token search" in page
    assert "Question: {question}" in page
    assert "a held-out question" not in page
    assert "10 %" in page
