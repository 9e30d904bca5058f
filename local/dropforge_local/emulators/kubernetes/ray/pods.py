"""The pods of a RayCluster: the template's container with `ray start`, as KubeRay's common/pod.go creates them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from ....shims import HEAD_AGENT
from ..admission import GPU, TPU
from ..kuberay import Operator, has_http_probes
from ..quantities import whole
from ..store import Object

CLUSTER, NODE_TYPE, GROUP = "ray.io/cluster", "ray.io/node-type", "ray.io/group"
HEAD, WORKER, HEAD_GROUP = "head", "worker", "headgroup"
REPLICA, HOST = "ray.io/worker-group-replica-index", "ray.io/replica-host-index"
GCS, DASHBOARD, CLIENT, METRICS, AGENT = 6379, 8265, 10001, 8080, 52365
TOKEN_KEY = "auth_token"
LIVENESS = {"initialDelaySeconds": 30, "periodSeconds": 5, "failureThreshold": 120}
READINESS = {"periodSeconds": 5, "failureThreshold": 10}
PROBE_TIMEOUT_SECONDS = {"head": 5, "worker": 2}
# The health checks by wget: a node's own (of its agent), and the head's (of its dashboard).
OWN_HEALTH = "wget --tries 1 -T 2 -q -O- http://localhost:{port}/api/local_raylet_healthz | grep success"
HEAD_HEALTH = "wget --tries 1 -T 10 -q -O- http://localhost:{port}/api/gcs_healthz | grep success"
# The option of `ray start` for each accelerator in a container's limits.
GPU_OPTION, TPU_RESOURCE = "num-gpus", "TPU"


def head_service_name(cluster: str) -> str:
    return f"{cluster}-head-svc"


def headless_service_name(cluster: str) -> str:
    return f"{cluster}-headless"


def service_host(name: str, namespace: str) -> str:
    return f"{name}.{namespace}.svc.cluster.local"


@dataclass(frozen=True)
class Builder:
    """Makes pods as a version of the operator does; `probe_seconds` is the delay before the first readiness probe."""

    operator: Operator
    probe_seconds: int

    def head(self, cluster: Object) -> tuple[Object, Object]:
        """(template, metadata) of the head's pod."""
        group = cluster["spec"]["headGroupSpec"]
        template = copy.deepcopy(group["template"])
        name = cluster["metadata"]["name"]
        params = {"dashboard-host": "0.0.0.0", **group.get("rayStartParams", {})}
        container = template["spec"]["containers"][0]
        _add_ports(container, {"gcs-server": GCS, "dashboard": DASHBOARD, "client": CLIENT, "metrics": METRICS})
        _start_ray(container, HEAD, params)
        _add_environment(container, cluster, "127.0.0.1")
        self._add_probes(container, cluster, HEAD, params)
        return template, _metadata(name, HEAD, HEAD_GROUP, f"{name[:40]}-head-")

    def worker(self, cluster: Object, group: Object, replica: int, host: int) -> tuple[Object, Object]:
        """(template, metadata) of a host of a replica of a worker group."""
        template = copy.deepcopy(group["template"])
        metadata, spec = cluster["metadata"], template["spec"]
        name, namespace = metadata["name"], metadata["namespace"]
        address = service_host(head_service_name(name), namespace)
        params = {"address": f"{address}:{GCS}", **group.get("rayStartParams", {})}
        container = spec["containers"][0]
        _add_ports(container, {"metrics": METRICS})
        spec["initContainers"] = [*spec.get("initContainers", ()), _wait_for_head(container, address)]
        _start_ray(container, WORKER, params)
        _add_environment(container, cluster, address)
        self._add_probes(container, cluster, WORKER, params)
        made = _metadata(name, WORKER, group["groupName"], f"{name[:35]}-{group['groupName'][:15]}-worker-")
        made["labels"] |= {REPLICA: str(replica), HOST: str(host)}
        _add_tpu(template, cluster, group, replica, host)
        return template, made

    def _add_probes(self, container: Object, cluster: Object, node_type: str, params: dict[str, str]) -> None:
        action = self._health_check(cluster, node_type, params)
        readiness = {"initialDelaySeconds": self.probe_seconds, **READINESS}
        timeout = {"timeoutSeconds": PROBE_TIMEOUT_SECONDS[node_type], "successThreshold": 1}
        for name, values in (("livenessProbe", LIVENESS), ("readinessProbe", readiness)):
            container.setdefault(name, {**values, **timeout, **copy.deepcopy(action)})

    def _health_check(self, cluster: Object, node_type: str, params: dict[str, str]) -> Object:
        """The handler of a node's probes: HTTP, or wget in the container for older operators and older Ray."""
        given = params if self.operator.reads_probe_ports else {}
        agent = _port(given, "dashboard-agent-listen-port", AGENT)
        if has_http_probes(self.operator, cluster["spec"]):
            return {"httpGet": {"path": "/api/healthz", "port": agent}}
        commands = [OWN_HEALTH.format(port=agent)]
        if node_type == HEAD:
            commands.append(HEAD_HEALTH.format(port=_port(given, "dashboard-port", DASHBOARD)))
        return {"exec": {"command": ["bash", "-c", " && ".join(commands)]}}


def _metadata(cluster: str, node_type: str, group: str, prefix: str) -> Object:
    labels = {
        CLUSTER: cluster,
        NODE_TYPE: node_type,
        GROUP: group,
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{cluster}-{node_type}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    return {"generateName": prefix, "labels": labels}


def _add_ports(container: Object, ports: dict[str, int]) -> None:
    given = container.setdefault("ports", [])
    taken = {port["containerPort"] for port in given} | {port.get("name") for port in given}
    given += [
        {"name": name, "containerPort": port} for name, port in ports.items() if name not in taken and port not in taken
    ]


def _start_ray(container: Object, node_type: str, params: dict[str, str]) -> None:
    resources = container.get("resources", {})
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    if cpu := limits.get("cpu") or requests.get("cpu"):
        params.setdefault("num-cpus", str(whole(cpu)))
    if memory := limits.get("memory"):
        params.setdefault("memory", str(whole(memory)))
    if count := limits.get(GPU):
        params.setdefault(GPU_OPTION, str(whole(count)))
    if count := limits.get(TPU):
        params.setdefault("resources", f"'{json.dumps({TPU_RESOURCE: whole(count)}, separators=(',', ':'))}'")
    params.setdefault("metrics-export-port", str(METRICS))
    params.setdefault("dashboard-agent-listen-port", str(AGENT))
    params["block"] = "true"
    words = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(params.items())]
    command = " ".join(["ray start", *(["--head"] if node_type == HEAD else []), *words])
    own = [*container.get("command", ()), *container.get("args", ())]
    before = f"{' '.join(own)} && " if own else ""
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"{before}ulimit -n 65536; {command}"]
    container.setdefault("env", []).append({"name": "KUBERAY_GEN_RAY_START_CMD", "value": command})


def _add_environment(container: Object, cluster: Object, address: str) -> None:
    labels = {"RAY_CLUSTER_NAME": CLUSTER, "RAY_NODE_TYPE_NAME": GROUP}
    fields = {name: f"metadata.labels['{label}']" for name, label in labels.items()}
    fields |= {"RAY_CLUSTER_NAMESPACE": "metadata.namespace", "RAY_CLOUD_INSTANCE_ID": "metadata.name"}
    values = {"RAY_PORT": str(GCS), "RAY_ADDRESS": f"{address}:{GCS}", "RAY_USAGE_STATS_KUBERAY_IN_USE": "1"}
    made: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    made += [{"name": name, "value": value} for name, value in values.items()]
    if address != "127.0.0.1":
        made.append({"name": "FQ_RAY_IP", "value": address})
    if has_token(cluster):
        reference = {"name": token_secret(cluster), "key": TOKEN_KEY}
        made.append({"name": "RAY_AUTH_MODE", "value": "token"})
        made.append({"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    given = {variable["name"] for variable in container.get("env", ())}
    container.setdefault("env", []).extend(variable for variable in made if variable["name"] not in given)


def has_token(cluster: Object) -> bool:
    """Whether requests to Ray carry a token: only if the cluster enables it (IsAuthEnabled)."""
    return bool(cluster["spec"].get("authOptions", {}).get("mode") == "token")


def token_secret(cluster: Object) -> str:
    return str(cluster["spec"].get("authOptions", {}).get("secretName") or cluster["metadata"]["name"])


def _port(params: dict[str, str], name: str, default: int) -> int:
    given = params.get(name, "")
    return int(given) if given.isdigit() else default


def _wait_for_head(container: Object, address: str) -> Object:
    # Wait for more than its GCS: three nodes that start together are slow, and a node gives up after 30 s.
    agent = f"${{{HEAD_AGENT}}}"
    loop = f"agent={agent}; until (exec 3<>/dev/tcp/${{agent%:*}}/${{agent##*:}}) 2>/dev/null; do sleep 1; done"
    limits = {"cpu": "200m", "memory": "256Mi"}
    return {
        "name": "wait-gcs-ready",
        "image": container["image"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [f"{loop}; echo GCS is ready."],
        "env": [*container.get("env", ()), {"name": "RAY_ADDRESS", "value": f"{address}:{GCS}"}],
        "resources": {"limits": limits, "requests": limits},
    }


def _add_tpu(template: Object, cluster: Object, group: Object, replica: int, host: int) -> None:
    """Add each host's place in the slice, like GKE's webhook (https://github.com/ai-on-gke/kuberay-tpu-webhook)."""
    spec = template["spec"]
    chips = [item for item in spec["containers"] if TPU in item.get("resources", {}).get("limits", {})]
    if not chips:
        return
    hosts, name = group["numOfHosts"], group["groupName"]
    values: dict[str, Any] = {"TPU_WORKER_ID": str(host), "TPU_NAME": f"{name}-{replica}"}
    if hosts > 1:
        subdomain = headless_service_name(cluster["metadata"]["name"])
        hostnames = [f"{name}-{replica}-{index}.{subdomain}" for index in range(hosts)]
        values["TPU_WORKER_HOSTNAMES"] = ",".join(hostnames)
        spec |= {"hostname": f"{name}-{replica}-{host}", "subdomain": subdomain}
    for container in chips:
        given = {variable["name"] for variable in container.setdefault("env", [])}
        container["env"] += [{"name": key, "value": value} for key, value in values.items() if key not in given]
