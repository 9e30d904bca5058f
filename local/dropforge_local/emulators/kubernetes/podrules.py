"""Rules of the API server for a pod's spec, in a pod or in a template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import names
from .quantities import parse_quantity
from .refusals import Cause, duplicate, forbidden_field, not_emulated, required, unsupported, wrong

Object = Mapping[str, Any]
PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
FIELD_PATHS = (
    "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP",
    "status.hostIPs", "status.podIP", "status.podIPs",
)  # fmt: skip
ACCESS_MODES = ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
VOLUME_SOURCES = ("emptyDir", "secret", "configMap", "csi", "persistentVolumeClaim", "hostPath", "nfs", "ephemeral")


def pod_problems(spec: Object, at: str) -> Iterator[Cause]:
    yield from at_least(spec, "terminationGracePeriodSeconds", 0, at)
    yield from at_least(spec, "activeDeadlineSeconds", 1, at)
    for field in ("hostname", "subdomain"):
        if spec.get(field) and (problem := names.label_problem(spec[field])):
            yield wrong(f"{at}.{field}", spec[field], problem)
    if spec.get("serviceAccountName") and (problem := names.subdomain_problem(spec["serviceAccountName"])):
        yield wrong(f"{at}.serviceAccountName", spec["serviceAccountName"], problem)
    for key, value in spec.get("nodeSelector", {}).items():
        if problem := names.label_key_problem(key) or names.label_value_problem(value):
            yield wrong(f"{at}.nodeSelector", key, problem)
    for toleration, here in each(spec, "tolerations", at):
        yield from _toleration(toleration, here)
    yield from _unique_names(spec.get("volumes", ()), f"{at}.volumes")
    for volume, here in each(spec, "volumes", at):
        yield from _volume(volume, here)
    yield from _containers(spec, at)


def port_problems(port: Any, at: str) -> Iterator[Cause]:
    """Problems of a port, given by number or by name."""
    if isinstance(port, int) and not 1 <= port <= 65535:
        yield wrong(at, port, "must be between 1 and 65535, inclusive")
    if isinstance(port, str) and (len(port) > 15 or not names.PORT_NAME.fullmatch(port)):
        yield wrong(at, port, "must be no more than 15 characters, lower case alphanumeric or '-', with one letter")


def each(item: Object, field: str, at: str) -> Iterator[tuple[Any, str]]:
    """The elements of a list with their paths; nothing without the list."""
    return ((element, f"{at}.{field}[{index}]") for index, element in enumerate(item.get(field, ())))


def at_least(item: Object, field: str, lowest: int, at: str) -> Iterator[Cause]:
    if field in item and item[field] < lowest:
        yield wrong(f"{at}.{field}", item[field], f"must be greater than or equal to {lowest}")


def _toleration(toleration: Object, at: str) -> Iterator[Cause]:
    if toleration.get("operator") == "Exists" and toleration.get("value"):
        yield wrong(f"{at}.operator", toleration["value"], "value must be empty when `operator` is 'Exists'")
    if not toleration.get("key") and toleration.get("operator", "Equal") != "Exists":
        yield wrong(f"{at}.operator", toleration.get("operator", ""), "operator must be Exists when `key` is empty")


def _volume(volume: Object, at: str) -> Iterator[Cause]:
    sources = [source for source in VOLUME_SOURCES if source in volume]
    if not sources:
        yield required(at, "must specify a volume type")
    for source in sources[1:]:
        yield forbidden_field(f"{at}.{source}", "may not specify more than 1 volume type")
    if (medium := volume.get("emptyDir", {}).get("medium")) not in (None, "", "Memory"):
        yield unsupported(f"{at}.emptyDir.medium", medium, ["", "Memory"])
    if "secret" in sources and not volume["secret"].get("secretName"):
        yield required(f"{at}.secret.secretName")
    if "configMap" in sources and not volume["configMap"].get("name"):
        yield required(f"{at}.configMap.name")

    if "ephemeral" in sources:
        yield from _ephemeral(volume["ephemeral"], f"{at}.ephemeral.volumeClaimTemplate")


def _ephemeral(source: Object, at: str) -> Iterator[Cause]:
    """https://kubernetes.io/docs/concepts/storage/ephemeral-volumes/#generic-ephemeral-volumes"""
    template = source.get("volumeClaimTemplate")
    if template is None:
        yield required(at)
        return
    for field in template.get("metadata", {}).keys() - {"labels", "annotations"}:
        yield forbidden_field(f"{at}.metadata.{field}", "cannot be set for an ephemeral volume")
    yield from claim_problems(template.get("spec", {}), f"{at}.spec")


def claim_problems(spec: Object, at: str) -> Iterator[Cause]:
    """Problems of a claim's spec, in a claim or in a pod's template of a claim."""
    if not spec.get("accessModes"):
        yield required(f"{at}.accessModes", "at least 1 access mode is required")
    for index, mode in enumerate(spec.get("accessModes", ())):
        if mode not in ACCESS_MODES:
            yield unsupported(f"{at}.accessModes[{index}]", mode, ACCESS_MODES)
    size = spec.get("resources", {}).get("requests", {}).get("storage")
    if size is None:
        yield required(f"{at}.resources[storage]")
    elif parse_quantity(size) <= 0:
        yield wrong(f"{at}.resources[storage]", size, "must be greater than zero")
    if (mode := spec.get("volumeMode")) == "Block":
        raise not_emulated(f"{at}.volumeMode Block")
    elif mode not in (None, "Filesystem"):
        yield unsupported(f"{at}.volumeMode", mode, ["Block", "Filesystem"])


def _containers(spec: Object, at: str) -> Iterator[Cause]:
    volumes = {volume.get("name") for volume in spec.get("volumes", ())}
    everyone = [*spec.get("initContainers", ()), *spec.get("containers", ())]
    yield from _unique_names(everyone, f"{at}.containers")
    for part in ("initContainers", "containers"):
        for container, here in each(spec, part, at):
            if not container.get("image"):
                yield required(f"{here}.image")
            yield from _container(container, volumes, here)
            for probe in PROBES:
                if probe in container and part == "initContainers":
                    yield forbidden_field(f"{here}.{probe}", "must not be set for init containers")


def _container(container: Object, volumes: set[Any], at: str) -> Iterator[Cause]:
    yield from _ports(container, at)
    for variable, here in each(container, "env", at):
        yield from _variable(variable, here)
    for source, here in each(container, "envFrom", at):
        yield from _variable_source(source, here)
    yield from _mounts(container, volumes, at)
    yield from _resources(container.get("resources", {}), f"{at}.resources")
    for probe in PROBES:
        if probe in container:
            yield from _probe(container[probe], probe, f"{at}.{probe}")
    if "postStart" in container.get("lifecycle", {}):
        raise not_emulated(f"{at}.lifecycle.postStart")


def _unique_names(items: Iterable[Object], at: str) -> Iterator[Cause]:
    seen = set()
    for index, item in enumerate(items):
        name = item.get("name", "")
        if name and (problem := names.label_problem(name)):
            yield wrong(f"{at}[{index}].name", name, problem)
        if name in seen:
            yield duplicate(f"{at}[{index}].name", name)
        seen.add(name)


def _ports(container: Object, at: str) -> Iterator[Cause]:
    seen = set()
    for port, here in each(container, "ports", at):
        yield from port_problems(port.get("containerPort"), f"{here}.containerPort")
        if name := port.get("name"):
            yield from port_problems(name, f"{here}.name")
            if name in seen:
                yield duplicate(f"{here}.name", name)
            seen.add(name)
        if port.get("hostPort"):
            raise not_emulated(f"{here}.hostPort")


def _variable(variable: Object, at: str) -> Iterator[Cause]:
    name = variable.get("name", "")
    if name and not names.ENVIRONMENT.fullmatch(name):
        yield wrong(f"{at}.name", name, f"a valid environment variable name must match '{names.ENVIRONMENT.pattern}'")
    if "valueFrom" not in variable:
        return
    source = variable["valueFrom"]
    if variable.get("value"):
        yield wrong(f"{at}.valueFrom", "", "may not be specified when `value` is not empty")
    if not source:
        text = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
        yield wrong(f"{at}.valueFrom", "", text)
    if len(source) > 1:
        yield wrong(f"{at}.valueFrom", "", "may not have more than one field specified at a time")
    for key in ("secretKeyRef", "configMapKeyRef"):
        if key in source and not source[key].get("name"):
            yield required(f"{at}.valueFrom.{key}.name")
    path = source.get("fieldRef", {}).get("fieldPath")
    if path and path not in FIELD_PATHS and not _is_subscript(path):
        yield unsupported(f"{at}.valueFrom.fieldRef.fieldPath", path, FIELD_PATHS)
    resource = source.get("resourceFieldRef", {}).get("resource")
    if resource and resource not in ("limits.cpu", "limits.memory", "requests.cpu", "requests.memory"):
        raise not_emulated(f"{at}.valueFrom.resourceFieldRef of {resource!r}")


def _is_subscript(path: str) -> bool:
    return path.endswith("']") and path.startswith(("metadata.labels['", "metadata.annotations['"))


def _variable_source(source: Object, at: str) -> Iterator[Cause]:
    kinds = [key for key in ("secretRef", "configMapRef") if key in source]
    if len(kinds) != 1:
        yield wrong(at, "", "must specify one of: `configMapRef` or `secretRef`")
    for key in kinds:
        if not source[key].get("name"):
            yield required(f"{at}.{key}.name")


def _mounts(container: Object, volumes: set[Any], at: str) -> Iterator[Cause]:
    seen = set()
    for mount, here in each(container, "volumeMounts", at):
        path = mount.get("mountPath", "")
        if mount.get("name") and mount["name"] not in volumes:
            yield Cause(f"{here}.name", "FieldValueNotFound", f'Not found: "{mount["name"]}"')
        if ":" in path:
            yield wrong(f"{here}.mountPath", path, "must not contain ':'")
        if path in seen:
            yield wrong(f"{here}.mountPath", path, "must be unique")
        if mount.get("subPath", "").startswith("/") or ".." in mount.get("subPath", "").split("/"):
            yield wrong(f"{here}.subPath", mount["subPath"], "must be a relative path without '..'")
        seen.add(path)


def _resources(resources: Object, at: str) -> Iterator[Cause]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for part, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            yield from _amount(name, amount, f"{at}.{part}[{name}]")
    for name, amount in requests.items():
        extended = name not in PLAIN_RESOURCES
        if name in limits and parse_quantity(amount) > parse_quantity(limits[name]) and not extended:
            yield wrong(f"{at}.requests", amount, f"must be less than or equal to {name} limit of {limits[name]}")
        if extended and name not in limits:
            yield required(f"{at}.limits", "Limit must be set for non overcommitable resources")
        if extended and name in limits and parse_quantity(amount) != parse_quantity(limits[name]):
            yield wrong(f"{at}.requests", amount, f"must be equal to {name} limit of {limits[name]}")


def _amount(name: str, amount: str, at: str) -> Iterator[Cause]:
    number = parse_quantity(amount)
    if number < 0:
        yield wrong(at, amount, "must be greater than or equal to 0")
    if name in PLAIN_RESOURCES:
        return
    if "/" not in name or names.label_key_problem(name):
        yield wrong(at, name, "must be a standard resource type or fully qualified")
    if number.denominator != 1:
        yield wrong(at, amount, "must be an integer")


def _probe(probe: Object, name: str, at: str) -> Iterator[Cause]:
    handlers = [handler for handler in ("httpGet", "tcpSocket", "exec", "grpc") if handler in probe]
    if not handlers:
        yield required(at, "must specify a handler type")
    for handler in handlers[1:]:
        yield forbidden_field(f"{at}.{handler}", "may not specify more than 1 handler type")
    if "grpc" in handlers:
        raise not_emulated(f"{at}.grpc")
    for handler in handlers:
        if handler != "exec":
            yield from port_problems(probe[handler].get("port"), f"{at}.{handler}.port")
        elif not probe["exec"].get("command"):
            yield required(f"{at}.exec.command")
    yield from at_least(probe, "initialDelaySeconds", 0, at)
    for field in ("timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
        yield from at_least(probe, field, 1, at)
    if name != "readinessProbe" and probe["successThreshold"] != 1:
        yield wrong(f"{at}.successThreshold", probe["successThreshold"], "must be 1")
