"""Validation by the API server (pkg/apis/*/validation) after the check of types: 422 with a cause per problem."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from . import gatewayrules, names, podrules
from . import rayrules as ray
from .kinds import Kind
from .podrules import at_least, each
from .quantities import parse_quantity
from .refusals import Cause, duplicate, forbidden_field, not_emulated, required, unsupported, wrong
from .selectors import select

Object = Mapping[str, Any]
LARGEST_DATA = 2**20
LARGEST_ANNOTATIONS = 256 * 2**10
IMMUTABLE = "field is immutable"
PROMETHEUS_DURATION = re.compile(r"(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")


def problems(kind: Kind, item: Object) -> Iterator[Cause]:
    """The problems of an object, at creation and at updates."""
    yield from _metadata(kind, item["metadata"])
    if rule := RULES.get(kind.key):
        yield from rule(item)


def update_problems(kind: Kind, item: Object, old: Object) -> Iterator[Cause]:
    """The problems of a change to an object."""
    for field in ("uid", "creationTimestamp", "generateName"):
        if item["metadata"].get(field) != old["metadata"].get(field):
            yield wrong(f"metadata.{field}", item["metadata"].get(field, ""), IMMUTABLE)
    if rule := UPDATE_RULES.get(kind.key):
        yield from rule(item, old)


def _metadata(kind: Kind, metadata: Object) -> Iterator[Cause]:
    name = metadata.get("name", "")
    if not name:
        yield required("metadata.name", "name or generateName is required")
    elif problem := NAME_RULES.get(kind.key, names.subdomain_problem)(name):
        yield wrong("metadata.name", name, problem)
    yield from label_problems(metadata.get("labels", {}), "metadata.labels")
    for key in metadata.get("annotations", {}):
        if problem := names.label_key_problem(key.lower()):
            yield wrong("metadata.annotations", key, problem)
    if sum(len(k) + len(v) for k, v in metadata.get("annotations", {}).items()) > LARGEST_ANNOTATIONS:
        yield Cause(
            "metadata.annotations", "FieldValueTooLong", f"Too long: may not be more than {LARGEST_ANNOTATIONS}"
        )
    for finalizer, at in each(metadata, "finalizers", "metadata"):
        if problem := names.label_key_problem(finalizer):
            yield wrong(at, finalizer, problem)
    controllers = [reference for reference in metadata.get("ownerReferences", ()) if reference.get("controller")]
    if len(controllers) > 1:
        yield wrong("metadata.ownerReferences", controllers, "only one reference can have controller set to true")


def label_problems(labels: Mapping[str, str], at: str) -> Iterator[Cause]:
    for key, value in labels.items():
        if problem := names.label_key_problem(key):
            yield wrong(at, key, problem)
        if problem := names.label_value_problem(value):
            yield wrong(at, value, problem)


def _pod(item: Object) -> Iterator[Cause]:
    yield from podrules.pod_problems(item["spec"], "spec")


def _template(item: Object) -> Iterator[Cause]:
    template = item["spec"].get("template", {})
    yield from label_problems(template.get("metadata", {}).get("labels", {}), "spec.template.metadata.labels")
    if template.get("spec"):
        yield from podrules.pod_problems(template["spec"], "spec.template.spec")


def _job(item: Object) -> Iterator[Cause]:
    spec = item["spec"]
    counts = ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished")
    for field in counts:
        yield from at_least(spec, field, 0, "spec")
    yield from _template(item)
    pod = spec.get("template", {}).get("spec", {})
    if pod.get("restartPolicy") == "Always":
        yield required("spec.template.spec.restartPolicy", 'valid values: "OnFailure", "Never"')
    if spec["completionMode"] == "Indexed":
        yield from _indexed(item)
    if "podFailurePolicy" in spec:
        yield from _failure_policy(spec, pod)
    if "selector" in spec:
        yield from _selected(item)


def _indexed(item: Object) -> Iterator[Cause]:
    spec = item["spec"]
    if "completions" not in spec:
        yield required("spec.completions", "when completion mode is Indexed")
        return
    hostname = f"{item['metadata'].get('name', '')}-{max(spec['completions'] - 1, 0)}"
    if names.label_problem(hostname):
        text = f"will not able to create pod with invalid DNS label: {hostname}"
        yield wrong("metadata.name", item["metadata"].get("name", ""), text)
    if spec["completions"] > 10**5:
        yield wrong("spec.completions", spec["completions"], "must be less than or equal to 100000")


def _failure_policy(spec: Object, pod: Object) -> Iterator[Cause]:
    at = "spec.podFailurePolicy.rules"
    if pod.get("restartPolicy") == "OnFailure":
        text = 'only "Never" is supported when podFailurePolicy is specified'
        yield wrong("spec.template.spec.restartPolicy", "OnFailure", text)
    if spec["podReplacementPolicy"] != "Failed":
        yield unsupported("spec.podReplacementPolicy", spec["podReplacementPolicy"], ["Failed"])
    rules = spec["podFailurePolicy"].get("rules", [])
    if len(rules) > 20:
        yield Cause(at, "FieldValueTooMany", f"Too many: {len(rules)}: must have at most 20 items")
    containers = {container.get("name") for part in ("containers", "initContainers") for container in pod.get(part, ())}
    for rule, here in each(spec["podFailurePolicy"], "rules", "spec.podFailurePolicy"):
        yield from _failure_rule(rule, containers, here)


def _failure_rule(rule: Object, containers: set[Any], at: str) -> Iterator[Cause]:
    if rule.get("action") == "FailIndex":
        yield wrong(f"{at}.action", "FailIndex", "requires the backoffLimitPerIndex to be set")
    codes = rule.get("onExitCodes")
    if (codes is None) == (not rule.get("onPodConditions")):
        yield wrong(
            at, rule.get("action", ""), "specifying one of onExitCodes and onPodConditions is required, not both"
        )
        return
    if codes is None:
        return
    if codes.get("containerName", next(iter(containers), None)) not in containers:
        text = "must be one of the container or initContainer names in the pod template"
        yield wrong(f"{at}.onExitCodes.containerName", codes["containerName"], text)
    values = codes.get("values", [])
    if len(values) > 255:
        yield Cause(
            f"{at}.onExitCodes.values", "FieldValueTooMany", f"Too many: {len(values)}: must have at most 255 items"
        )
    if values != sorted(set(values)):
        yield wrong(f"{at}.onExitCodes.values", values, "must be ordered and without duplicates")
    if codes.get("operator") == "In" and 0 in values:
        yield wrong(f"{at}.onExitCodes.values[{values.index(0)}]", 0, "must not be 0 for the In operator")


def _selected(item: Object) -> Iterator[Cause]:
    """Problems of a workload's selector: it must be valid and match the labels of the template."""
    selector = item["spec"].get("selector", {})
    labels = item["spec"].get("template", {}).get("metadata", {}).get("labels", {})
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield wrong("spec.selector", selector, "empty selector is invalid for deployment")
        return
    yield from label_problems(selector.get("matchLabels", {}), "spec.selector.matchLabels")
    for expression, here in each(selector, "matchExpressions", "spec.selector"):
        at = f"{here}.values"
        if expression.get("operator") in ("In", "NotIn") and not expression.get("values"):
            yield required(at, "must be specified when `operator` is 'In' or 'NotIn'")
        if expression.get("operator") in ("Exists", "DoesNotExist") and expression.get("values"):
            yield forbidden_field(at, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'")
    if not select(selector, labels):
        yield wrong("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")


def _replicated(item: Object) -> Iterator[Cause]:
    spec = item["spec"]
    for field in ("replicas", "minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"):
        yield from at_least(spec, field, 0, "spec")
    yield from _selected(item)
    yield from _template(item)
    pod = spec.get("template", {}).get("spec", {})
    if pod.get("restartPolicy", "Always") != "Always":
        yield unsupported("spec.template.spec.restartPolicy", pod["restartPolicy"], ["Always"])
    if "activeDeadlineSeconds" in pod:
        yield forbidden_field(
            "spec.template.spec.activeDeadlineSeconds", "activeDeadlineSeconds in ReplicaSet is not Supported"
        )


def _deployment(item: Object) -> Iterator[Cause]:
    yield from _replicated(item)
    strategy = item["spec"]["strategy"]
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") == "Recreate" and rolling is not None:
        yield forbidden_field("spec.strategy.rollingUpdate", "may not be specified when strategy `type` is 'Recreate'")
    if strategy.get("type") != "RollingUpdate" or rolling is None:
        return
    for field in ("maxSurge", "maxUnavailable"):
        value = rolling[field]
        number = value if isinstance(value, int) else value.removesuffix("%")
        if isinstance(value, str) and (not value.endswith("%") or not str(number).isdigit()):
            text = "a valid percent string must be a numeric string followed by an ending '%'"
            yield wrong(f"spec.strategy.rollingUpdate.{field}", value, text)
        elif isinstance(value, int):
            yield from at_least(rolling, field, 0, "spec.strategy.rollingUpdate")
    if all(str(rolling[field]).removesuffix("%") == "0" for field in ("maxSurge", "maxUnavailable")):
        yield wrong(
            "spec.strategy.rollingUpdate.maxUnavailable", rolling["maxUnavailable"], "may not be 0 when `maxSurge` is 0"
        )


def _service(item: Object) -> Iterator[Cause]:
    spec = item["spec"]
    if spec["type"] in ("ExternalName", "NodePort"):
        raise not_emulated(f"spec.type {spec['type']} of a Service")
    ports = spec.get("ports", [])
    if not ports and spec.get("clusterIP") != "None":
        yield required("spec.ports")
    yield from label_problems(spec.get("selector", {}), "spec.selector")
    seen: set[tuple[Any, Any]] = set()
    for port, at in each(spec, "ports", "spec"):
        if len(ports) > 1 and not port.get("name"):
            yield required(f"{at}.name")
        if port.get("name") and (problem := names.label_problem(port["name"])):
            yield wrong(f"{at}.name", port["name"], problem)
        yield from podrules.port_problems(port.get("port"), f"{at}.port")
        yield from podrules.port_problems(port.get("targetPort"), f"{at}.targetPort")
        if (key := (port.get("port"), port.get("protocol"))) in seen:
            yield duplicate(at, port.get("port"))
        seen.add(key)


def _data(item: Object) -> Iterator[Cause]:
    text, binary = item.get("data", {}), item.get("binaryData", {})
    for key in [*text, *binary]:
        if len(key) > 253 or not names.KEY.fullmatch(key) or key in (".", ".."):
            rule = f"a valid config key must consist of alphanumeric characters, '-', '_' or '.': '{names.KEY.pattern}'"
            yield wrong(f"data[{key}]", key, rule)
        if key in text and key in binary:
            yield wrong(f"data[{key}]", key, "duplicate of key present in binaryData")
    if sum(len(value) for value in [*text.values(), *binary.values()]) > LARGEST_DATA:
        yield Cause("data", "FieldValueTooLong", f"Too long: may not be more than {LARGEST_DATA} bytes")


def _autoscaler(item: Object) -> Iterator[Cause]:
    spec = item["spec"]
    low, high = spec["minReplicas"], spec.get("maxReplicas", 1)
    yield from at_least(spec, "minReplicas", 1, "spec")
    yield from at_least(spec, "maxReplicas", 1, "spec")
    if high < low:
        yield wrong("spec.maxReplicas", high, "must be greater than or equal to `minReplicas`")
    for metric, here in each(spec, "metrics", "spec"):
        kind = metric.get("type", "")
        source = kind[:1].lower() + kind[1:]
        at = f"{here}.{source}"
        if kind and source not in metric:
            yield required(at, f"must populate information for the given metric source: {kind}")
        elif kind:
            yield from _metric_target(metric[source].get("target", {}), f"{at}.target")
        if kind == "Pods" and "averageValue" not in metric.get("pods", {}).get("target", {}):
            yield required(f"{at}.target.averageValue", "must specify a positive target averageValue")


def _metric_target(target: Object, at: str) -> Iterator[Cause]:
    for field in ("value", "averageValue"):
        if field in target and parse_quantity(target[field]) <= 0:
            yield wrong(f"{at}.{field}", target[field], "must be positive")
    if target.get("averageUtilization", 1) < 1:
        yield wrong(f"{at}.averageUtilization", target["averageUtilization"], "must be greater than 0")


def _pod_monitoring(item: Object) -> Iterator[Cause]:
    """The rules of the CRD: https://github.com/GoogleCloudPlatform/prometheus-engine/blob/main/doc/api.md"""
    spec = item.get("spec")
    if not isinstance(spec, Mapping):
        yield required("spec")
        return
    if not isinstance(spec.get("selector"), Mapping):
        yield required("spec.selector")
    endpoints = spec.get("endpoints")
    if not isinstance(endpoints, list) or not endpoints:
        yield required("spec.endpoints")
        return
    for endpoint, at in each(spec, "endpoints", "spec"):
        if not isinstance(endpoint, Mapping) or not endpoint.get("port"):
            yield required(f"{at}.port")
        elif not PROMETHEUS_DURATION.fullmatch(str(endpoint.get("interval", "1m"))):
            yield wrong(f"{at}.interval", endpoint["interval"], "should match a duration of Prometheus, such as 30s")


def _job_update(item: Object, old: Object) -> Iterator[Cause]:
    for field in ("completionMode", "podFailurePolicy", "selector", "template"):
        if item["spec"].get(field) != old["spec"].get(field):
            yield wrong(f"spec.{field}", _brief(item["spec"].get(field)), IMMUTABLE)
    if item["spec"].get("completions") != old["spec"].get("completions"):
        elastic = item["spec"].get("completions") == item["spec"].get("parallelism")
        if item["spec"]["completionMode"] != "Indexed" or not elastic:
            yield wrong("spec.completions", item["spec"].get("completions"), IMMUTABLE)


def _replicated_update(item: Object, old: Object) -> Iterator[Cause]:
    if item["spec"]["selector"] != old["spec"]["selector"]:
        yield wrong("spec.selector", _brief(item["spec"]["selector"]), IMMUTABLE)


def _pod_update(item: Object, old: Object) -> Iterator[Cause]:
    """Only images, tolerations and the deadline of a pod's spec may change (and nodeName, by the scheduler)."""
    if _frozen(item["spec"]) != _frozen(old["spec"]):
        yield forbidden_field(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`, `spec.initContainers[*].image`,"
            "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
            "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)",
        )


def _frozen(spec: Object) -> dict[str, Any]:
    frozen = {key: value for key, value in spec.items() if key not in ("activeDeadlineSeconds", "tolerations")}
    for part in ("containers", "initContainers"):
        if part in frozen:
            frozen[part] = [
                {key: value for key, value in container.items() if key != "image"} for container in frozen[part]
            ]
    return frozen


def _data_update(item: Object, old: Object) -> Iterator[Cause]:
    if old.get("immutable"):
        for field in ("data", "binaryData", "immutable"):
            if item.get(field) != old.get(field):
                yield forbidden_field(field, "field is immutable when `immutable` is set")
    if item.get("type") != old.get("type"):
        yield wrong("type", item.get("type"), IMMUTABLE)


def _service_update(item: Object, old: Object) -> Iterator[Cause]:
    if item["spec"].get("clusterIP") != old["spec"].get("clusterIP"):
        yield wrong("spec.clusterIP", item["spec"].get("clusterIP", ""), "may not change once set")


def _brief(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _claim(item: Object) -> Iterator[Cause]:
    yield from podrules.claim_problems(item["spec"], "spec")


def _claim_update(item: Object, old: Object) -> Iterator[Cause]:
    frozen = [{key: value for key, value in each["spec"].items() if key != "resources"} for each in (item, old)]
    if frozen[0] != frozen[1]:
        text = (
            "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"
        )
        yield forbidden_field("spec", text)


def _network_policy(item: Object) -> Iterator[Cause]:
    """https://kubernetes.io/docs/reference/kubernetes-api/policy-resources/network-policy-v1/"""
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for rule, at in each(item["spec"], direction, "spec"):
            for peer, where in each(rule, peers, at):
                if not peer:
                    yield required(where, "must specify a peer")
                elif "ipBlock" in peer and len(peer) > 1:
                    yield forbidden_field(where, "may not specify both ipBlock and another peer")
                elif "ipBlock" in peer:
                    yield from _ip_block(peer["ipBlock"], f"{where}.ipBlock")


def _ip_block(block: Object, at: str) -> Iterator[Cause]:
    outer = _network(block["cidr"])
    if outer is None:
        yield wrong(f"{at}.cidr", block["cidr"], "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)")
    for text, where in each(block, "except", at):
        inner = _network(text)
        if inner is None or (outer and not (inner.version == outer.version and inner.subnet_of(outer))):  # type: ignore[arg-type]
            yield wrong(where, text, "must be a strict subset of `cidr`")


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


Rule = Callable[[Object], Iterator[Cause]]
UpdateRule = Callable[[Object, Object], Iterator[Cause]]
RULES: Mapping[str, Rule] = {
    "pods": _pod,
    "jobs.batch": _job,
    "deployments.apps": _deployment,
    "replicasets.apps": _replicated,
    "services": _service,
    "configmaps": _data,
    "secrets": _data,
    "horizontalpodautoscalers.autoscaling": _autoscaler,
    "persistentvolumeclaims": _claim,
    "podmonitorings.monitoring.googleapis.com": _pod_monitoring,
    "networkpolicies.networking.k8s.io": _network_policy,
    "gateways.gateway.networking.k8s.io": gatewayrules.gateway,
    "httproutes.gateway.networking.k8s.io": gatewayrules.route,
    "gcpbackendpolicies.networking.gke.io": gatewayrules.backend_policy,
    "gcpgatewaypolicies.networking.gke.io": gatewayrules.policy,
    "healthcheckpolicies.networking.gke.io": gatewayrules.health_policy,
    "rayjobs.ray.io": ray.ray_job,
    "rayclusters.ray.io": ray.ray_cluster,
}
UPDATE_RULES: Mapping[str, UpdateRule] = {
    "pods": _pod_update,
    "jobs.batch": _job_update,
    "deployments.apps": _replicated_update,
    "replicasets.apps": _replicated_update,
    "services": _service_update,
    "configmaps": _data_update,
    "persistentvolumeclaims": _claim_update,
    "secrets": _data_update,
}
NAME_RULES: Mapping[str, Callable[[str], str]] = {
    "services": names.service_problem,
    "namespaces": names.label_problem,
}
