"""terraform/permissions.yaml grants every call of the functions and the containers, and nothing else."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.endpoints.store import EndpointStore
from dropforge.run.record import Record, RunState, Source, Transition
from dropforge.spec import JobSpec
from dropforge_local.base.identity import Identity
from dropforge_local.base.recording import FILE, SERVER, TRAINER
from dropforge_local.stack import control as local
from dropforge_local.stack.functions_host import entry_points

from ..deployments import clients
from ..stack.conftest import NOOP_CONFIG, User, user_of
from ..stack.named import EVERY, KINDS
from ..stack.targets import PARTS, SERVES
from .calls import ENDERS, Grant, Need, apis, grants, methods, needs, unmet, unused
from .configuration import enabled_apis, permissions

DATA = "recorded-data"
HALVES = {"on_spec_uploaded": "finalized", "on_spec_deleted": "deleted", "on_spec_message": ""}
OWN_CLUSTER = {"type": "gke", **PARTS["gke"], "cluster": {"create": True}}
RAY_CLUSTER = {"type": "ray", **PARTS["ray"], "cluster": {"create": True}}
NOT_QUEUED = {"type": "tpu_vm", "placements": [{"zone": "us-west4-a"}], "queued": False}
STARTED = '{"type": "started", "run": "RUN", "attempt": 1, "sequence": 1, "time": "2026-11-22T00:00:00Z"}'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the fixture waits for all of its runs


# Permissions that no run of this test needs, and the case that needs them.
NOT_STARTED = "needed when a pod does not start"
KEYED = "needed when a spec with an endpoint that has a key comes by a message, or is submitted again"
EXISTS_ALREADY = "needed when an earlier call has created the object and its answer was lost"
# The local stack lacks these: the platform's own log, and the docker of a machine.
ELSEWHERE = {"logging.entries.write", "a pull by docker on a TPU VM"}
STAYS = "needed when the object stays after its owner was deleted"
OWNED = ("persistentvolumeclaims", "pods")
LATE = "needed when a call makes a name that has ended, because the cloud executes it late"
FIRST = "needed by the first process of a day that accepts a run: it writes the key of the day"
LATER = "needed by every other process: it finds the key of the day when it would write the key"
SUBMITTERS = ("on_spec_message", "on_spec_uploaded", "sweep")
UNUSED = {
    **{Grant(account, "kubernetes", f"delete {plural}"): STAYS for account in ENDERS for plural in OWNED},
    **{
        Grant(account, "kubernetes", f"{verb} ray.io/rayclusters"): STAYS
        for account in ENDERS
        for verb in ("delete", "get")
    },
    Grant("access", "runs_bucket", "storage.buckets.get"): "needed by vLLM's streamer, on a GPU",
    Grant("access", "cache_objects", "storage.objects.create"): "needed by what compiles: vLLM on a GPU or a TPU",
    Grant("ask", "project", "run.routes.invoke"): "lent to the console (tests/stack/test_console_iap.py)",
    Grant("deploy", "kubernetes", "get autoscaling/horizontalpodautoscalers"): EXISTS_ALREADY,
    Grant("deploy", "kubernetes", "get monitoring.googleapis.com/podmonitorings"): EXISTS_ALREADY,
    # On a slow machine pods are ready when `deploy` looks first.
    Grant("deploy", "kubernetes", "list events"): NOT_STARTED,
    **{
        Grant("rollout", "kubernetes", f"get {plural}"): EXISTS_ALREADY
        for plural in (
            "autoscaling/horizontalpodautoscalers",
            "monitoring.googleapis.com/podmonitorings",
            "networking.gke.io/gcpbackendpolicies",
            "networking.gke.io/healthcheckpolicies",
        )
    },
    Grant("rollout", "kubernetes", "patch services"): "needed without a Gateway (tests/stack/test_without_gateway.py)",
    **{
        Grant(
            "sweep", "kubernetes", f"{verb} {plural}"
        ): "needed when the objects of an endpoint without a record are left"
        for verb in ("delete", "get")
        for plural in (
            "gateway.networking.k8s.io/httproutes",
            "networking.gke.io/gcpbackendpolicies",
            "networking.gke.io/healthcheckpolicies",
        )
    },
    Grant("deploy", "project", "workflows.executions.list"): "needed when a call of deploy is repeated",
    Grant("rollout", "kubernetes", "list events"): NOT_STARTED,
    Grant("inspect", "kubernetes", "list events"): NOT_STARTED,
    Grant("inspect", "own_clusters", "container.events.list"): NOT_STARTED,
    Grant("inspect", "project", "run.jobs.get"): "needed when a job has no execution",
    **{Grant(account, "key_objects", "storage.objects.create"): FIRST for account in SUBMITTERS},
    **{Grant(account, "key_objects", "storage.objects.delete"): LATER for account in SUBMITTERS},
    Grant("on_spec_message", "endpoint_keys", "secretmanager.versions.get"): KEYED,
    Grant("sweep", "endpoint_keys", "secretmanager.versions.get"): KEYED,
    **{
        Grant(account, scope, permission): "needed by a model of another deployment (tests/stack/test_copies.py)"
        for account, scope, permission in (
            ("on_spec_message", "model_buckets", "storage.objects.get"),
            ("on_spec_message", "model_buckets", "storage.objects.list"),
            ("rollout", "model_buckets", "storage.objects.get"),
            ("rollout", "model_buckets", "storage.objects.list"),
            ("rollout", "copied_objects", "storage.objects.create"),
            ("rollout", "copied_objects", "storage.objects.delete"),
        )
    },
    **{
        Grant("sweep", "dns_zone", permission): LATE
        for permission in ("dns.changes.create", "dns.changes.get", "dns.resourceRecordSets.delete")
    },
    Grant("rollout", "tpus", "tpu.operations.list"): "needed for a machine that waits in no queue",
    Grant("rollout", "project", "monitoring.timeSeries.list"): "needed by a canary (tests/stack/test_canary.py)",
    Grant("rollout", "runs_bucket", "storage.objects.list"): "needed when a model has no manifest any more",
    **{
        Grant("preflight", "project", permission): "the local stack does not emulate it (tests/cli/test_preflight.py)"
        for permission in ("cloudquotas.quotas.get",)
    },
    Grant("provision", "tpus", "compute.zoneOperations.get"): "needed when a disk's creation ends without a disk",
}


def test_methods_need_the_permissions_that_google_documents() -> None:
    """Every reason in permissions.yaml is a method that needs the permission."""
    reasons = {
        (call, permission)
        for account in permissions()["accounts"].values()
        for scope, held in account["grants"].items()
        for permission, calls in held.items()
        for call in calls
    }
    known = methods()
    wrong = {(call, permission) for call, permission in reasons if permission not in known.get(call, [permission])}
    assert wrong == set()
    assert {call for call, _ in reasons if call not in known} == ELSEWHERE | {
        call for call, _ in reasons if call.endswith(" (own cluster)")
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of all calls of a stack whose runs ended in every way."""
    state = tmp_path_factory.mktemp("recorded")
    replace(NOOP_CONFIG, record=True).save(state)
    local.up(state)
    try:
        with patch.dict(os.environ):  # `user_of` sets variables and drops the clients of another stack
            live(user_of(state))
    finally:
        local.down(state)
    return state / FILE


@pytest.fixture(scope="module")
def needed(recorded: Path) -> set[Need]:
    return needs(recorded)


def test_every_api_that_is_called_is_enabled(recorded: Path) -> None:
    called = apis(recorded)
    assert {"sts", "storage", "run"} <= called <= enabled_apis()


def test_every_call_is_granted(needed: set[Need]) -> None:
    assert unmet(needed, grants()) == set()


def test_every_function_and_container_has_called(needed: set[Need]) -> None:
    # The server reads its API key. The demo's test covers the rest of what it calls.
    assert {need.account for need in needed} == {*entry_points(), TRAINER, SERVER}


def test_every_grant_is_needed(needed: set[Need]) -> None:
    left = unused(needed, grants(), entry_points())
    assert {grant for grant in left if grant not in UNUSED} == set()
    # Not `left`: a slow machine needs some of them.
    assert set(UNUSED) <= set(grants()), "UNUSED names a permission that is not granted"


def live(user: User) -> None:
    """Runs on every target that succeed, serve, fail, and are cancelled; endpoints that are cancelled and swept."""
    prepare(user)
    unaccepted = kept_and_marked(user)
    swept = {kind: user.drop(spec(user, kind, "repeat", serve=True)) for kind in SERVES}
    cancelled = {kind: user.drop(spec(user, kind, serve=True)) for kind in SERVES}
    hanging = [publish(user, json.dumps(spec(user, kind, "hang")).encode()) for kind in PARTS]
    hanging.append(user.drop(spec(user, "cloud_run", "hang"), "specs/deleted.json"))
    buckets = (DATA, user.settings.specs_bucket)
    failing = [publish(user, stored(user, bucket, user.spec("exit-3"))) for bucket in buckets]
    failing += [user.drop(user.spec("exit-3", target=target)) for target in (OWN_CLUSTER, RAY_CLUSTER, NOT_QUEUED)]
    named = {
        kind: [
            user.drop(user.spec(serve={**serve, "type": kind, "endpoint": f"on-{kind.replace('_', '-')}"}))
            for _ in range(3)
        ]
        for kind, serve in ((kind, {**SERVES[kind], "price_usd_per_hour": 2}) for kind in EVERY)
    }
    rejected = [user.drop(user.spec(dataset={"source": f"gs://{DATA}/none"}))]
    rejected += [publish(user, json.dumps({"spec_uri": f"gs://{bucket}/none.json"}).encode()) for bucket in buckets]
    late_and_unknown(user)
    for kind in PARTS:
        assert call(user, "preflight", {"spec": json.dumps(spec(user, kind, serve=kind in SERVES))})
    lost = [submitted_by_halves(user, function) for function in HALVES]
    for run in hanging:
        record = user.wait(run, "TRAINING")
        again = {"run": run, "execution": record.execution, "attempt": 1, "callback_url": record.callback_url}
        assert call(user, "provision", again), "a second call, as if the first answer were lost"
        if run == hanging[-1]:
            clients.storage().bucket(user.settings.specs_bucket).blob("specs/deleted.json").delete()
        else:
            user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    for run in [*swept.values(), *cancelled.values()]:
        record = user.wait(run, timeout=PATIENCE_SECONDS)
        assert record.state is RunState.SUCCEEDED, record.error
    for run in cancelled.values():
        user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    for run in swept.values():
        user.store.update(run, out_of_time)
    assert {user.wait(run).state for run in rejected} == {RunState.REJECTED}
    ended = [user.wait(run, timeout=PATIENCE_SECONDS).state for run in [*hanging, *failing, *lost]]
    assert set(ended) == {RunState.CANCELLED, RunState.FAILED, RunState.SUCCEEDED}
    for run in cancelled.values():
        user.wait_for(run, lambda record: bool(record.endpoint and record.endpoint.ended))
    user.until(lambda: call(user, "sweep", {}) and not any(map(user.resources, swept.values())))
    user.until(lambda: call(user, "sweep", {}) and user.store.find(unaccepted))
    for kind, runs in named.items():
        end_named(user, f"on-{kind.replace('_', '-')}", runs)
    assert user.wait(unaccepted).state is RunState.SUCCEEDED


def end_named(user: User, name: str, runs: list[str]) -> None:
    """Roll a named endpoint back, whose models are those of `runs`; let the sweep suspend it, resume it, retire it."""
    endpoints = EndpointStore(user.store, Clock())
    for run in runs:
        record = user.wait(run, timeout=PATIENCE_SECONDS)
        assert record.state is RunState.SUCCEEDED, record.error
    serves = endpoints.record(name).stable
    if endpoints.record(name).type in KINDS:
        user.publish("dropforge-operations", json.dumps({"rollback": name}).encode())
        user.until(lambda: endpoints.record(name).stable != serves)
    budget: dict[str, Any] = {"endpoint": name, "usd": 1e-6, "per": "month"}
    user.publish("dropforge-operations", json.dumps({"budget": budget}).encode())
    user.until(lambda: call(user, "sweep", {}) and endpoints.record(name).suspended)
    user.publish("dropforge-operations", json.dumps({"budget": {**budget, "usd": 1000}}).encode())
    user.until(lambda: not endpoints.record(name).suspended and endpoints.record(name).current is None)
    change = {"extend": {"endpoint": name, "ttl": "1s"}}
    user.publish("dropforge-operations", json.dumps(change).encode())
    user.until(lambda: call(user, "sweep", {}) and endpoints.record(name).retired)


def prepare(user: User) -> None:
    """Create a bucket with data, and a secret."""
    bucket = clients.storage().create_bucket(DATA)
    bucket.blob("rows.jsonl").upload_from_string('{"text": "a row of text"}')
    project, secrets = f"projects/{user.settings.project}", clients.secrets()
    secrets.create_secret(parent=project, secret_id="hf-token", secret={"replication": {"automatic": {}}})
    secrets.add_secret_version(parent=f"{project}/secrets/hf-token", payload={"data": b"value"})


def spec(user: User, kind: str, behave: str = "succeed", *, serve: bool = False) -> dict[str, Any]:
    at_once = {"queued": False} if (kind, behave) == ("tpu_vm", "repeat") else {}
    nodes = {"nodes": 2, "node_network": "tcp"} if (kind, behave) == ("gke", "hang") else {}
    return user.spec(
        behave,
        target={"type": kind, **PARTS[kind], **nodes},
        serve={"type": kind, **SERVES[kind], **at_once} if serve else None,
        dataset={"source": f"gs://{DATA}/rows.jsonl"},
        secrets={"HF_TOKEN": "hf-token"},
        notify={"slack": {"webhook_secret": "slack-webhook"}},
    )


def stored(user: User, bucket: str, spec: dict[str, Any]) -> bytes:
    """Store a spec in a bucket; return a message that names it."""
    clients.storage().bucket(bucket).blob("stored.json").upload_from_string(json.dumps(spec))
    return json.dumps({"spec_uri": f"gs://{bucket}/stored.json"}).encode()


def publish(user: User, message: bytes) -> str:
    """Publish a request message; return its run."""
    key = uuid.uuid4().hex
    user.publish("dropforge-requests", message, idempotency_key=key)
    return names.run_id_of_message(key)


def kept_and_marked(user: User) -> str:
    """Store the spec and the mark of a run only, as if its submit crashed; return the run."""
    run = names.run_id_of_message(uuid.uuid4().hex)
    wanted = JobSpec.model_validate(spec(user, "cloud_run"))
    user.store.put_new(names.spec_object(run), wanted.model_dump_json(by_alias=True).encode())
    user.store.put_new(names.open_object(run), Source(text="message of the test").model_dump_json().encode())
    return run


def late_and_unknown(user: User) -> None:
    """Deliver events of a spec that does not exist any more, and call functions for an unknown run."""
    run = "unknown-0123456789ab"
    event = {"bucket": user.settings.specs_bucket, "name": "specs/gone.json", "generation": "1", "size": "9"}
    for function, change in (("on_spec_deleted", "deleted"), ("on_spec_uploaded", "finalized")):
        headers = cloud_event(f"google.cloud.storage.object.v1.{change}")
        user.until(partial(call, user, function, event, headers))
    user.publish("dropforge-job-events", STARTED.replace("RUN", run).encode())
    assert not call(user, "access", {"run": run, "proof": ""})
    assert not call(user, "ask", {"of": run})
    assert not call(user, "preflight", {"spec": {}})
    assert not call(user, "provision", {"run": run, "execution": "e", "attempt": 1, "callback_url": ""})
    assert not call(user, "teardown", {"run": run, "execution": "e", "scope": "run", "keep_endpoint": False})


def cloud_event(kind: str) -> dict[str, str]:
    return {"ce-specversion": "1.0", "ce-id": uuid.uuid4().hex, "ce-source": "//test", "ce-type": kind}


def submitted_by_halves(user: User, function: str) -> str:
    """Deliver the event of a run whose first delivery crashed before it started an execution; return the run."""
    bucket, name, key = user.settings.specs_bucket, f"specs/{function}.json", uuid.uuid4().hex
    if change := HALVES[function]:
        run = names.run_id_of_object(bucket, name, 1)
        event: dict[str, Any] = {"bucket": bucket, "name": name, "generation": "1", "size": "9"}
        kind = f"google.cloud.storage.object.v1.{change}"
    else:
        run = names.run_id_of_message(key)
        message = {"data": "e30=", "messageId": "1", "attributes": {"idempotency_key": key}}
        event = {"message": message, "subscription": "s"}
        kind = "google.cloud.pubsub.topic.v1.messagePublished"
    when = utc_now() - timedelta(minutes=1)
    history = [Transition(state=RunState.ACCEPTED, time=when)]
    wanted = JobSpec.model_validate(user.spec())
    user.store.put_new(names.spec_object(run), wanted.model_dump_json(by_alias=True).encode())
    record = Record(run=run, name="n", source="s", state=RunState.ACCEPTED, created=when, history=history)
    assert user.store.create(record)
    if change == "deleted":
        user.store.close(run)  # otherwise a sweep may start the execution before the event
    user.until(lambda: call(user, function, event, cloud_event(kind)))
    return run


def out_of_time(record: Record) -> Record:
    assert record.endpoint is not None
    return record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"expires": record.created})})


def call(user: User, function: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bool:
    """Call a function as Eventarc or Cloud Scheduler does; return whether the call succeeds."""
    url = user.info.functions + function
    token = Identity((user.state / "identity").read_text()).token("OIDC", url)
    sent = {"Authorization": f"Bearer {token}", **(headers or {})}
    return requests.post(url, json=body, headers=sent, timeout=60).ok
