"""The IAM bindings, custom roles and Kubernetes roles of a directory of *.tf files, for given variables.

Values that only Google knows, such as a project's number, become a text in angle brackets that equals nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .hcl import Block, Expression, HclError, Scope, pairs, read

# The resource that a binding is on, by the type of the Terraform resource: a template of its name, from its arguments.
# "" is the project.
_PLACE = "projects/{project}/locations/{location}"
_ON: Mapping[str, str] = {
    "google_artifact_registry_repository_iam_member": f"{_PLACE}/repositories/{{repository}}",
    "google_cloud_run_v2_service_iam_member": f"{_PLACE}/services/{{name}}",
    "google_dns_managed_zone_iam_member": "projects/{project}/managedZones/{managed_zone}",
    "google_iap_web_cloud_run_service_iam_member": (
        "projects/{project}/iap_web/cloud_run-{location}/services/{cloud_run_service_name}"
    ),
    "google_project_iam_member": "",
    "google_pubsub_subscription_iam_member": "projects/{project}/subscriptions/{subscription}",
    "google_pubsub_topic_iam_member": "projects/{project}/topics/{topic}",
    "google_secret_manager_secret_iam_member": "{secret_id}",
    "google_service_account_iam_member": "{service_account_id}",
    "google_storage_bucket_iam_member": "projects/_/buckets/{bucket}",
}
_ROLE = "google_project_iam_custom_role"
_SERVICE_ACCOUNT = "projects/{project}/serviceAccounts/{account_id}@{project}.iam.gserviceaccount.com"
# Attributes that Google derives from a resource's arguments.
_DERIVED: Mapping[tuple[str, str], str] = {
    ("google_artifact_registry_repository", "name"): "{repository_id}",
    (_ROLE, "id"): "projects/{project}/roles/{role_id}",
    ("google_pubsub_topic", "id"): "projects/{project}/topics/{name}",
    ("google_secret_manager_secret", "id"): "projects/{project}/secrets/{secret_id}",
    ("google_service_account", "email"): "{account_id}@{project}.iam.gserviceaccount.com",
    ("google_service_account", "id"): _SERVICE_ACCOUNT,
    ("google_service_account", "member"): "serviceAccount:{account_id}@{project}.iam.gserviceaccount.com",
    ("google_service_account", "name"): _SERVICE_ACCOUNT,
}


@dataclass(frozen=True)
class Binding:
    """A role on a resource ("" is the project) for a member, under a condition in CEL ("": always)."""

    member: str
    role: str
    resource: str
    condition: str = ""


@dataclass(frozen=True)
class Configuration:
    """The grants of Terraform: bindings, custom roles' permissions, and the objects of every standing cluster."""

    bindings: tuple[Binding, ...]
    roles: Mapping[str, frozenset[str]]
    cluster_objects: tuple[Mapping[str, Any], ...]


def read_configuration(directory: Path, variables: Mapping[str, Any]) -> Configuration:
    """Evaluate `directory` with these variables; the files' defaults hold for others. Raises HclError, OSError."""
    module = _Module(directory, variables)
    roles = {
        instance["id"]: frozenset(instance["permissions"])
        for _, instance in module.instances_of_type(lambda kind: kind == _ROLE)
    }
    members = module.instances_of_type(lambda kind: kind.endswith("_iam_member"))
    bindings = tuple(_binding(kind, instance) for kind, instance in members)
    return Configuration(bindings, roles, tuple(module.local("kubernetes_objects")))


def _binding(kind: str, instance: _Instance) -> Binding:
    if kind not in _ON:
        raise HclError(f"the local stack does not know what {kind} binds a role to; known are {', '.join(sorted(_ON))}")
    conditions = [instance.inner(block, "expression") for block in instance.blocks("condition")]
    return Binding(instance["member"], instance["role"], instance.fill(_ON[kind]), "".join(conditions))


class _Module:
    """The files' content, and what their names mean."""

    def __init__(self, directory: Path, variables: Mapping[str, Any]) -> None:
        self.directory = directory
        self._variables = variables
        self._locals: dict[str, Expression] = {}
        self._values: dict[str, Any] = {}
        self._defaults: dict[str, Block] = {}
        self._resources: dict[tuple[str, str], Block] = {}
        self._instances: dict[tuple[str, str], Any] = {}
        for path in sorted(directory.glob("*.tf")):
            try:
                self._add(read(path.read_text()))
            except HclError as error:
                raise HclError(f"{path}: {error}") from error

    def _add(self, file: Block) -> None:
        for block in file.blocks:
            if block.kind == "locals":
                self._locals.update(block.attributes)
            elif block.kind == "variable":
                self._defaults[block.labels[0]] = block
            elif block.kind == "resource":
                self._resources[block.labels[0], block.labels[1]] = block

    def local(self, name: str) -> Any:
        if name not in self._locals:
            raise HclError(f"no local.{name}")
        if name not in self._values:
            self._values[name] = self._locals[name](_Names(self, {}))
        return self._values[name]

    def variable(self, name: str) -> Any:
        if name in self._variables:
            return self._variables[name]
        if name not in self._defaults or "default" not in self._defaults[name].attributes:
            raise HclError(f"var.{name} has no value")
        return self._defaults[name].attributes["default"](_Names(self, {}))

    def resource(self, kind: str, name: str) -> Any:
        """The resource, or with `for_each` its instances by key."""
        if (kind, name) not in self._resources:
            raise HclError(f"no resource {kind}.{name}")
        if (kind, name) not in self._instances:
            self._instances[kind, name] = self._make(self._resources[kind, name])
        return self._instances[kind, name]

    def _make(self, block: Block) -> Any:
        if "for_each" in block.attributes:
            return {key: _Instance(self, block, {"each": each}) for key, each in self._each(block)}
        if "count" in block.attributes:
            count = block.attributes["count"](_Names(self, {}))
            return [_Instance(self, block, {}) for _ in range(count)]
        return _Instance(self, block, {})

    def has_type(self, kind: str) -> bool:
        return any(kind == known for known, _ in self._resources)

    def instances_of_type(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, _Instance]]:
        for kind, name in self._resources:
            if is_wanted(kind):
                found = self.resource(kind, name)
                instances = [found] if isinstance(found, _Instance) else [item for _, item in pairs(found)]
                yield from ((kind, instance) for instance in instances)

    def _each(self, block: Block) -> Iterator[tuple[str, Mapping[str, Any]]]:
        collection = block.attributes["for_each"](_Names(self, {}))
        for key, value in pairs(collection):
            key = key if isinstance(collection, Mapping) else value
            yield key, {"key": key, "value": value}


class _Instance:
    """An instance of a resource: its arguments, evaluated when they are read, and what Google derives from them."""

    def __init__(self, module: _Module, block: Block, names: Mapping[str, Any]) -> None:
        self._module = module
        self._block = block
        self._scope = _Names(module, names)

    def __getitem__(self, name: str) -> Any:
        if template := _DERIVED.get((self._block.labels[0], name)):
            return self.fill(template)
        if name in self._block.attributes:
            return self._block.attributes[name](self._scope)
        if name == "project":
            return self._module.variable("project_id")
        return _Unknown(".".join((*self._block.labels, name)))

    def fill(self, template: str) -> str:
        return template.format_map(_Arguments(self))

    def blocks(self, kind: str) -> Iterator[tuple[Block, Scope]]:
        """The inner blocks of a kind, also dynamic ones, with the scope of each."""
        for block in self._block.blocks:
            if block.kind == kind:
                yield block, self._scope
            elif (block.kind, block.labels) == ("dynamic", (kind,)):
                content = next(inner for inner in block.blocks if inner.kind == "content")
                for key, value in pairs(block.attributes["for_each"](self._scope)):
                    yield content, self._scope.inner({kind: {"key": key, "value": value}})

    def inner(self, found: tuple[Block, Scope], name: str) -> str:
        block, scope = found
        return str(block.attributes[name](scope))


class _Unknown(str):
    """A value that only Google knows, as the path of its reference in angle brackets; so is every part of it."""

    def __new__(cls, path: str) -> _Unknown:
        return super().__new__(cls, f"<{path}>")

    def __getitem__(self, part: Any) -> _Unknown:
        return _Unknown(f"{str.__getitem__(self, slice(1, -1))}.{part}")


class _Arguments(dict[str, Any]):
    """For str.format_map: an instance's arguments."""

    def __init__(self, instance: _Instance) -> None:
        super().__init__()
        self._instance = instance

    def __missing__(self, name: str) -> Any:
        return self._instance[name]


class _Names:
    """The meaning of names in an expression of a module. Satisfies hcl.Scope."""

    def __init__(self, module: _Module, names: Mapping[str, Any]) -> None:
        self._module = module
        self._names = names

    def inner(self, names: Mapping[str, Any]) -> _Names:
        return _Names(self._module, {**self._names, **names})

    def value(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        if name in ("var", "local", "path", "data") or self._module.has_type(name):
            return _Root(name)
        raise HclError(f"the name {name!r} is unknown")

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, _Root):
            return self._of_root(value.path, name)
        if isinstance(value, (_Instance, _Unknown, Mapping)):
            try:
                return value[name]
            except KeyError:
                raise HclError(f"no attribute {name!r}") from None
        raise HclError(f"{value!r} has no attribute {name!r}")

    def call(self, function: str, arguments: list[Any]) -> Any:
        if function not in _FUNCTIONS:
            raise HclError(f"the function {function}() is unknown; add it to {__name__}")
        return _FUNCTIONS[function](*arguments)

    def _of_root(self, path: str, name: str) -> Any:
        if path == "var":
            return self._module.variable(name)
        if path == "local":
            return self._module.local(name)
        if path == "path":
            return str(self._module.directory)
        if path.startswith("data"):
            parts = [*path.split("."), name]
            return _Root(".".join(parts)) if len(parts) < 4 else _Unknown(".".join(parts))
        return self._module.resource(path, name)


@dataclass(frozen=True)
class _Root:
    """The first part of a reference: var, local, path, data.TYPE.NAME, or a type of resource."""

    path: str


def _merge(*objects: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for each in objects if each for key, value in each.items()}


def _union(*sets: Any) -> list[Any]:
    return list(dict.fromkeys(item for each in sets for item in each))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "concat": lambda *lists: [item for each in lists for item in each],
    "contains": lambda items, item: item in items,
    "file": lambda path: Path(path).read_text(),
    "fileexists": lambda path: Path(path).is_file(),
    "join": lambda separator, items: separator.join(map(str, items)),
    "jsonencode": lambda value: json.dumps(value, separators=(",", ":")),
    "keys": lambda value: sorted(value),
    "length": len,
    "merge": _merge,
    "replace": lambda text, old, new: text.replace(old, new),
    "reverse": lambda items: items[::-1],
    "setunion": _union,
    "slice": lambda items, start, end: items[start:end],
    "split": lambda separator, text: text.split(separator),
    "toset": lambda items: _union(items),
    "upper": str.upper,
    "yamldecode": lambda text: yaml.load(text, Loader=_YAML),
}
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
