"""Rules and defaults of the Gateway API's CRDs and of Google's policies for it, and features not emulated here.

https://github.com/kubernetes-sigs/gateway-api/tree/main/apis/v1 (the markers for validation and the CEL rules)
https://github.com/GoogleCloudPlatform/gke-gateway-api/tree/main/config/crd
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .refusals import Cause, duplicate, not_emulated, required, wrong

Object = Mapping[str, Any]
CLASS = "gke-l7-rilb"  # a regional internal Application Load Balancer, the one that is emulated
GROUP = "gateway.networking.k8s.io"
MOST_WEIGHT, MOST_BACKENDS, MOST_RULES = 1_000_000, 16, 16
PATH = re.compile(r"/([A-Za-z0-9/\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})*")
SECTION = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
BAD_PARTS = ("//", "/./", "/../", "%2f", "%2F", "#")
POLICY_KINDS = {"GCPGatewayPolicy": "Gateway"}  # of the target; the others are of a Service
THRESHOLD_MOST, INTERVAL_MOST = 10, 300


def gateway(item: Object) -> Iterator[Cause]:
    listeners = item["spec"].get("listeners", [])
    for index, listener in enumerate(listeners):
        at = f"spec.listeners[{index}]"
        if not SECTION.fullmatch(listener.get("name", "")):
            yield wrong(f"{at}.name", listener.get("name", ""), f"should match '^{SECTION.pattern}$'")
        if not 1 <= listener.get("port", 1) <= 65535:
            yield wrong(f"{at}.port", listener["port"], "should be between 1 and 65535")
        if listener.get("protocol", "HTTP") != "HTTP":
            raise not_emulated(f"{at}.protocol {listener['protocol']} of a Gateway")
        if listener["name"] in [other["name"] for other in listeners[:index]]:
            yield duplicate(at, listener["name"])
    if len(listeners) > 1:
        raise not_emulated("a Gateway with several listeners")


def route(item: Object) -> Iterator[Cause]:
    spec = item["spec"]
    if spec.get("hostnames"):
        raise not_emulated("spec.hostnames of an HTTPRoute")
    if len(spec.get("parentRefs", ())) > 1:
        raise not_emulated("an HTTPRoute with several parentRefs")
    rules = spec["rules"]
    if not 1 <= len(rules) <= MOST_RULES:
        yield wrong("spec.rules", len(rules), f"should have between 1 and {MOST_RULES} items")
    for index, rule in enumerate(rules):
        yield from _rule(rule, f"spec.rules[{index}]")


def _rule(rule: Object, at: str) -> Iterator[Cause]:
    paths = [match["path"] for match in rule["matches"]]
    for index, path in enumerate(paths):
        yield from _path(path, f"{at}.matches[{index}].path")
    for index, each in enumerate(rule.get("filters", ())):
        yield from _filter(each, paths, f"{at}.filters[{index}]")
    references = rule.get("backendRefs", [])
    if len(references) > MOST_BACKENDS:
        yield wrong(f"{at}.backendRefs", len(references), f"should have at most {MOST_BACKENDS} items")
    for index, reference in enumerate(references):
        here = f"{at}.backendRefs[{index}]"
        if not 0 <= reference["weight"] <= MOST_WEIGHT:
            yield wrong(f"{here}.weight", reference["weight"], f"should be between 0 and {MOST_WEIGHT}")
        if (reference["group"], reference["kind"]) != ("", "Service"):
            raise not_emulated(f"{here} of kind {reference['kind']}")
        if "port" not in reference:
            yield required(here, "Must have port for Service reference")
        if reference.get("namespace", ""):
            raise not_emulated(f"{here}.namespace")


def _path(path: Object, at: str) -> Iterator[Cause]:
    if path["type"] != "PathPrefix":
        raise not_emulated(f"{at}.type {path['type']}")
    value = path["value"]
    if not PATH.fullmatch(value):
        yield wrong(at, value, "must only contain valid characters for types ['Exact', 'PathPrefix']")
    for part in BAD_PARTS:
        if part in value:
            yield wrong(at, value, f"must not contain '{part}' when type one of ['Exact', 'PathPrefix']")


def _filter(given: Object, paths: list[Object], at: str) -> Iterator[Cause]:
    if given["type"] != "URLRewrite":
        raise not_emulated(f"{at}.type {given['type']}")
    rewrite = given.get("urlRewrite")
    if rewrite is None:
        yield required(at, "filter.urlRewrite must be specified for URLRewrite filter.type")
        return
    if rewrite.get("hostname"):
        raise not_emulated(f"{at}.urlRewrite.hostname")
    modifier = rewrite.get("path", {})
    if modifier.get("type") == "ReplaceFullPath":
        raise not_emulated(f"{at}.urlRewrite.path.type ReplaceFullPath")
    if "replacePrefixMatch" not in modifier:
        text = "replacePrefixMatch must be specified when type is set to 'ReplacePrefixMatch'"
        yield required(f"{at}.urlRewrite.path", text)
    if len(paths) != 1:
        text = (
            "When using URLRewrite filter with path.replacePrefixMatch, exactly one PathPrefix match must be specified"
        )
        yield wrong(f"{at}.urlRewrite.path", len(paths), text)


def policy(item: Object) -> Iterator[Cause]:
    target, kind = item["spec"].get("targetRef", {}), item["kind"]
    expected = POLICY_KINDS.get(kind, "Service")
    group = GROUP if expected == "Gateway" else ""
    if "group" not in target:
        yield required("spec.targetRef.group")
    elif (target["group"], target.get("kind")) != (group, expected):
        raise not_emulated(f"spec.targetRef of a {kind} that is no {expected}")


def backend_policy(item: Object) -> Iterator[Cause]:
    yield from policy(item)
    config = item["spec"].get("default", {})
    yield from _within(config, "timeoutSec", 1, 2**31 - 1, "spec.default")
    draining = config.get("connectionDraining", {})
    yield from _within(draining, "drainingTimeoutSec", 0, 3600, "spec.default.connectionDraining")


def health_policy(item: Object) -> Iterator[Cause]:
    yield from policy(item)
    config, at = item["spec"].get("default", {}), "spec.default"
    for field in ("checkIntervalSec", "timeoutSec"):
        yield from _within(config, field, 1, INTERVAL_MOST, at)
    for field in ("healthyThreshold", "unhealthyThreshold"):
        yield from _within(config, field, 1, THRESHOLD_MOST, at)
    if config.get("timeoutSec", 5) > config.get("checkIntervalSec", 5):
        yield wrong(at, config.get("timeoutSec", 5), "timeoutSec cannot exceed checkIntervalSec")
    check = config.get("config")
    if check is None:
        return
    if check.get("type", "HTTP") != "HTTP":
        raise not_emulated(f"{at}.config.type {check['type']}")
    if check.get("type") == "HTTP" and "httpHealthCheck" not in check:
        yield required(f"{at}.config", "httpHealthCheck must be specified for type HTTP")
    http = check.get("httpHealthCheck", {})
    if http.get("portSpecification", "USE_SERVING_PORT") != "USE_SERVING_PORT":
        raise not_emulated(f"{at}.config.httpHealthCheck.portSpecification {http['portSpecification']}")
    if "port" in http or "portName" in http:
        text = "port and portName must be unset for portSpecification being USE_SERVING_PORT (which is the default)"
        yield wrong(f"{at}.config.httpHealthCheck", http.get("port", http.get("portName")), text)


def _within(part: Object, field: str, least: int, most: int, at: str) -> Iterator[Cause]:
    if field in part and not least <= part[field] <= most:
        yield wrong(f"{at}.{field}", part[field], f"should be between {least} and {most}")


def set_gateway_defaults(item: dict[str, Any]) -> None:
    for listener in item["spec"].get("listeners", ()):
        listener.setdefault("allowedRoutes", {}).setdefault("namespaces", {}).setdefault("from", "Same")


def set_route_defaults(item: dict[str, Any]) -> None:
    """Set the defaults that the CRD defines."""
    spec = item["spec"]
    for parent in spec.get("parentRefs", ()):
        parent.setdefault("group", GROUP)
        parent.setdefault("kind", "Gateway")
    for rule in spec.setdefault("rules", [{}]):
        for match in rule.setdefault("matches", [{}]):
            path = match.setdefault("path", {})
            path.setdefault("type", "PathPrefix")
            path.setdefault("value", "/")
        for reference in rule.get("backendRefs", ()):
            for field, value in (("group", ""), ("kind", "Service"), ("weight", 1)):
                reference.setdefault(field, value)
