"""Real clients of Google's APIs against the whole stack, where all APIs share one address."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import kubernetes
import pytest
import requests
from click.testing import CliRunner
from google.auth import jwt
from google.auth.exceptions import InvalidValue, MalformedError
from google.auth.transport.requests import Request
from google.cloud import pubsub_v1
from google.oauth2 import id_token
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge_cli.main import cli
from dropforge_local.base.identity import ISSUER
from dropforge_local.stack.deployment import IMAGES

from ..deployments import clients
from .conftest import User
from .targets import PARTS, SERVES

LOCATION = "projects/local-project/locations/us-central1"
POD = """
apiVersion: v1
kind: Pod
metadata: {name: clients}
spec:
  containers:
  - {name: main, image: "%s/train-noop:test", command: [sleep, "600"], resources: {limits: {cpu: 1, memory: 1Gi}}}
"""
SOURCE = "main:\n  params: [args]\n  steps: [{done: {return: '${args.n + 1}'}}]\n"


def test_each_api_answers_for_its_own_operations(user: User) -> None:
    """GKE's and Workflows' operations have the same path."""
    url = f"{user.info.http}/v1/{LOCATION}"

    def operation(name: str) -> tuple[int, Any]:
        answer = requests.get(f"{url}/operations/{name.rsplit('/', 1)[-1]}", timeout=60)
        return answer.status_code, answer.json()

    made = requests.post(
        f"{url}/workflows?workflowId=own-operation", json={"sourceContents": SOURCE}, timeout=60
    ).json()
    assert operation(made["name"]) == (200, made)
    assert (made["done"], made["metadata"]["verb"]) == (True, "create")
    requests.delete(f"{url}/workflows/own-operation", timeout=60).raise_for_status()
    body = {"cluster": {"name": "own-operation", "autopilot": {"enabled": True}}}
    begun = requests.post(f"{url}/clusters", json=body, timeout=60).json()
    status, shown = operation(begun["name"])
    assert (status, shown["operationType"]) == (200, "CREATE_CLUSTER")
    user.until(lambda: operation(begun["name"])[1]["status"] == "DONE")
    requests.delete(f"{url}/clusters/own-operation", timeout=60).raise_for_status()
    for name in ("operation-1-none", "workflows-none", "none"):
        assert operation(name)[0] == 404


class Receiver(BaseHTTPRequestHandler):
    """A push endpoint: keeps each request's token."""

    tokens: SimpleQueue[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.put(self.headers["Authorization"].removeprefix("Bearer "))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, SimpleQueue[str]]]:
    """Yield the URL of an endpoint of the user's own, and the tokens that it receives."""
    tokens: SimpleQueue[str] = SimpleQueue()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Receiver,), {"tokens": tokens})) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/push", tokens
        server.shutdown()
        thread.join()


def test_a_receiver_verifies_the_token_of_a_push_as_in_the_cloud(
    user: User, receiver: tuple[str, SimpleQueue[str]]
) -> None:
    url, tokens = receiver
    email = "pusher@local-project.iam.gserviceaccount.com"
    topic, subscription = (f"projects/local-project/{kind}/verified" for kind in ("topics", "subscriptions"))
    push = {"push_endpoint": url, "oidc_token": {"service_account_email": email, "audience": "https://me"}}
    clients.publisher().create_topic(name=topic)
    with pubsub_v1.SubscriberClient() as subscriber:
        subscriber.create_subscription(name=subscription, topic=topic, push_config=push)
        clients.publisher().publish(topic, b"x").result(PATIENCE_SECONDS)
        token = tokens.get(timeout=PATIENCE_SECONDS)
        subscriber.delete_subscription(subscription=subscription)
    claims = verified(user, token, "https://me")
    assert (claims["iss"], claims["email"], claims["email_verified"]) == (ISSUER, email, True)
    with pytest.raises(InvalidValue, match="audience"):
        verified(user, token, url)
    head, body, signature = token.split(".")
    with pytest.raises(MalformedError, match="signature"):
        verified(user, f"{head}.{body}.{signature[::-1]}", "https://me")


def test_a_receiver_verifies_the_token_of_a_workflows_call(user: User, receiver: tuple[str, SimpleQueue[str]]) -> None:
    url, tokens = receiver
    source = f"- call: {{call: http.post, args: {{url: '{url}', auth: {{type: OIDC}}}}}}\n"
    workflows = f"{user.info.http}/v1/{LOCATION}/workflows"
    requests.post(f"{workflows}?workflowId=caller", json={"sourceContents": source}, timeout=60).raise_for_status()
    requests.post(f"{workflows}/caller/executions", json={}, timeout=60).raise_for_status()
    claims = verified(user, tokens.get(timeout=PATIENCE_SECONDS), url)
    assert claims["email"] == "dropforge-workflow@local-project.iam.gserviceaccount.com"
    requests.delete(f"{workflows}/caller", timeout=60).raise_for_status()


def verified(user: User, token: str, audience: str) -> Any:
    """The claims of a token (a map), by the code that a receiver uses, with the stack's keys in place of Google's."""
    keys = requests.get(f"{user.info.http}/oauth2/v3/certs", timeout=60).json()["keys"]
    assert [key["kid"] for key in keys] == [jwt.decode_header(token)["kid"]]
    return id_token.verify_token(token, Request(), audience, certs_url=f"{user.info.http}/oauth2/v1/certs")


PAGE = (Path(__file__).parents[2] / "docs" / "local-stack.md").read_text()
SETTINGS = re.findall(r"^\$ ((?:export|for) .*)$", PAGE, re.M)
COMMANDS = re.findall(r"^\|[^|]*\| `((?:BOTO_CONFIG=\S+ )?(?:gcloud|gsutil|kubectl|ray|python -c) .*)` \|$", PAGE, re.M)
FILES = {
    "flow.yaml": SOURCE,
    "my-job.json": "{}",
    "token.txt": "any text",
    "pod.yaml": POD % IMAGES,
    "job.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {name: clients}, data: {a: b}}",
}


WORDS = {"openai": "python -c"}


@contextmanager
def ray_variables(user: User) -> Iterator[dict[str, str]]:
    """The variables that the page names for `ray`, read with kubectl's configuration, of a run that trains.

    The run ends afterwards: its cluster would take processor time from other tests.
    """
    run = user.drop(user.spec("hang", target={"type": "ray", **PARTS["ray"]}))
    user.wait(run, "TRAINING")
    core: Any = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(user.state / "kubeconfig")))
    label = f"{names.RUN_LABEL}={run},ray.io/node-type=head"
    cluster = core.list_namespaced_pod("dropforge", label_selector=label).items[0].metadata.labels["ray.io/cluster"]
    head = core.read_namespaced_service(f"{cluster}-head-svc", "dropforge").metadata.annotations
    token = core.read_namespaced_secret(cluster, "dropforge").data["auth_token"]
    yield {
        "RAY_ADDRESS": json.loads(head["local.dropforge/urls"])["8265"],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": b64decode(token).decode(),
    }
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait(run, "CANCELLED")


@contextmanager
def openai_variables(user: User) -> Iterator[dict[str, str]]:
    """The variables that the page names for `openai`, of a run that serves."""
    run = user.drop(user.spec(serve={"type": "cloud_run", **SERVES["cloud_run"]}))
    endpoint = user.wait(run, "SUCCEEDED").endpoint
    assert endpoint is not None
    token = CliRunner().invoke(cli, ["token", run, "--state", str(user.state)]).output.strip()
    yield {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": token, "MODEL": endpoint.model}


@contextmanager
def no_variables(user: User) -> Iterator[dict[str, str]]:
    yield {}


VARIABLES = {"ray": ray_variables, "openai": openai_variables}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "client", ["gcloud", "gsutil", "kubectl", pytest.param("ray", marks=pytest.mark.engines), "openai"]
)
def test_the_commands_of_the_page_work(user: User, tmp_path: Path, client: str, request: pytest.FixtureRequest) -> None:
    """In bash, as a user types them. The commands of one client in the table's order, as they build on each other."""
    path = Path(sys.executable).parent
    if client == "ray":
        path = request.getfixturevalue("maxtext_environment") / "bin"
    for name in {"gcloud", "gsutil"} if client == "gsutil" else {client} - {"ray", "openai"}:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    listed = [command for command in COMMANDS if f" {command}".partition(f" {WORDS.get(client, client)} ")[1]]
    if client == "gsutil":
        clients.storage().create_bucket("clients-of-gsutil")
        listed = [command.replace("gs://clients/notes", "gs://clients-of-gsutil") for command in listed]
    assert listed
    settings = "\n".join(SETTINGS).replace("PORT", user.info.http.rsplit(":", 1)[1])
    environment = {name: value for name, value in os.environ.items() if name != "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE"}
    environment |= {"CLOUDSDK_CONFIG": str(tmp_path / "gcloud"), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    environment |= {"HOME": str(tmp_path), "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    failures = []
    with VARIABLES.get(client, no_variables)(user) as variables:
        for command in listed:
            script = f"{settings}\n{command.replace('build/local', str(user.state))}"
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            if done.returncode:
                failures.append(f"{command}\n{done.stderr[-1000:]}")
    assert not failures, "\n\n".join(failures)


def test_the_page_lists_commands_of_each_client() -> None:
    assert len(COMMANDS) >= 38
    assert len(SETTINGS) == 3
