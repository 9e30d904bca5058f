"""The models of another deployment: a bucket with models of runs whose keys this deployment does not have."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from random import SystemRandom
from typing import Any

import pytest
from google.cloud import storage

from dropforge.base import names
from dropforge.endpoints.record import RolloutState
from dropforge.run.artifacts import (
    MANIFEST,
    ArtifactFile,
    Manifest,
    model_prefix,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from dropforge.run.events import Request
from dropforge.run.origin import manifest_digest
from dropforge.run.proof import new_key
from dropforge.run.record import RunState
from dropforge.run.store import RunStore
from dropforge.spec import parse_spec
from dropforge.stages.answers import Answer
from dropforge.stages.rollout import requests as requests_of_rollouts
from dropforge.stages.rollout.advance import advance
from dropforge.stages.rollout.messages import change_endpoint
from dropforge_local.stack.deployment import OTHER_RUNS_BUCKET

from ..deployments import clients, here
from .conftest import User
from .named import OPERATIONS, Load, Named, is_told
from .test_endpoints import REQUESTS, any_named, lent, named, ran
from .test_every_write import Deaths, call_until_final, write_of
from .test_runs import call, run_events
from .visitor import Visitor, link, visitor

__all__ = ["any_named", "link", "named", "visitor"]  # fixtures
GATE = {"error": {"error_class": "gate", "message": "exact_match is 0.1; expected at least 0.5"}}


class Elsewhere:
    """The runs bucket of another deployment, with a model that another key has committed."""

    def __init__(self, user: User, behave: str = "sealed", **serve: Any) -> None:
        self.user = user
        self.key = new_key(SystemRandom())
        client = clients.storage()
        if client.lookup_bucket(OTHER_RUNS_BUCKET) is None:
            client.create_bucket(OTHER_RUNS_BUCKET)
        self.bucket = client.bucket(OTHER_RUNS_BUCKET)
        ours = client.bucket(user.settings.runs_bucket)
        trained = user.wait(user.drop(user.spec(behave)))
        assert trained.state is RunState.SUCCEEDED, trained.error
        self.run = f"theirs-{uuid.uuid4().hex[:12]}"
        manifest = read_manifest(client, ours.name, trained.run)
        assert manifest is not None
        weights = self.bucket.blob(self.name("attempt-1/model/model.safetensors"))
        weights.upload_from_string(b"weights")
        digest = sha256(b"weights").hexdigest()
        described = {"path": "attempt-1/model/model.safetensors", "size": 7, "sha256": digest, "crc32c": weights.crc32c}
        files = [ArtifactFile(**described, generation=weights.generation)]
        for file in manifest.files:
            copied = ours.copy_blob(ours.blob(model_prefix(trained.run) + file.path), self.bucket, self.name(file.path))
            files.append(file.model_copy(update={"generation": copied.generation}))
        self.manifest = manifest.model_copy(update={"run": self.run, "files": files})
        write_manifest(client, OTHER_RUNS_BUCKET, self.manifest, self.key)
        served = {"type": "cloud_run", "ttl": "1h", "startup_timeout": "5m", **serve} if serve is not None else None
        spec = user.spec(behave, name="theirs", serve=served, notify={"slack": {"webhook_secret": "their-webhook"}})
        self.spec = parse_spec(json.dumps(spec).encode()).model_dump(mode="json", by_alias=True)
        self.write(names.spec_object(self.run), json.dumps(self.spec))
        record = trained.model_copy(update={"run": self.run, "spec": None})
        self.write(names.record_object(self.run), record.model_dump_json())

    @property
    def uri(self) -> str:
        return f"gs://{OTHER_RUNS_BUCKET}/models/{self.run}"

    @property
    def committed(self) -> Manifest:
        found = read_manifest(clients.storage(), OTHER_RUNS_BUCKET, self.run)
        assert found is not None
        return found

    def name(self, path: str) -> str:
        return model_prefix(self.run) + path

    def write(self, name: str, text: str) -> None:
        self.bucket.blob(name).upload_from_string(text, "application/json")

    def change(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a JSON document of the other deployment."""
        document = json.loads(self.bucket.blob(name).download_as_bytes())
        change(document)
        self.write(name, json.dumps(document))

    def content(self) -> dict[str, int]:
        """The generation of every object of the other deployment's bucket that is about this run."""
        listed = clients.storage().list_blobs(OTHER_RUNS_BUCKET)
        return {blob.name: blob.generation for blob in listed if self.run in blob.name}


def copies(named: Named) -> dict[str, list[str]]:
    """The objects below models/ of each run that a rollout of the endpoint has made for a copy."""
    runs = [rollout.run for rollout in named.record.rollouts if names.is_copy(rollout.run)]
    return {run: list(named.user.store.names(model_prefix(run))) for run in runs}


def test_a_model_of_another_deployment_serves_from_a_copy_that_this_one_proves(any_named: Named) -> None:
    """Nothing of the other deployment changes, and nothing of the copy is left after the end of the endpoint."""
    named, user = any_named, any_named.user
    theirs = Elsewhere(user, type=named.kind, **named.place)
    before = theirs.content()
    rollout = named.ended(named.ask(serve={"run": theirs.uri, "endpoint": named.name}))
    assert rollout.state is RolloutState.PROMOTED, rollout.error
    revision = named.record.serving
    assert revision is not None
    assert (revision.run, revision.origin) == (rollout.run, theirs.uri)
    assert revision.digest == manifest_digest(theirs.committed)
    assert revision.parity is not None
    assert (revision.parity.state, revision.metrics["exact_match"]) == ("sealed", 0.9)
    key, client = user.store.key(rollout.run), clients.storage()
    assert key
    assert key != theirs.key
    copied = read_manifest(client, user.settings.runs_bucket, rollout.run, key)
    assert copied is not None
    assert verify_manifest(client, user.settings.runs_bucket, copied) == []
    assert [file.sha256 for file in copied.files] == [file.sha256 for file in theirs.manifest.files]
    record = user.store.record(rollout.run)
    assert (record.state, record.source.split()[-1]) == (RunState.SUCCEEDED, theirs.uri)
    assert user.store.spec(rollout.run).notify.slack is None, "channels of the other deployment are not this one's"
    assert (
        named.client()
        .chat.completions.create(model=named.name, messages=[{"role": "user", "content": "Hello"}])
        .choices
    )
    call(user, "sweep", {}).raise_for_status()
    assert len(copies(named)[rollout.run]) == 3, "the sweep deletes nothing that serves"
    assert rollout.run in ran(user, "runs")
    named.retire()
    assert copies(named) == {rollout.run: []}
    assert theirs.content() == before


def test_the_spec_of_the_other_run_may_be_in_its_record(user: User) -> None:
    """So it is, unless it is large."""
    with lent(user, "cloud_run") as named:
        theirs = Elsewhere(user)
        theirs.change(names.record_object(theirs.run), lambda record: record.update(spec=theirs.spec))
        theirs.bucket.blob(names.spec_object(theirs.run)).delete()
        rollout = named.ended(named.ask(serve={"run": theirs.uri, "endpoint": named.name}))
        assert rollout.state is RolloutState.PROMOTED, rollout.error
        assert user.store.spec(rollout.run).name == "theirs"


def test_a_rollback_needs_no_other_bucket_and_old_copies_are_deleted(named: Named) -> None:
    """Under load: the model of a run here, a model of elsewhere, back, and forth without the other bucket."""
    user = named.user
    first = named.serves().revision(1).revision
    theirs = Elsewhere(user, type=named.kind)
    with Load(named).running() as load:
        rollout = named.ended(named.ask(serve={"run": theirs.uri, "endpoint": named.name}))
        assert rollout.state is RolloutState.PROMOTED, rollout.error
        second = named.record.revision(2).revision
        user.until(lambda: load.has_seen(second))
        theirs.bucket.delete_blobs([theirs.name(MANIFEST), *(theirs.name(file.path) for file in theirs.manifest.files)])
        for revision in (first, second):
            assert named.ended(named.ask(rollback=named.name)).state is RolloutState.PROMOTED
            user.until(partial(load.has_seen, revision))
    assert load.problems == []
    assert set(load.answers) == {first, second}
    named.serves()
    assert len(copies(named)[rollout.run]) == 3, "a rollback may still need the copy: its manifest, and its files"
    named.serves()
    user.until(lambda: copies(named) == {rollout.run: []})


def _gone(name: Callable[[Elsewhere], str]) -> Callable[[Elsewhere], object]:
    return lambda theirs: theirs.bucket.blob(name(theirs)).delete()


def _rewritten(theirs: Elsewhere) -> None:
    """Write the same bytes again, as whoever replaced a file and put it back."""
    blob = theirs.bucket.blob(theirs.name(theirs.manifest.files[-1].path))
    blob.upload_from_string(blob.download_as_bytes())


def _listed_outside(manifest: dict[str, Any]) -> None:
    manifest["files"][-1]["path"] = "MANIFEST.json"


FILE: Callable[[Elsewhere], str] = lambda theirs: theirs.name(theirs.manifest.files[-1].path)  # noqa: E731
MANIFEST_OF: Callable[[Elsewhere], str] = lambda theirs: theirs.name(MANIFEST)  # noqa: E731
RECORD: Callable[[Elsewhere], str] = lambda theirs: names.record_object(theirs.run)  # noqa: E731
SPEC: Callable[[Elsewhere], str] = lambda theirs: names.spec_object(theirs.run)  # noqa: E731
# What is wrong with the model of the other deployment, or with the request, and what the answer says.
REFUSALS: dict[str, tuple[Callable[[Elsewhere], object], dict[str, Any], str]] = {
    "no manifest": (_gone(MANIFEST_OF), {}, "has no committed model: there is no MANIFEST.json"),
    "no record": (_gone(RECORD), {}, "/record.json does not exist"),
    "no spec": (_gone(SPEC), {}, "/spec.json does not exist"),
    "a file is missing": (_gone(FILE), {}, "does not match its MANIFEST.json: attempt-1/seal.json is missing"),
    "a file differs": (lambda t: t.write(FILE(t), "other"), {}, "attempt-1/seal.json has 5 bytes"),
    "a file was replaced": (_rewritten, {}, "attempt-1/seal.json was written again after the commit"),
    "a file is outside": (lambda t: t.change(MANIFEST_OF(t), _listed_outside), {}, "is not below attempt-1/"),
    "no file": (lambda t: t.change(MANIFEST_OF(t), lambda m: m.update(files=[])), {}, "it lists no file"),
    "of another run": (lambda t: t.change(MANIFEST_OF(t), lambda m: m.update(run="x")), {}, "is the manifest of 'x'"),
    "its gate failed": (lambda t: t.change(RECORD(t), lambda r: r.update(GATE)), {}, "exact_match is 0.1"),
    "its spec is none": (lambda t: t.write(SPEC(t), "[]"), {}, "is not a job spec"),
    "it shares": (lambda t: t.change(SPEC(t), lambda s: s["serve"].update(share=True)), {}, "shares an endpoint"),
    "no serve": (lambda t: t.change(SPEC(t), lambda s: s.update(serve=None)), {}, "has no `serve`"),
    "no such field": (lambda _: None, {"with": {"regoin": "x"}}, "/serve/regoin"),
    "no fields": (lambda _: None, {"with": "region"}, "expected fields of `serve`"),
    "another place": (lambda _: None, {"with": {"region": "europe-west4"}}, "its URL would change"),
    "beyond the policy": (lambda _: None, {"with": {"ttl": "30d"}}, "more than `max_ttl` of the deployment's policy"),
    "no such run": (lambda _: None, {"run": "theirs-000000000000"}, "/record.json does not exist"),
    "no such bucket": (lambda _: None, {"bucket": "no-such-bucket"}, "serves no models of bucket no-such-bucket"),
    "no model": (lambda _: None, {"run": "x/y"}, "is not a model of a run; expected gs://RUNS-BUCKET/models/RUN"),
    "another source": (lambda _: None, {"topic": REQUESTS}, "belongs to the specs bucket"),
}


def test_a_refused_model_is_answered_and_changes_nothing(user: User) -> None:
    with lent(user, "cloud_run") as named:
        before = named.serves(region="us-central1")
        texts: dict[str, str] = {}
        with run_events(user) as pull:
            asked = {}
            for word, (damage, more, expected) in REFUSALS.items():
                theirs = Elsewhere(user)
                damage(theirs)
                uri = f"gs://{more.get('bucket', OTHER_RUNS_BUCKET)}/models/{more.get('run', theirs.run)}"
                fields = {"with": more["with"]} if "with" in more else {}
                rollout = named.ask(more.get("topic", OPERATIONS), serve={"run": uri, "endpoint": named.name, **fields})
                asked[rollout] = (word, expected)

            def all_arrived() -> bool:
                texts.update({event["run"]: event["details"]["text"] for _, event in pull() if event["run"] in asked})
                return texts.keys() == asked.keys()

            user.until(all_arrived)
        found = {word: expected in texts[rollout] or texts[rollout] for rollout, (word, expected) in asked.items()}
        assert found == dict.fromkeys(REFUSALS, True)
        assert named.record == before
        for rollout in asked:
            run = names.copy_id(rollout)
            left = (names.record_object(run), names.spec_object(run), names.origin_object(run))
            assert [name for name in left if list(user.store.names(name))] == []


def test_a_model_that_changes_after_its_request_is_not_served(user: User) -> None:
    """The rollout waits for a canary. Meanwhile somebody writes a file of the model again."""
    with lent(user, "cloud_run") as named:
        own = user.wait(named.put()).run
        theirs = Elsewhere(user)
        canary = named.ask(
            serve={"run": own, "endpoint": named.name, "again": True, "canary": {"percent": 10, "for": "1h"}}
        )
        named.reached(canary, RolloutState.WATCHING)
        asked = named.ask(serve={"run": theirs.uri, "endpoint": named.name})
        user.until(lambda: named.record.find(asked) is not None)
        _rewritten(theirs)
        named.ask(rollback=named.name)  # ends the canary
        rollout = named.ended(asked)
        assert rollout.state is RolloutState.ROLLED_BACK
        assert rollout.error is not None
        assert "attempt-1/seal.json does not exist any more as it was when its model was requested" in str(
            rollout.error
        )
        assert (named.record.stable, copies(named)) == (1, {rollout.run: []})
        assert is_told(named, rollout.run, f":warning: theirs was not put behind endpoint {named.name}")


def test_the_command_says_at_once_what_is_wrong(user: User) -> None:
    with lent(user, "cloud_run") as named:
        theirs, served = Elsewhere(user), ("--as", named.name)
        assert "its model_buckets are: other-project" in ran(
            user, "serve", "gs://another-bucket/models/x-0123456789ab", *served, fails=True
        )
        gone = theirs.uri.replace(theirs.run, "theirs-000000000000")
        assert "does not exist" in ran(user, "serve", gone, *served, fails=True)
        assert "/serve/regoin" in ran(user, "serve", theirs.uri, *served, "--with", "regoin=x", fails=True)
        assert "answers with revision 1" in ran(user, "serve", theirs.uri, *served, "--with", "region=europe-west4")
        record = named.record
        assert record.region == "europe-west4"
        said = ran(user, "serve", theirs.uri, *served, "--with", "region=europe-west4")
        assert "serves this model already, as revision 1" in said
        assert named.record == record
        assert theirs.uri in ran(user, "status", record.revision(1).run)
        assert "is the copy of a model for one rollout" in ran(
            user, "serve", record.revision(1).run, *served, fails=True
        )


def test_a_death_before_or_after_each_write_loses_and_doubles_nothing(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request, the rollout and the end of the endpoint, called as the functions and the workflow call them."""
    monkeypatch.setattr(requests_of_rollouts, "start_rollout", lambda *_: None)
    deaths, key = Deaths(monkeypatch), uuid.uuid4().hex
    named, theirs = Named(user), Elsewhere(user)
    before = theirs.content()
    deaths.around(RunStore, "_write", write_of)
    deaths.around(storage.Blob, "rewrite", lambda target, *_, **__: f"copy {target.name}")
    deaths.around(storage.Blob, "delete", lambda blob, **_: f"delete {blob.name}")
    deaths.around(
        storage.Blob, "upload_from_string", lambda blob, *_, **__: blob.name if blob.name.endswith(MANIFEST) else ""
    )

    def carried_out(change: str, **content: Any) -> str:
        """Request a change and take its rollout to the end; return how it ended."""
        request = Request(OPERATIONS, f"{key} {change}", key)
        rollout = names.rollout_id(OPERATIONS, request.key)
        call_until_final(change_endpoint, here(), content, request)
        answer = call_until_final(lambda: status_of(advance(here(), named.name, rollout, "me")))
        assert len(named.record.rollouts) == len(set(copies(named))) + (change == "retire")
        return str(answer["status"])

    assert carried_out("serve", serve={"run": theirs.uri, "endpoint": named.name}) == "PROMOTED"
    ((run, objects),) = copies(named).items()
    files = ("MANIFEST.json", "attempt-1/model/model.safetensors", "attempt-1/seal.json")
    assert objects == [model_prefix(run) + file for file in files]
    committed = read_manifest(clients.storage(), user.settings.runs_bucket, run, user.store.key(run))
    assert committed is not None
    assert verify_manifest(clients.storage(), user.settings.runs_bucket, committed) == []
    assert carried_out("retire", retire=named.name) == "RETIRED"
    assert copies(named) == {run: []}
    assert named.service() is None
    assert theirs.content() == before
    words = {effect.partition(" ")[0] for effect, calls in deaths.calls.items() if calls >= 2}
    assert {"write", "copy", "delete", f"{model_prefix(run)}{MANIFEST}"} <= words


def status_of(answer: Answer) -> dict[str, Any]:
    return {"status": answer.status}


@pytest.mark.slow
def test_the_console_shows_where_a_copy_comes_from(user: User, visitor: Visitor) -> None:
    with lent(user, "cloud_run") as named:
        theirs = Elsewhere(user)
        rollout = named.ended(named.ask(serve={"run": theirs.uri, "endpoint": named.name}))
        assert rollout.state is RolloutState.PROMOTED, rollout.error
        visitor.wait_for(f"/runs/{rollout.run}", lambda text: theirs.uri in text and "Succeeded" in text)
        visitor.wait_for("/models", lambda text: f"dropforge serve {theirs.uri} --as NAME" in text)
        visitor.wait_for("/endpoints", lambda text: f'href="/runs/{rollout.run}"' in text)
