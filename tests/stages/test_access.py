"""Who gets a token for the objects of a run: only who proves that it is of the run."""

from __future__ import annotations

import base64
import json
from typing import Any

import flask
import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, NotFound
from dropforge.run.proof import ACCESS_NAME, proof
from dropforge.spec import JobSpec
from dropforge.stages.access import MOST_CHARACTERS, access, boundary

from ..deployments import Memory, context_with, settings_with
from .test_ceiling import document

SETTINGS = settings_with(runs_bucket="runs", server_service_account="server@p")
RUN, OTHER, KEY = "job-0123456789ab", "job-fedcba987654", "5" * 64


class Deployment:
    """A deployment with one run, whose key is KEY; it keeps the boundaries of the tokens that it gives."""

    def __init__(self) -> None:
        self.storage, self.boundaries = Memory(), list[dict[str, Any]]()
        self.context = context_with(SETTINGS, storage=self.storage)
        self.context.cloud.clients.bounded_token = self.token  # type: ignore[method-assign,assignment]
        spec = JobSpec.model_validate(document())
        self.storage.blob(names.spec_object(RUN)).upload_from_string(
            spec.model_dump_json(by_alias=True).encode(), if_generation_match=0
        )
        self.add_key(RUN)

    def add_key(self, run: str) -> None:
        self.storage.blob(names.key_object(run)).upload_from_string(KEY.encode(), if_generation_match=0)

    def token(self, boundary: dict[str, Any]) -> tuple[str, int]:
        self.boundaries.append(boundary)
        return "token", 3600

    def places(self, account: str) -> str:
        """The conditions of the token that an account gets for RUN."""
        access(self.context, RUN, proof(KEY, ACCESS_NAME, RUN.encode()), account)
        return json.dumps(self.boundaries[-1])


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


def test_the_containers_of_a_run_get_a_token(deployment: Deployment) -> None:
    granted = access(deployment.context, RUN, proof(KEY, ACCESS_NAME, RUN.encode()), "trainer@p")
    assert granted.to_json() == {"status": "GRANTED", "access_token": "token", "expires_in": 3600}
    assert OTHER not in json.dumps(deployment.boundaries)


@pytest.mark.parametrize(
    ("run", "claimed"),
    [
        (RUN, ""),
        (RUN, KEY),
        (RUN, proof(KEY, ACCESS_NAME, OTHER.encode())),
        (RUN, proof(KEY, "job-event", RUN.encode())),
        (RUN, proof("6" * 64, ACCESS_NAME, RUN.encode())),
        (RUN, "\ud800"),
        (OTHER, proof(KEY, ACCESS_NAME, RUN.encode())),
        (OTHER, ""),
    ],
)
def test_nobody_else_does(deployment: Deployment, run: str, claimed: str) -> None:
    with pytest.raises(NotFound):
        access(deployment.context, run, claimed, "trainer@p")
    assert deployment.boundaries == []


def test_asking_before_a_run_is_accepted_does_not_shut_it_out(deployment: Deployment) -> None:
    with pytest.raises(NotFound):
        access(deployment.context, OTHER, "", "trainer@p")
    deployment.add_key(OTHER)
    assert deployment.context.store.key(OTHER) == KEY


def test_only_the_trainer_may_write_the_model(deployment: Deployment) -> None:
    (written, *_), (kept, *_) = (
        json.loads(deployment.places(account))["accessBoundary"]["accessBoundaryRules"]
        for account in ("trainer@p", "server@p")
    )
    assert f"models/{RUN}/" in written["availabilityCondition"]["expression"]
    assert f"models/{RUN}/" not in kept["availabilityCondition"]["expression"]


def test_a_boundary_fits_with_the_longest_names_and_two_sources() -> None:
    bucket, run, other = "b" * 63, f"{'r' * 20}-0123456789ab", f"{'s' * 20}-0123456789ab"
    sources = (f"gs://{bucket}/models/{other}/attempt-1/model", f"gs://{bucket}/models/{other[1:]}/rows.jsonl")
    spec = document()
    spec["model"], spec["dataset"]["source"] = {"source": sources[0]}, sources[1]
    rules = boundary(bucket, run, JobSpec.model_validate(spec), is_server=False)
    assert rules["accessBoundary"]["accessBoundaryRules"][1]["availabilityCondition"]["expression"].count(other) == 2
    assert len(json.dumps(rules["accessBoundary"], separators=(",", ":"))) <= MOST_CHARACTERS


def test_a_boundary_that_is_too_long_is_a_fault_of_the_spec(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropforge.stages.access.MOST_CHARACTERS", 100)
    with pytest.raises(CloudError, match=rf"the boundary of {RUN} has \d+ characters; expected at most 100") as found:
        deployment.places("trainer@p")
    assert found.value.error_class is ErrorClass.CONFIG


def test_the_function_reads_the_account_of_its_caller(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cloud Run leaves the claims of a token that it has verified, and takes the signature away."""
    import main

    monkeypatch.setattr(main, "context", lambda: deployment.context)
    body = {"run": RUN, "proof": proof(KEY, ACCESS_NAME, RUN.encode())}
    claims = base64.urlsafe_b64encode(json.dumps({"email": "server@p"}).encode()).decode().rstrip("=")
    app = flask.Flask("test")
    for header, status in (
        (f"Bearer x.{claims}.SIGNATURE_REMOVED_BY_GOOGLE", 200),
        ("Bearer ya29.opaque", 400),
        ("", 400),
        ("Bearer x.%%%.y", 400),
        ("Bearer x.W10.y", 400),
    ):
        with app.test_request_context(json=body, headers={"Authorization": header}):
            answer = main.access(flask.request)
            assert (answer[1] if isinstance(answer, tuple) else 200) == status, header
    assert f"models/{RUN}/" not in json.dumps(deployment.boundaries[0]["accessBoundary"]["accessBoundaryRules"][0])
