"""Requests for models of another deployment whose bucket does not answer as usual."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from google.api_core.exceptions import Forbidden, ServiceUnavailable

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.stages.rollout.elsewhere import Unreadable, _spec_here, find_model, why_not_here
from dropforge.stages.rollout.requests import Refused

from ..deployments import Memory, context_with, settings_with

URI = "gs://their-runs/models/theirs-0123456789ab"
SETTINGS = settings_with(runs_bucket="runs", model_buckets="their-runs,more-runs", rollout_workflow="rollout")
RUN_SPEC = {
    "api_version": "dropforge/v1",
    "name": "theirs",
    "model": {"source": "owner/tiny-1m"},
    "dataset": {"source": "owner/rows"},
    "training": {"adapter": {"type": "none"}},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
}


class Refusing(Memory):
    """A bucket that answers every request with an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def blob(self, name: str, generation: int | None = None) -> Any:
        raise self.error


def found(error: Exception) -> Any:
    context = context_with(SETTINGS, lambda: datetime(2026, 11, 27, tzinfo=UTC), storage=Refusing(error))
    return find_model(context, URI, "sql", {})


def test_a_missing_right_is_named_with_its_bucket_and_accounts() -> None:
    with pytest.raises(Unreadable) as refused:
        found(Forbidden("dropforge-on-spec-message@p.iam.gserviceaccount.com does not have storage.objects.get access"))
    assert "gs://their-runs may not be read: dropforge-on-spec-message@p.iam" in refused.value.message
    for word in ("model_buckets", "roles/storage.objectViewer", "on_spec_message", "rollout", "gs://their-runs"):
        assert word in refused.value.hint


def test_an_outage_is_no_refusal() -> None:
    """The message is delivered again."""
    with pytest.raises(CloudError) as raised:
        found(ServiceUnavailable("try again"))
    assert raised.value.error_class is ErrorClass.TRANSIENT


@pytest.mark.parametrize(
    ("serve", "changes", "why"),
    [
        (None, {}, "has no `serve`"),
        ({"share": True}, {}, "is an adapter that shares an endpoint"),
        ({"type": "cloud_run"}, {"share": True}, "is an adapter that shares an endpoint"),
        ({"type": "cloud_run", "regoin": "x"}, {}, "/serve/regoin"),
        ({"type": "cloud_run"}, {}, ""),
        (None, {"type": "cloud_run"}, ""),
    ],
)
def test_a_model_is_served_as_its_spec_and_the_request_say_together(serve: Any, changes: Any, why: str) -> None:
    text = json.dumps({**RUN_SPEC, "serve": serve}).encode()
    if why:
        with pytest.raises(Refused, match=why):
            _spec_here(SETTINGS, URI, text, "sql", changes)
    else:
        spec = _spec_here(SETTINGS, URI, text, "sql", changes)
        assert spec.serve is not None
        assert (spec.serve.type, spec.serve.endpoint, spec.serve.budget) == ("cloud_run", "sql", None)


def test_no_bucket_is_allowed_without_the_operator() -> None:
    assert why_not_here(URI, SETTINGS) == ""
    assert "model_buckets are: their-runs, more-runs" in why_not_here(URI.replace("their", "your"), SETTINGS)
    assert "model_buckets are: none" in why_not_here(URI, settings_with(runs_bucket="runs"))
    assert why_not_here(URI, settings_with(runs_bucket="runs", model_buckets="*")), "only names count, no patterns"


@pytest.mark.parametrize("stem", ["copy", "copy-", "copy--", "copy--0123456789ab", "Copy__x", "copy--x"])
def test_no_spec_has_the_id_of_a_copy(stem: str) -> None:
    """A rollout may write below models/copy-- alone, so these models must be copies."""
    run = names.run_id_of_object("specs", f"specs/{stem}.json", 1)
    assert not names.is_copy(run)
    assert names.is_run_id(names.copy_id("rollout"))
    assert names.is_copy(names.copy_id("rollout"))
    assert not names.is_copy(names.run_id_of_message("copy--x"))
