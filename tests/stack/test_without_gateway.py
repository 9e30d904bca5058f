"""Named endpoints on GKE in a deployment without a Gateway: a Service gives one revision every request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge.endpoints.record import RolloutState
from dropforge.run.record import RunState
from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackInfo

from .conftest import NOOP_CONFIG, User
from .named import Load, Named
from .test_endpoints import ran
from .test_faults import kill
from .test_runs import run_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
CANARY = {"percent": 50, "for": "1s"}


def test_without_a_gateway_models_change_at_once_and_the_url_stays_when_one_comes(
    tmp_path: Path, open_user: Callable[[Path], User], fork_stack: Callable[[Path], StackInfo]
) -> None:
    settings = {**NOOP_CONFIG.settings, "DROPFORGE_ENDPOINT_GATEWAYS": ""}
    replace(NOOP_CONFIG, settings=settings).save(tmp_path)
    fork_stack(tmp_path)
    try:
        named = Named(open_user(tmp_path), "plain", "gke")
        assert_all_at_once(named)
        url, models = named.record.url, named.record.revisions
        kill(named.user)
        NOOP_CONFIG.save(tmp_path)
        fork_stack(tmp_path)
        named = Named(open_user(tmp_path), "plain", "gke")
        assert_kept(named, url, models[-1].run)
    finally:
        local.down(tmp_path)


def assert_all_at_once(named: Named) -> None:
    first = named.serves().revision(1).revision
    assert named.record.service.endswith("/services/df-ep-plain")
    refused = named.user.wait(named.put(canary=CANARY), timeout=PATIENCE_SECONDS)
    assert refused.state is RunState.REJECTED
    assert "(Terraform: endpoint_gateway)" in str(refused.problems)
    with Load(named).running() as load:
        second = named.serves().revision(2).revision
        named.user.until(lambda: load.has_seen(second))
        assert named.ended(named.ask(rollback=named.name)).state is RolloutState.PROMOTED
        named.user.until(lambda: load.has_seen(first))
    assert load.problems == []
    assert load.streams > 0
    (listed,) = json.loads(ran(named.user, "endpoints", "--json"))
    assert listed["last_hour_problem"].startswith("gke counts none")
    assert_refused(named, named.record.revision(2).run, "(Terraform: endpoint_gateway)")


def assert_refused(named: Named, model: str, why: str) -> None:
    """A canary of the endpoint is refused with the reason, and changes nothing."""
    before, texts = named.record, dict[str, str]()
    with run_events(named.user) as pull:
        asked = named.ask(serve={"run": model, "endpoint": named.name, "canary": CANARY})

        def is_answered() -> bool:
            texts.update({event["run"]: event["details"]["text"] for _, event in pull() if event["run"] == asked})
            return asked in texts

        named.user.until(is_answered)
    assert why in texts[asked]
    assert named.record == before


def assert_kept(named: Named, url: str, model: str) -> None:
    """The deployment has a Gateway now. The endpoint stays as it is; another name gets a route."""
    assert_refused(named, model, "it was made in a region without a Gateway")
    assert named.serves().stable == 3
    assert named.record.url == url
    assert named.answer() == named.record.revision(3).revision
    routed = Named(named.user, "routed", "gke")
    assert "/httproutes/" in routed.serves().service
    for each in (named, routed):
        each.retire()
        each.user.until(lambda each=each: each.service() is None)  # type: ignore[misc]
