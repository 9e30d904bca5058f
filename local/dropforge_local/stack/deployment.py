"""The project that the stack emulates: the names of its resources, as terraform/ gives them, and clients' settings."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dropforge_local.base.ports import HOST

PROJECT, LOCATION = "local-project", "us-central1"
IMAGES = f"{LOCATION}-docker.pkg.dev/{PROJECT}/dropforge"
CLUSTER_NAME = "dropforge"
CLUSTER = f"projects/{PROJECT}/locations/{LOCATION}/clusters/{CLUSTER_NAME}"  # exists as long as the state does
SPECS_BUCKET, RUNS_BUCKET = f"{PROJECT}-dropforge-specs", f"{PROJECT}-dropforge-runs"
OTHER_RUNS_BUCKET = "other-project-dropforge-runs"  # of another deployment; it does not exist until a user creates it
WORKFLOW, ROLLOUT_WORKFLOW = "dropforge-run", "dropforge-rollout"
REQUESTS, JOB_EVENTS, RUN_EVENTS = "dropforge-requests", "dropforge-job-events", "dropforge-run-events"
OPERATIONS, CONSOLE = "dropforge-operations", "dropforge-console"
CLIENT_RANGES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")  # var.client_ranges
NAMESPACE, TRAINER, SERVER, NODES = "dropforge", "dropforge-trainer", "dropforge-server", "dropforge-nodes"
SLACK_SECRET = "slack-webhook"
ENDPOINT_KEY_SECRET = "dropforge-endpoint-key"
GATEWAY, PROXY_RANGE = "endpoints", "10.129.0.0/23"  # of terraform/kubernetes.tf, and of the load balancer's proxies
HEALTH_RANGES = ("35.191.0.0/16", "130.211.0.0/22")  # of Google's health checks
ENDPOINT_DOMAIN, ENDPOINT_ZONE = "models.example.internal", "dropforge-endpoints"
TELEMETRY_API = "https://telemetry.googleapis.com"
# Terraform's variables: every optional part is on. "*" stands for the names that no other variable gives: each bucket
# and each secret that a user creates.
VARIABLES: dict[str, Any] = {
    "cluster_regions": [LOCATION],
    "console_viewers": ["domain:example.com"],
    "data_buckets": ["*"],
    "endpoint_domain": ENDPOINT_DOMAIN,
    "endpoint_gateway": {LOCATION: PROXY_RANGE},
    "endpoint_key_secret": ENDPOINT_KEY_SECRET,
    "ephemeral_cluster_regions": [LOCATION],
    "model_buckets": [OTHER_RUNS_BUCKET],
    "otlp_endpoint": TELEMETRY_API,
    "project_id": PROJECT,
    "region": LOCATION,
    "slack_webhook_secret": SLACK_SECRET,
    "tpu_regions": [LOCATION],
    "training_secrets": ["*"],
    "webhook_secrets": ["webhook-*"],
}

_IMAGE_SETTINGS = ("TRAIN_TRL", "TRAIN_MAXTEXT", "TRAIN_RAY", "SERVE_VLLM", "SERVE_VLLM_TPU")


class FunctionTrigger(NamedTuple):
    """An Eventarc trigger of terraform/triggers.tf: its name, the function that it calls, event type and filters."""

    name: str
    function: str
    event_type: str
    filters: dict[str, str]


def triggers() -> Iterator[FunctionTrigger]:
    """Every trigger, in the order of the functions in main.py."""
    published, topics = "google.cloud.pubsub.topic.v1.messagePublished", f"projects/{PROJECT}/topics"
    uploaded, deleted = (f"google.cloud.storage.object.v1.{change}" for change in ("finalized", "deleted"))
    yield FunctionTrigger("on-spec-uploaded", "on_spec_uploaded", uploaded, {"bucket": SPECS_BUCKET})
    yield FunctionTrigger("on-spec-deleted", "on_spec_deleted", deleted, {"bucket": SPECS_BUCKET})
    yield FunctionTrigger("on-spec-message", "on_spec_message", published, {"topic": f"{topics}/{REQUESTS}"})
    yield FunctionTrigger("on-operation", "on_spec_message", published, {"topic": f"{topics}/{OPERATIONS}"})
    yield FunctionTrigger("on-console", "on_spec_message", published, {"topic": f"{topics}/{CONSOLE}"})
    yield FunctionTrigger("on-job-event", "on_job_event", published, {"topic": f"{topics}/{JOB_EVENTS}"})


def dead_letter(trigger: str) -> str:
    """The name of a trigger's dead-letter topic and of its subscription."""
    return f"dropforge-{trigger}-dead-letter"


def dead_letters() -> list[str]:
    """The subscriptions with the events that no function could handle."""
    return [dead_letter(trigger.name) for trigger in triggers()]


def cluster_objects() -> Iterator[dict[str, Any]]:
    """The cluster's objects of terraform/kubernetes.tf: the namespace, its network policies, the pods' accounts and the
    Gateway.
    """
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    yield _network_policy("default-deny", {"podSelector": {}})
    others = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [NAMESPACE]}]}
    clients = [*({"ipBlock": {"cidr": range}} for range in CLIENT_RANGES), {"namespaceSelector": others}]
    ingress = [{"from": clients, "ports": [{"protocol": "TCP", "port": 8000}]}]
    for name, label in (("endpoints", "dropforge-expires"), ("named-endpoints", "dropforge-endpoint")):
        endpoints = {"matchExpressions": [{"key": label, "operator": "Exists"}]}
        yield _network_policy(name, {"podSelector": endpoints, "ingress": ingress})
    for account in (TRAINER, SERVER):
        metadata = {"name": account, "namespace": NAMESPACE}
        yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    yield from _gateway()


def _gateway() -> Iterator[dict[str, Any]]:
    metadata = {"name": GATEWAY, "namespace": NAMESPACE}
    listeners = [{"name": "http", "protocol": "HTTP", "port": 80}]
    spec: dict[str, Any] = {"gatewayClassName": "gke-l7-rilb", "listeners": listeners}
    yield {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": metadata, "spec": spec}
    target = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": GATEWAY}
    spec = {"default": {"allowGlobalAccess": True}, "targetRef": target}
    yield {"apiVersion": "networking.gke.io/v1", "kind": "GCPGatewayPolicy", "metadata": metadata, "spec": spec}
    proxies = [{"ipBlock": {"cidr": range}} for range in (PROXY_RANGE, *HEALTH_RANGES)]
    endpoints = {"matchExpressions": [{"key": "dropforge-endpoint", "operator": "Exists"}]}
    ingress = [{"from": proxies, "ports": [{"protocol": "TCP", "port": 8000}]}]
    yield _network_policy("gateway", {"podSelector": endpoints, "ingress": ingress})


def _network_policy(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return {**kind, "metadata": metadata, "spec": {"policyTypes": ["Ingress"], **spec}}


def environment(http: str, grpc: str, token: str) -> dict[str, str]:
    """What the functions and the command line need to use the stack at these addresses with this OAuth2 token."""
    images = {f"DROPFORGE_{name}_IMAGE": f"{IMAGES}/{name.lower().replace('_', '-')}:local" for name in _IMAGE_SETTINGS}
    return {
        **libraries_environment(http, grpc, token),
        **images,
        "CLOUD_RUN_EMULATOR_HOST": http,
        "GKE_EMULATOR_HOST": http,
        "TPU_EMULATOR_HOST": http,
        "COMPUTE_EMULATOR_HOST": http,
        "STS_EMULATOR_HOST": http,
        "METADATA_EMULATOR_HOST": http,
        "WORKFLOWS_EMULATOR_HOST": grpc,
        "SLACK_EMULATOR_HOST": http,
        "GITHUB_EMULATOR_HOST": f"{http}/channels/github",
        "TELEMETRY_EMULATOR_HOST": http,
        "MONITORING_EMULATOR_HOST": http,
        "DNS_EMULATOR_HOST": http,
        "DROPFORGE_EMULATOR_TOKEN": token,
        "DROPFORGE_PROJECT": PROJECT,
        "DROPFORGE_LOCATION": LOCATION,
        "DROPFORGE_SPECS_BUCKET": SPECS_BUCKET,
        "DROPFORGE_RUNS_BUCKET": RUNS_BUCKET,
        "DROPFORGE_WORKFLOW": WORKFLOW,
        "DROPFORGE_ROLLOUT_WORKFLOW": ROLLOUT_WORKFLOW,
        "DROPFORGE_ENDPOINT_DOMAIN": ENDPOINT_DOMAIN,
        "DROPFORGE_ENDPOINT_GATEWAYS": ",".join(VARIABLES["endpoint_gateway"]),
        "DROPFORGE_ENDPOINT_SETTLE_SECONDS": "1",  # longer than the emulated proxies take
        "DROPFORGE_ENDPOINT_ZONE": ENDPOINT_ZONE,
        "DROPFORGE_ENDPOINT_DRAIN_SECONDS": "8",  # 5 s of the record, and 3 s for answers
        "DROPFORGE_REQUESTS_TOPIC": REQUESTS,
        "DROPFORGE_OPERATIONS_TOPIC": OPERATIONS,
        "DROPFORGE_CONSOLE_TOPIC": CONSOLE,
        "DROPFORGE_DATA_BUCKETS": ",".join(VARIABLES["data_buckets"]),
        "DROPFORGE_MODEL_BUCKETS": ",".join(VARIABLES["model_buckets"]),
        "DROPFORGE_JOB_EVENTS_TOPIC": JOB_EVENTS,
        "DROPFORGE_RUN_EVENTS_TOPIC": RUN_EVENTS,
        "DROPFORGE_TRAINER_SERVICE_ACCOUNT": _service_account(TRAINER),
        "DROPFORGE_SERVER_SERVICE_ACCOUNT": _service_account(SERVER),
        "DROPFORGE_NODES_SERVICE_ACCOUNT": _service_account(NODES),
        "DROPFORGE_GKE_CLUSTER": CLUSTER_NAME,
        "DROPFORGE_KUBERNETES_NAMESPACE": NAMESPACE,
        "DROPFORGE_KUBERNETES_TRAINER_ACCOUNT": TRAINER,
        "DROPFORGE_KUBERNETES_SERVER_ACCOUNT": SERVER,
        "DROPFORGE_SLACK_WEBHOOK_SECRET": SLACK_SECRET,
        "DROPFORGE_ENDPOINT_KEY_SECRET": ENDPOINT_KEY_SECRET,
        "DROPFORGE_DEAD_LETTER_SUBSCRIPTIONS": ",".join(dead_letters()),
        "DROPFORGE_OTLP_ENDPOINT": TELEMETRY_API,
        "DROPFORGE_TOKEN_COMMAND": "dropforge token",
        "DROPFORGE_CHECK_INTERVAL_SECONDS": "5",  # a crash without an event is noticed quickly here
    }


def libraries_environment(http: str, grpc: str, token: str) -> dict[str, str]:
    """The variables that Google's own client libraries read.

    TensorStore, with which Orbax reads and writes buckets, has variables of its own, and looks for real credentials if
    it has no token.
    """
    return {
        "STORAGE_EMULATOR_HOST": http,
        "PUBSUB_EMULATOR_HOST": grpc,
        "SECRET_MANAGER_EMULATOR_HOST": http,
        "TENSORSTORE_GCS_HTTP_URL": http,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": token,
    }


def kubeconfig(server: str, authority: str, token: str) -> str:
    """A configuration of kubectl for the deployment's cluster and namespace. `authority` is a PEM certificate."""
    data = base64.b64encode(authority.encode()).decode()
    context = {"cluster": CLUSTER_NAME, "user": CLUSTER_NAME, "namespace": NAMESPACE}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CLUSTER_NAME,
        "clusters": [{"name": CLUSTER_NAME, "cluster": {"server": server, "certificate-authority-data": data}}],
        "users": [{"name": CLUSTER_NAME, "user": {"token": token}}],
        "contexts": [{"name": CLUSTER_NAME, "context": context}],
    }
    return json.dumps(config, indent=2)


def boto(port: int, authority: Path) -> str:
    """A configuration of gsutil. Its endpoint options speak https alone (gslib/gcs_json_api.py, gsutil 5.34).

    https://cloud.google.com/storage/docs/boto-gsutil. `authority` is the PEM file of the server's authority.
    """
    return f"""[Credentials]
gs_json_host = {HOST}
gs_json_port = {port}

[Boto]
ca_certificates_file = {authority}

[GSUtil]
default_project_id = {PROJECT}
"""


def account_of(caller: str) -> str:
    """The e-mail of the account of a function or a container role, as terraform/service_accounts.tf names it."""
    return _service_account(f"dropforge-{caller.replace('_', '-')}")


def function_service(function: str) -> str:
    """The Cloud Run service of a function, as terraform/functions.tf names it."""
    return f"projects/{PROJECT}/locations/{LOCATION}/services/dropforge-{function.replace('_', '-')}"


def _service_account(name: str) -> str:
    return f"{name}@{PROJECT}.iam.gserviceaccount.com"
