"""Who gets a token for the objects of a run: only who proves that it is of the run."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

import flask
import pytest

from dropforge.base import names
from dropforge.base.errors import NotFound
from dropforge.run.proof import ACCESS_NAME, key_of_run, proof
from dropforge.run.record import Record, RunState, Transition
from dropforge.spec import JobSpec
from dropforge.spec.sections import MAX_SOURCES
from dropforge.stages.access import access, boundary
from dropforge_local.iam.boundary import Boundary
from dropforge_local.iam.conditions import Resource

from ..deployments import Memory, context_with, settings_with
from .test_ceiling import document

SETTINGS = settings_with(runs_bucket="runs", trainer_service_account="trainer@p", server_service_account="server@p")
RUN, OTHER = "job-0123456789ab", "job-fedcba987654"
DAY, DAY_KEY = "2026-11-23", "5" * 64
KEY = key_of_run(DAY_KEY, RUN)


class Deployment:
    """A deployment with one run, whose key is KEY; it keeps the boundaries of the tokens that it gives."""

    def __init__(self) -> None:
        self.storage, self.boundaries = Memory(), list[dict[str, Any]]()
        self.context = context_with(SETTINGS, storage=self.storage)
        self.context.cloud.clients.bounded_token = self.token  # type: ignore[method-assign,assignment]
        spec = JobSpec.model_validate(document())
        self.put(names.spec_object(RUN), spec.model_dump_json(by_alias=True))
        self.put(names.day_key_object(DAY), DAY_KEY)
        self.accept(RUN)

    def put(self, name: str, content: str) -> None:
        self.storage.blob(name).upload_from_string(content.encode(), if_generation_match=0)

    def accept(self, run: str) -> None:
        time = datetime.fromisoformat(f"{DAY}T12:00:00Z")
        history = [Transition(state=RunState.ACCEPTED, time=time)]
        record = Record(run=run, name="job", source="s", state=RunState.ACCEPTED, created=time, history=history)
        assert self.context.store.create(record)

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
    """Only the trainer may read the spec, so only its answer has the spec."""
    for account in ("trainer@p", "server@p", "", "somebody@p"):
        granted = access(deployment.context, RUN, proof(KEY, ACCESS_NAME, RUN.encode()), account).to_json()
        spec = granted.pop("spec", None)
        assert granted == {"status": "GRANTED", "access_token": "token", "expires_in": 3600}
        stored = deployment.storage.blob(names.spec_object(RUN)).download_as_bytes()
        assert spec == (json.loads(stored) if account == "trainer@p" else None)
    assert OTHER not in json.dumps(deployment.boundaries)


def test_the_answer_has_no_more_than_the_token_reaches() -> None:
    """A container that gets the spec with its token could read the spec with this token."""
    spec = Resource(f"projects/_/buckets/runs/objects/{names.spec_object(RUN)}")
    for is_trainer in (True, False):
        reaches = Boundary(boundary("runs", RUN, JobSpec.model_validate(document()), is_trainer=is_trainer))
        assert reaches.allows(READ, spec) is is_trainer


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
    deployment.accept(OTHER)
    assert deployment.context.store.key(OTHER) == key_of_run(DAY_KEY, OTHER)


def test_only_the_trainer_may_write_the_model(deployment: Deployment) -> None:
    written, *kept = (
        json.loads(deployment.places(account))["accessBoundary"]["accessBoundaryRules"][0]
        for account in ("trainer@p", "server@p", "", "somebody@p")
    )
    assert f"models/{RUN}/" in written["availabilityCondition"]["expression"]
    assert not any(f"models/{RUN}/" in rule["availabilityCondition"]["expression"] for rule in kept)


READ, WRITE = "storage.objects.get", "storage.objects.create"
SOURCE = "src-0123456789ab"  # the run whose model the spec names


@pytest.mark.parametrize(
    ("name", "trainer", "server"),
    [
        (f"models/{RUN}/MANIFEST.json", {READ, WRITE}, {READ}),
        (f"checkpoints/{RUN}/step-1/a", {READ, WRITE}, set()),
        (f"machines/{RUN}/x", {READ, WRITE}, {READ, WRITE}),
        (names.spec_object(RUN), {READ}, set()),
        (names.record_object(RUN), {READ}, set()),
        (names.day_key_object(DAY), set(), set()),
        (f"models/{SOURCE}/a", {READ}, set()),
        (f"models/{OTHER}/a", set(), set()),
        (f"machines/{OTHER}/x", set(), set()),
        (f"caches/{RUN}/a.zip", set(), {READ, WRITE}),
        (f"caches/{OTHER}/a.zip", set(), set()),
        (names.record_object(OTHER), set(), set()),
        (names.endpoint_object("e"), set(), set()),
    ],
)
def test_what_the_containers_of_a_run_may_do(name: str, trainer: set[str], server: set[str]) -> None:
    fields = document()
    fields["dataset"]["source"] = f"gs://runs/models/{SOURCE}/rows.jsonl"
    fields["evaluation"] = {"source": f"gs://elsewhere/models/{OTHER}/rows.jsonl"}  # a bucket with another run
    spec = JobSpec.model_validate(fields)
    resource = Resource(f"projects/_/buckets/runs/objects/{name}")
    for is_trainer, allowed in ((True, trainer), (False, server)):
        rules = Boundary(boundary("runs", RUN, spec, is_trainer=is_trainer))
        assert {each for each in (READ, WRITE) if rules.allows(each, resource)} == allowed


def test_no_container_replaces_compiled_code() -> None:
    """The grants of the function's account do not allow it either (terraform/permissions.yaml)."""
    archive, spec = Resource(f"projects/_/buckets/runs/objects/caches/{RUN}/a.zip"), JobSpec.model_validate(document())
    for is_trainer in (True, False):
        rules = Boundary(boundary("runs", RUN, spec, is_trainer=is_trainer))
        assert not rules.allows("storage.objects.delete", archive)


def test_a_source_with_a_quote_opens_nothing() -> None:
    """It would end the text of the condition, and begin another term."""
    spec = JobSpec.model_validate(document())
    forged = spec.dataset.model_copy(update={"source": "gs://runs/models/x')||true||('/rows.jsonl"})
    rules = boundary("runs", RUN, spec.model_copy(update={"dataset": forged}), is_trainer=True)
    assert rules == boundary("runs", RUN, spec, is_trainer=True)


def longest(bucket: str) -> JobSpec:
    """A spec that names the models of as many other runs as it can, whose ids are the longest."""
    first, last, *others = (f"gs://{bucket}/models/{'s' * 20}-{number:012x}" for number in range(MAX_SOURCES + 2))
    fields = document()
    fields["model"] = {"source": f"{first}/attempt-1/model"}
    fields["dataset"]["source"] = [f"{run}/rows.jsonl" for run in others]
    fields["evaluation"] = {"source": f"{last}/rows.jsonl"}
    return JobSpec.model_validate(fields)


@pytest.mark.parametrize("bucket", ["b" * 63, ".".join(["b" * 55] * 4)[:222]], ids=len)
@pytest.mark.parametrize("is_trainer", [True, False])
def test_every_spec_has_a_boundary_that_google_takes(bucket: str, is_trainer: bool) -> None:
    """No spec is refused for the limits, which `Boundary` has, too."""
    rules = boundary(bucket, f"{'r' * 20}-0123456789ab", longest(bucket), is_trainer=is_trainer)
    assert Boundary(rules)
    read = json.dumps(rules["accessBoundary"]["accessBoundaryRules"][1:])
    counts = [read.count(f"{'s' * 20}-{number:012x}/") for number in range(MAX_SOURCES + 2)]
    assert counts == [2 * is_trainer] * (MAX_SOURCES + 2)


@pytest.mark.parametrize(
    ("rules", "length", "problem"),
    [(10, 2048, ""), (11, 9, "has not 1 to 10 rules"), (1, 2049, "an expression of 2049 characters; expected at most")],
)
def test_google_refuses_a_boundary_that_is_too_large(rules: int, length: int, problem: str) -> None:
    """https://cloud.google.com/iam/docs/reference/sts/rest/v1/AccessBoundary"""
    rule = {
        "availableResource": "//storage.googleapis.com/projects/_/buckets/b",
        "availablePermissions": ["inRole:roles/storage.objectViewer"],
        "availabilityCondition": {"expression": "true".ljust(length)},
    }
    document = {"accessBoundary": {"accessBoundaryRules": [rule] * rules}}
    if problem:
        with pytest.raises(ValueError, match=problem):
            Boundary(document)
    else:
        assert Boundary(document)


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


def test_a_caller_cannot_name_another_account_beside_its_own(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cloud Run verifies X-Serverless-Authorization where a request has it, and then nothing in Authorization."""
    import main

    monkeypatch.setattr(main, "context", lambda: deployment.context)
    body = {"run": RUN, "proof": proof(KEY, ACCESS_NAME, RUN.encode())}
    forged = base64.urlsafe_b64encode(json.dumps({"email": "trainer@p"}).encode()).decode().rstrip("=")
    headers = {"Authorization": f"Bearer x.{forged}.y", "X-Serverless-Authorization": "Bearer the.servers.own"}
    with flask.Flask("test").test_request_context(json=body, headers=headers):
        text, status = main.access(flask.request)
    assert status == 400
    assert "X-Serverless-Authorization" in str(text)
    assert deployment.boundaries == []
