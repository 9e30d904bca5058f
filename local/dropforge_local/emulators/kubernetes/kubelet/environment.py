"""A container's environment and its command with references resolved.

Processes are not isolated here. In the values of the manifest, the cluster's names and ports therefore become ports of
this machine: PORT and --port become the pod's local port, and names of a headless service's pods become 127.0.0.1.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..kinds import CONFIG_MAP, SECRET, SERVICE, Kind
from ..ports import Ports
from ..quantities import parse_quantity
from ..store import Object, Store

REFERENCE = re.compile(r"\$(\$|\((?P<name>[-._a-zA-Z][-._a-zA-Z0-9]*)\))")
LOOPBACK = "127.0.0.1"
OWN_ADDRESS = re.compile(r"(?<![\w.-])(?:localhost|127\.0\.0\.1|\[::1\]):(?P<port>\d+)\b")


class ConfigError(Exception):
    """A container cannot be configured: Kubernetes shows it as CreateContainerConfigError."""


@dataclass(frozen=True)
class Sources:
    """The sources of a container's values."""

    store: Store
    ports: Ports
    pod_ports: range

    def local_ports(self, pod: Object) -> dict[int, int]:
        return self.ports.of(self.store.cluster, pod["metadata"]["uid"])


def environment(sources: Sources, pod: Object, container: Object) -> dict[str, str]:
    """The container's variables. Raises ConfigError."""
    env = {"HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"]}
    if pod["spec"].get("enableServiceLinks", True):
        env |= _service_links(sources, pod)
    for source in container.get("envFrom", ()):
        env |= _whole_source(sources.store, pod, source)
    for variable in container.get("env", ()):
        value = _value(sources.store, pod, container, variable)
        if value is not None:
            env[variable["name"]] = _expand(value, env) if "valueFrom" not in variable else value
    local = sources.local_ports(pod)
    env = {name: _localise(sources, value, pod) for name, value in env.items()}
    ports = [port["containerPort"] for port in container.get("ports", ())]
    if ports:
        env["PORT"] = str(local.get(int(env["PORT"]) if env.get("PORT", "").isdigit() else ports[0], local[ports[0]]))
        env.setdefault("HOST", LOOPBACK)  # local only: other machines in a laptop's network are no clients of a pod
    return env


def words(sources: Sources, pod: Object, container: Object, part: str, env: Mapping[str, str]) -> list[str]:
    """The manifest's command or args, with $(VARIABLES) expanded and ports replaced by local ports."""
    local = sources.local_ports(pod)
    result: list[str] = []
    for word in container.get(part, ()):
        word = _localise(sources, _expand(word, env), pod)
        option, equals, value = word.partition("=")
        if equals and option == "--port" and value.isdigit():
            word = f"--port={local.get(int(value), value)}"
        elif result and result[-1] == "--port" and word.isdigit():
            word = str(local.get(int(word), word))
        result.append(word)
    return result


def probe_words(words: Iterable[str], local: Mapping[int, int]) -> list[str]:
    """An exec probe's command with the addresses of the pod's own ports (localhost:8265) replaced by local ones."""

    def replace(match: re.Match[str]) -> str:
        port = int(match["port"])
        return f"{LOOPBACK}:{local.get(port, port)}"

    return [OWN_ADDRESS.sub(replace, word) for word in words]


def read_data(store: Store, kind: Kind, namespace: str, name: str, *, optional: bool) -> dict[str, bytes]:
    """All values of a Secret or ConfigMap. Raises ConfigError if it does not exist and is not `optional`."""
    item = store.find(kind, namespace, name)
    if item is None:
        if optional:
            return {}
        raise ConfigError(f'{kind.name.lower()} "{name}" not found')
    if kind == SECRET:
        return {key: base64.b64decode(value) for key, value in item.get("data", {}).items()}
    text = {key: value.encode() for key, value in item.get("data", {}).items()}
    return text | {key: base64.b64decode(value) for key, value in item.get("binaryData", {}).items()}


def read_field(pod: Object, path: str) -> str:
    metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(metadata.get(match[1], {}).get(match[2], ""))
    values: dict[str, Any] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec["serviceAccountName"],
    }
    return str(values[path]) if path in values else str(status.get("podIP", LOOPBACK))


def _value(store: Store, pod: Object, container: Object, variable: Object) -> str | None:
    source = variable.get("valueFrom")
    if source is None:
        return str(variable.get("value", ""))
    if "fieldRef" in source:
        return read_field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _read_resource(pod, container, source["resourceFieldRef"])
    for key, kind in (("secretKeyRef", SECRET), ("configMapKeyRef", CONFIG_MAP)):
        if key in source:
            return _read_key(store, kind, pod["metadata"]["namespace"], source[key])
    return None


def _read_key(store: Store, kind: Kind, namespace: str, reference: Object) -> str | None:
    optional = bool(reference.get("optional"))
    data = read_data(store, kind, namespace, reference["name"], optional=optional)
    if reference["key"] not in data:
        if optional:
            return None
        raise ConfigError(f"couldn't find key {reference['key']} in {kind.name} {namespace}/{reference['name']}")
    return _text(data[reference["key"]], f"{kind.name} {namespace}/{reference['name']}")


def _text(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"a value of {where} is not UTF-8, so no environment variable can hold it") from error


def _read_resource(pod: Object, container: Object, reference: Object) -> str:
    named = reference.get("containerName", container["name"])
    target = next((item for item in pod["spec"]["containers"] if item["name"] == named), container)
    part, _, name = reference["resource"].partition(".")
    amount = parse_quantity(target.get("resources", {}).get(part, {}).get(name, "0"))
    divisor = parse_quantity(reference.get("divisor") or "1") or 1
    return str(-int(-(amount / divisor) // 1))


def _whole_source(store: Store, pod: Object, source: Object) -> dict[str, str]:
    kind, reference = (SECRET, source["secretRef"]) if "secretRef" in source else (CONFIG_MAP, source["configMapRef"])
    namespace, name = pod["metadata"]["namespace"], reference["name"]
    data = read_data(store, kind, namespace, name, optional=bool(reference.get("optional")))
    prefix = source.get("prefix", "")
    return {f"{prefix}{key}": _text(value, f"{kind.name} {namespace}/{name}") for key, value in data.items()}


def _service_links(sources: Sources, pod: Object) -> dict[str, str]:
    """NAME_SERVICE_HOST and NAME_SERVICE_PORT: the service's port on this machine."""
    namespace = pod["metadata"]["namespace"]
    links: dict[str, str] = {}
    for service in sources.store.items(SERVICE, namespace):
        if service["spec"].get("clusterIP") == "None":
            continue
        local = sources.ports.of(sources.store.cluster, f"{namespace}/{service['metadata']['name']}")
        if local:
            name = service["metadata"]["name"].upper().replace("-", "_")
            first = service["spec"]["ports"][0]["port"]
            links |= {f"{name}_SERVICE_HOST": LOOPBACK, f"{name}_SERVICE_PORT": str(local.get(first, first))}
    return links


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replace $(NAME) if the variable is known, and $$ by a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match["name"], match[0])

    return REFERENCE.sub(replace, text)


def _localise(sources: Sources, text: str, pod: Object) -> str:
    """Replace the pod names of a headless service (job-0.service.namespace.svc.cluster.local) by 127.0.0.1.

    A port after the name becomes a local port reserved for the service, because several jobs share this machine.
    """
    subdomain = pod["spec"].get("subdomain")
    if not subdomain or subdomain not in text:
        return text
    owner = f"{pod['metadata']['namespace']}/{subdomain}"

    def replace(match: re.Match[str]) -> str:
        if match["port"] is None:
            return LOOPBACK
        local = sources.ports.take(sources.store.cluster, owner, int(match["port"]), sources.pod_ports)
        return f"{LOOPBACK}:{local}"

    domain = rf"\.{re.escape(pod['metadata']['namespace'])}(?:\.svc(?:\.cluster\.local)?)?"
    return re.sub(
        rf"(?<![\w.-])[a-z0-9-]+\.{re.escape(subdomain)}(?:{domain})?(?::(?P<port>\d+))?(?![\w.-])", replace, text
    )


def declared_ports(pod: Object) -> Iterator[int]:
    """Every port that the manifest gives by number: containers' ports, and probes' ports outside of these, also those
    of a URL in an exec probe's command."""
    for container in pod["spec"]["containers"]:
        yield from (port["containerPort"] for port in container.get("ports", ()))
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for handler in ("httpGet", "tcpSocket"):
                port = container.get(probe, {}).get(handler, {}).get("port")
                if isinstance(port, int):
                    yield port
            for word in container.get(probe, {}).get("exec", {}).get("command", ()):
                yield from (int(match["port"]) for match in OWN_ADDRESS.finditer(word))


def port_number(container: Object, port: int | str) -> int | None:
    """The number of a port given by number or name; None if no container port has the name."""
    if isinstance(port, int):
        return port
    numbers = (entry["containerPort"] for entry in container.get("ports", ()) if entry.get("name") == port)
    return next(numbers, int(port) if port.isdigit() else None)
