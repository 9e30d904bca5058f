"""Server-side apply: what a manager applies it owns, and what it no longer applies goes.

https://kubernetes.io/docs/reference/using-api/server-side-apply/. An object has `managedFields` from its first apply:
until then, all of its fields belong to `before-first-apply`, as in clusters that are older than server-side apply.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from .kinds import Kind
from .patches import merge_patch, strategic_patch
from .refusals import Refusal, bad_request
from .schema import merge_key
from .store import Object

BEFORE = "before-first-apply"
IDENTITY = {
    ("f:apiVersion",), ("f:kind",), ("f:metadata", "f:name"), ("f:metadata", "f:namespace"),
    ("f:metadata", "f:resourceVersion"), ("f:metadata", "f:uid"),
}  # fmt: skip
SYSTEM = {
    ("f:metadata", f"f:{name}")
    for name in ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "managedFields")
}
_MISSING = object()

Path = tuple[str, ...]
"""A leaf as the steps of `fieldsV1`: `f:NAME` is a field, `k:KEYS` and `v:VALUE` an element of a list, `.` itself."""
Owners = dict[tuple[str, str], set[Path]]
"""The leaves by manager and operation (Apply or Update)."""


def apply(kind: Kind, current: Object | None, config: Any, manager: str, *, force: bool) -> tuple[Object, Owners]:
    """The object after an apply, and who owns its fields then. Refuses what other managers own with 409."""
    _check(kind, config, manager)
    wanted = set(leaves(kind.schema, config)) - IDENTITY
    if kind.has_status:
        config = {name: value for name, value in config.items() if name != "status"}
        wanted = {path for path in wanted if path[0] != "f:status"}
    if current is None:
        return copy.deepcopy(config), {(manager, "Apply"): wanted}
    owners = owners_of(kind, current)
    mine = owners.pop((manager, "Apply"), set())
    conflicts = {
        owner: sorted(path for path in wanted & owned if _find(current, path) != _find(config, path))
        for owner, owned in owners.items()
    }
    if not force and any(conflicts.values()):
        raise _conflict(kind, config["metadata"]["name"], conflicts)
    owners = {owner: owned - set(conflicts[owner]) for owner, owned in owners.items()}
    merged = strategic_patch(current, config, kind.schema) if kind.schema else merge_patch(current, config)
    merged = copy.deepcopy(merged)
    kept = wanted.union(*owners.values())
    for path in sorted(mine - kept):
        if path[-1] != "." or not any(other[: len(path) - 1] == path[:-1] for other in kept):
            _drop(merged, path)
    return merged, {owner: owned for owner, owned in {**owners, (manager, "Apply"): wanted}.items() if owned}


def leaves(schema: str, value: Any, names: Path = (), path: Path = ()) -> Iterator[Path]:
    """The leaves of an object; a list without merge key is a leaf."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(schema, item, (*names, name), (*path, f"f:{name}"))
    elif isinstance(value, list) and schema and (key := merge_key(schema, names)) is not None:
        for element in value:
            if not key:
                yield (*path, f"v:{json.dumps(element)}")
            elif isinstance(element, dict) and key in element:
                step = f"k:{json.dumps({key: element[key]}, separators=(',', ':'))}"
                yield (*path, step, ".")
                yield from leaves(schema, element, names, (*path, step))
    else:
        yield path


def owners_of(kind: Kind, item: Object) -> Owners:
    entries = item["metadata"].get("managedFields")
    if entries is None:
        everything = set(leaves(kind.schema, item)) - IDENTITY - SYSTEM
        return {(BEFORE, "Update"): {path for path in everything if path[0] != "f:status"}}
    return {(entry["manager"], entry["operation"]): set(_paths(entry["fieldsV1"])) for entry in entries}


def after_update(kind: Kind, old: Object, new: Object, manager: str) -> Owners:
    """Who owns the fields of an applied object after another write: its writer owns what it changed."""
    owners, present = owners_of(kind, old), set(leaves(kind.schema, new))
    changed = {path for path in present - IDENTITY - SYSTEM if _find(old, path) != _find(new, path)}
    changed = {path for path in changed if path[0] != "f:status"}
    left = {owner: (owned & present) - changed for owner, owned in owners.items()}
    writer = (manager, "Update")
    left[writer] = left.get(writer, set()) | changed
    return {owner: owned for owner, owned in left.items() if owned}


def entries(kind: Kind, owners: Owners, old: Object | None, now: str) -> list[Object]:
    """`managedFields`. An entry keeps its time while its fields are the same."""
    known = (old or {}).get("metadata", {}).get("managedFields") or []
    times = {(entry["manager"], entry["operation"]): (entry["fieldsV1"], entry["time"]) for entry in known}
    made = []
    for (manager, operation), owned in sorted(owners.items()):
        fields = _tree(owned)
        before, time = times.get((manager, operation), (None, now))
        made.append(
            {
                "manager": manager,
                "operation": operation,
                "apiVersion": kind.api_version,
                "time": time if before == fields else now,
                "fieldsType": "FieldsV1",
                "fieldsV1": fields,
            }
        )
    return made


def _check(kind: Kind, config: Any, manager: str) -> None:
    if not manager:
        message = 'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch'
        raise Refusal(422, message)
    if not isinstance(config, dict) or not isinstance(config.get("metadata"), dict):
        raise bad_request("an apply patch is an object with metadata")
    given = (config.get("apiVersion"), config.get("kind"))
    if given != (kind.api_version, kind.name):
        raise bad_request(f"an apply patch is of {kind.name} of {kind.api_version}; it was of {given[1]} of {given[0]}")
    if config["metadata"].get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")


def _conflict(kind: Kind, name: str, conflicts: dict[tuple[str, str], list[Path]]) -> Refusal:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager}" using {kind.api_version}',
            "field": _shown(path),
        }
        for (manager, _), paths in conflicts.items()
        for path in paths
    ]
    listed = "\n".join(f"- {cause['message']}: {cause['field']}" for cause in causes)
    count = f"{len(causes)} conflict{'s' if len(causes) > 1 else ''}"
    details = {"name": name, "group": kind.group, "kind": kind.plural, "causes": causes}
    return Refusal(409, f"Apply failed with {count}: {listed.removeprefix('- ')}", details=details)


def _shown(path: Path) -> str:
    """A path as kubectl prints it: `.spec.containers[name="main"].image`."""
    return "".join(_shown_step(step) for step in path if step != ".")


def _shown_step(step: str) -> str:
    form, text = step[0], step[2:]
    if form == "f":
        return f".{text}"
    if form == "v":
        return f"[={text}]"
    return f"[{','.join(f'{name}={json.dumps(value)}' for name, value in json.loads(text).items())}]"


def _find(value: Any, path: Path) -> Any:
    for step in path:
        if (value := _step(value, step)) is _MISSING:
            return _MISSING
    return value


def _step(value: Any, step: str) -> Any:
    if step == ".":
        return "."  # an element is there; its fields have paths of their own
    if step.startswith("f:"):
        return value.get(step[2:], _MISSING) if isinstance(value, dict) else _MISSING
    at = _index(value, step)
    return _MISSING if at is None else value[at]


def _index(value: Any, step: str) -> int | None:
    if not isinstance(value, list):
        return None
    wanted = json.loads(step[2:])
    if step.startswith("v:"):
        return value.index(wanted) if wanted in value else None
    matches = (
        at for at, element in enumerate(value) if isinstance(element, dict) and wanted.items() <= element.items()
    )
    return next(matches, None)


def _drop(value: Any, path: Path) -> None:
    """Remove a leaf, and each parent that it leaves empty."""
    step, rest = path[0], path[1:]
    child = _step(value, step)
    if child is _MISSING:
        return
    if rest and rest != (".",):
        _drop(child, rest)
        if child:
            return
    del value[step[2:] if step.startswith("f:") else _index(value, step)]


def _tree(paths: set[Path]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        place = tree
        for step in path:
            place = place.setdefault(step, {})
    return tree


def _paths(tree: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    for step, below in tree.items():
        if below:
            yield from _paths(below, (*path, step))
        else:
            yield (*path, step)
