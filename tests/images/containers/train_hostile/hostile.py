"""A training container that tries to reach all that does not belong to its run, with Google's own clients.

The label `victim` of its spec names another run; without the label it starts and waits to be ended. Every try is in
models/<its own run>/tried.json: what was tried, and the code of the answer, or "done". Then the container fails.
A victim first writes files of its own (LEFT).
"""

import hmac
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any
from urllib.parse import quote

import requests
from google.api_core.exceptions import GoogleAPICallError
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, run_v2, secretmanager_v1, storage, tpu_v2
from google.oauth2.credentials import Credentials

RUN, ATTEMPT = os.environ["DROPFORGE_RUN"], int(os.environ["DROPFORGE_ATTEMPT"])
RUNS, JOB_EVENTS = os.environ["DROPFORGE_RUNS_BUCKET"], os.environ["DROPFORGE_JOB_EVENTS_TOPIC"]
KEY = os.environ["DROPFORGE_RUN_KEY"]
HTTP = os.environ["STORAGE_EMULATOR_HOST"]
METADATA = f"http://{os.environ['GCE_METADATA_HOST']}/computeMetadata/v1"
PROJECT = JOB_EVENTS.split("/")[1]
SPECS = RUNS.removesuffix("runs") + "specs"
PLACE, ZONE = f"projects/{PROJECT}/locations/us-central1", f"projects/{PROJECT}/locations/us-west4-a"
WORKFLOW = f"{PLACE}/workflows/dropforge-run"
Try = tuple[str, Callable[[], Any]]

ACCESS = os.environ["DROPFORGE_ACCESS_URL"]


def identity(url: str) -> dict[str, str]:
    """The headers with which the container's account calls a function."""
    path = f"{METADATA}/instance/service-accounts/default/identity"
    token = requests.get(path, params={"audience": url}, headers={"Metadata-Flavor": "Google"}, timeout=30).text
    return {"Authorization": f"Bearer {token}"}


def access() -> Any:
    """The run's token and spec (dropforge/stages/access.py)."""
    body = json.loads(os.environ["DROPFORGE_ACCESS_REQUEST"])
    return requests.post(ACCESS, json=body, headers=identity(ACCESS), timeout=60).json()


GRANTED = access()
CLIENTS = {
    "token": storage.Client(PROJECT, Credentials(GRANTED["access_token"])),
    "account": storage.Client(PROJECT, AnonymousCredentials()),
}
# What each victim has written before, and what it may write next.
LEFT = (
    "models/{run}/MANIFEST.json",
    "models/{run}/attempt-1/model/config.json",
    "checkpoints/{run}/step-00000001/_COMPLETE",
    "machines/{run}/attempt-1/startup.log",
)
AHEAD = (
    "models/{run}/attempt-2/model/config.json",
    "checkpoints/{run}/step-00000002/_COMPLETE",
    "checkpoints/{run}/tokens/0.safetensors",
    "machines/{run}/attempt-1/status.json",
    "machines/{run}/serve/status.json",
)


def proof(name: str, content: bytes) -> str:
    """dropforge/run/proof.py, with the key of this run."""
    return hmac.digest(KEY.encode(), f"{name}\n".encode() + content, "sha256").hex()


def with_proof(name: str, document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**document, "proof": proof(name, canonical)})


def rest(api: Any) -> Any:
    return api(transport="rest", credentials=AnonymousCredentials(), client_options={"api_endpoint": HTTP})


def put(bucket: Any, name: str, content: object = None, **options: Any) -> Callable[[], Any]:
    text = json.dumps(content if content is not None else {"run": RUN, "forged": True})
    return lambda: bucket.blob(name).upload_from_string(text, retry=None, **options)


def objects(victim: str) -> Iterator[Try]:
    """Cloud Storage: with the run's token, and with the container's account, which is nobody's."""
    for who, client in ((f"{what}: ", made) for what, made in CLIENTS.items()):
        runs, specs = client.bucket(RUNS), client.bucket(SPECS)
        for what, work in chain(written(victim, runs), artifacts(victim, runs), forged(victim, runs)):
            yield who + what, work
        yield f"{who}drop a spec", put(specs, "specs/forged.json")
        yield f"{who}read the specs bucket", partial(listed, specs, "")
        yield f"{who}delete the runs bucket", partial(runs.delete, retry=None)
        yield f"{who}open the runs bucket to all", partial(open_to_all, runs)
        yield f"{who}create a bucket", partial(client.create_bucket, f"{RUN}-loot", retry=None)


def written(victim: str, runs: Any) -> Iterator[Try]:
    """What only the control plane writes, in every way to write."""
    keys = [f"keys/days/{datetime.now(UTC):%Y-%m-%d}", "keys/own"]
    names = [
        *(f"runs/{victim}/{name}.json" for name in ("record", "spec", "report", "errors")),
        f"runs/{victim}/events/0001-000000000000001-failed.json",
        f"runs/{RUN}/record.json",
        f"runs/open/{RUN}",
        "runs/open/machine/machine/y",
        f"runs/{victim}/machine/attempt-1/status.json",
        "index/runs.json",
        "endpoints/other/endpoint.json",
        *keys,
    ]
    yield "write one's own model", put(runs, f"models/{RUN}/own")
    for name in names:
        yield from takes(runs, name)
    for name in (*keys, f"runs/{victim}/record.json", f"runs/{victim}/spec.json"):
        yield from reads(runs, name)


def artifacts(victim: str, runs: Any) -> Iterator[Try]:
    """The objects that the containers of another run have written, or are about to write."""
    for name in (*LEFT, *AHEAD):
        yield from takes(runs, name.format(run=victim))
    for name in LEFT:
        yield from reads(runs, name.format(run=victim))
    yield "write a machine's file of no run", put(runs, "machines/open/x")
    for prefix in ("", "models/", "checkpoints/", "machines/", "keys/", "runs/", f"models/{victim}/", f"models/{RUN}"):
        yield f"list {prefix or 'everything'}", partial(listed, runs, prefix)
    yield "list one's own model", partial(listed, runs, f"models/{RUN}/")


def takes(runs: Any, name: str) -> Iterator[Try]:
    """Every way to write or to end an object."""
    blob, own = runs.blob(name), runs.blob(f"models/{RUN}/own")
    yield f"write {name}", put(runs, name)
    yield f"write {name}, only if it is new", put(runs, name, if_generation_match=0)
    yield f"open a resumable upload of {name}", lambda: blob.create_resumable_upload_session(size=1)
    yield f"copy over {name}", lambda: runs.copy_blob(own, runs, name, retry=None)
    yield f"compose {name}", lambda: blob.compose([own], retry=None)
    yield f"move a model over {name}", lambda: runs.rename_blob(own, name, retry=None)
    yield f"change the metadata of {name}", lambda: change(blob)
    yield f"delete {name}", lambda: blob.delete(retry=None)


def reads(runs: Any, name: str) -> Iterator[Try]:
    blob, copy = runs.blob(name), f"models/{RUN}/copy"
    yield f"read {name}", lambda: blob.download_as_bytes(retry=None)
    yield f"copy {name}", lambda: runs.copy_blob(blob, runs, copy, retry=None)


def listed(bucket: Any, prefix: str) -> list[Any]:
    return list(bucket.list_blobs(prefix=prefix, retry=None))


def forged(victim: str, runs: Any) -> Iterator[Try]:
    """Documents about the victim's present attempt, in the right form, proved with this run's key."""
    now = datetime.now(UTC).isoformat()
    source = {"uri": "forged", "revision": "0"}
    manifest = {
        "run": victim,
        "attempt": 1,
        "created": now,
        "spec_sha256": "0" * 64,
        "base": source,
        "dataset": source,
        "serve_path": "attempt-1/model",
        "metrics": {"exact_match": 1.0},
        "files": [],
    }
    status = {
        "run": victim,
        "attempt": 1,
        "time": now,
        "step": "container",
        "exit_code": 70,
        "error_class": "code",
        "message": "forged",
    }
    documents = {
        "manifest": (f"models/{victim}/MANIFEST.json", manifest),
        "checkpoint": (f"checkpoints/{victim}/step-99999999/_COMPLETE", {"step": 99999999, "files": [], "extra": {}}),
        "machine's end": (f"machines/{victim}/attempt-1/status.json", status),
    }
    for what, (name, document) in documents.items():
        body = with_proof(name, document)
        yield f"forge another run's {what}", partial(runs.blob(name).upload_from_string, body)


def change(blob: Any) -> None:
    blob.metadata = {"forged": "yes"}
    blob.patch(retry=None)


def open_to_all(runs: Any) -> None:
    runs.set_iam_policy(runs.get_iam_policy(retry=None), retry=None)


def messages(victim: str) -> Iterator[Try]:
    publisher = pubsub_v1.PublisherClient()

    def publish(topic: str, content: object) -> Callable[[], Any]:
        data = json.dumps(content).encode()
        claimed = {"proof": proof("job-event", data)}
        return lambda: publisher.publish(topic, data, timeout=20, **claimed).result(20)

    topics = JOB_EVENTS.removesuffix("job-events")
    yield "cancel a run by message", publish(f"{topics}requests", {"cancel": victim})
    yield "announce an end", publish(f"{topics}run-events", {"run": victim, "state": "FAILED"})
    subscriber = pubsub_v1.SubscriberClient()
    subscription = f"projects/{PROJECT}/subscriptions/{RUN}"
    yield "listen to events", lambda: subscriber.create_subscription(name=subscription, topic=JOB_EVENTS, retry=None)
    event = {"run": victim, "attempt": 1, "sequence": 10**12, "time": datetime.now(UTC).isoformat()}
    manifest = f"gs://{RUNS}/models/{RUN}/MANIFEST.json"
    ends: dict[str, dict[str, object]] = {
        "succeeded": {"manifest_uri": manifest},
        "failed": {"error_class": "code", "message": "forged"},
        "preempted": {"step": 1},
    }
    for kind, fields in ends.items():
        yield f"say that another run {kind}", publish(JOB_EVENTS, {**event, "type": kind, **fields})


def machines(victim: str) -> Iterator[Try]:
    """The APIs that cost money, and those that end other runs."""
    jobs, services, tpu = rest(run_v2.JobsClient), rest(run_v2.ServicesClient), rest(tpu_v2.TpuClient)
    container = {"image": f"us-central1-docker.pkg.dev/{PROJECT}/dropforge/train-trl:local"}
    job = {"template": {"template": {"containers": [container]}}}
    service = {"template": {"containers": [container]}}
    node = {"accelerator_type": "v5litepod-8", "runtime_version": "v2-alpha-tpuv5-lite"}
    name = f"{PLACE}/jobs/df-{victim}-a1"
    yield "list jobs", lambda: list(jobs.list_jobs(parent=PLACE))
    yield "delete a run's job", lambda: jobs.delete_job(name=name)
    yield "start a run's job", lambda: jobs.run_job(name=name)
    yield "create a job", lambda: jobs.create_job(parent=PLACE, job=job, job_id="loot")
    yield "create a service", lambda: services.create_service(parent=PLACE, service=service, service_id="loot")
    yield "create a TPU VM", lambda: tpu.create_node(parent=ZONE, node=node, node_id="loot")
    yield "list TPU VMs", lambda: list(tpu.list_nodes(parent=ZONE))


def secrets(_: str) -> Iterator[Try]:
    manager = rest(secretmanager_v1.SecretManagerServiceClient)
    webhook = f"projects/{PROJECT}/secrets/slack-webhook"
    yield "read the webhook", lambda: manager.access_secret_version(name=f"{webhook}/versions/latest")
    yield "list secrets", lambda: list(manager.list_secrets(parent=f"projects/{PROJECT}"))
    yield "replace the webhook", lambda: manager.add_secret_version(parent=webhook, payload={"data": b"x"})


def plain(victim: str) -> Iterator[Try]:
    """What has no client here, and the stack's own switches."""
    calls = [
        ("create a cluster", "POST", f"/v1/{PLACE}/clusters", {"cluster": {"name": "loot"}}),
        ("delete the cluster", "DELETE", f"/v1/{PLACE}/clusters/dropforge", None),
        ("create a disk", "POST", f"/compute/v1/projects/{PROJECT}/zones/us-west4-a/disks", {"name": "loot"}),
        ("start an execution", "POST", f"/v1/{WORKFLOW}/executions", {"argument": json.dumps({"run": victim})}),
        ("list executions", "GET", f"/v1/{WORKFLOW}/executions", None),
        ("wake an execution", "POST", f"/v1/{WORKFLOW}/executions/e/callbacks/c", {}),
        ("replace the workflow", "PATCH", f"/v1/{WORKFLOW}", {"sourceContents": "main:\n  return: 1"}),
        ("crash the stack", "POST", "/_local/crash", {"commit": 1, "moment": "before", "kill": "stack"}),
        ("pose as a function", "GET", f"/v1/{WORKFLOW}/executions", "x-dropforge-caller"),
    ]
    for what, method, path, body in calls:
        headers = {str(body): "sweep"} if isinstance(body, str) else {}
        content = None if isinstance(body, str) else body
        yield what, partial(call, method, path, content, headers)


def functions(victim: str) -> Iterator[Try]:
    """The function that gives tokens, asked for those of another run; and the functions of others."""
    own = json.loads(os.environ["DROPFORGE_ACCESS_REQUEST"])
    asked = {
        "another run's token with one's own proof": {**own, "run": victim},
        "another run's token without a proof": {"run": victim, "proof": ""},
        "another run's token with a proof by one's own key": {"run": victim, "proof": proof("access", victim.encode())},
        "the token of no run": {"run": "nobody-0123456789ab", "proof": proof("access", b"nobody-0123456789ab")},
        "one's own token": own,
    }
    for what, body in asked.items():
        yield f"ask for {what}", partial(invoke, ACCESS, body)
    for name in ("provision", "teardown", "sweep", "on_job_event"):
        url = ACCESS.removesuffix("access") + name
        body = {"run": victim, "execution": "e", "scope": "run", "keep_endpoint": False}
        yield f"call {name}", partial(invoke, url, body)
    yield "widen the run's token", widen


def invoke(url: str, body: object) -> None:
    call("POST", url, body, identity(url))


def widen() -> None:
    """Exchange the token of the run for one of the same account, with the whole bucket as its boundary."""
    place = f"//storage.googleapis.com/projects/_/buckets/{RUNS}"
    rule = {"availableResource": place, "availablePermissions": ["inRole:roles/storage.objectUser"]}
    kind = "urn:ietf:params:oauth:token-type:access_token"
    form = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "requested_token_type": kind,
        "subject_token_type": kind,
        "subject_token": GRANTED["access_token"],
        "options": quote(json.dumps({"accessBoundary": {"accessBoundaryRules": [rule]}})),
    }
    checked(requests.post(f"{HTTP}/v1/token", data=form, timeout=30))


def call(method: str, path: str, body: object, headers: dict[str, str]) -> None:
    url = path if path.startswith("http") else HTTP + path
    checked(requests.request(method, url, json=body, headers=headers, timeout=60))


def checked(response: requests.Response) -> None:
    if not response.ok:
        error = GoogleAPICallError(response.text)
        error.code = response.status_code
        raise error


def outcome(work: Callable[[], Any]) -> str:
    try:
        work()
    except GoogleAPICallError as error:
        return str(getattr(error.code, "value", error.code))
    except requests.RequestException as error:
        return repr(error)
    return "done"


def main() -> int:
    runs = CLIENTS["token"].bucket(RUNS)
    victim = GRANTED["spec"]["labels"].get("victim")
    if victim is None:
        for name in LEFT:
            put(runs, name.format(run=RUN), {"run": RUN, "of": "the victim"})()
        started = {
            "type": "started",
            "run": RUN,
            "attempt": ATTEMPT,
            "sequence": 1,
            "time": datetime.now(UTC).isoformat(),
        }
        data = json.dumps(started).encode()
        claimed = {"proof": proof("job-event", data)}
        pubsub_v1.PublisherClient().publish(JOB_EVENTS, data, **claimed).result(60)
        time.sleep(3600)
    kinds = (objects, messages, machines, secrets, plain, functions)
    tried = {what: outcome(work) for kind in kinds for what, work in kind(victim)}
    put(runs, f"models/{RUN}/tried.json", tried)()
    return 65


if __name__ == "__main__":
    sys.exit(main())
