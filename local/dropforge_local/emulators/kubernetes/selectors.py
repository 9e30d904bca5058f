"""Label and field selectors, as query parameters and as LabelSelector objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .kinds import Kind
from .names import label_key_problem, label_value_problem
from .refusals import bad_request

TERM = re.compile(
    r"\s*(?:(?P<absent>!)\s*(?P<missing>[^\s!=(),]+)"
    r"|(?P<set_key>[^\s!=(),]+)\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<key>[^\s!=(),<>]+)\s*(?:(?P<operator>==|!=|=)\s*(?P<value>[^\s!=(),]*))?)\s*"
)


@dataclass(frozen=True)
class Requirement:
    key: str
    operator: str  # In, NotIn, Exists, DoesNotExist
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        present = self.key in labels
        if self.operator == "Exists":
            return present
        if self.operator == "DoesNotExist":
            return not present
        inside = present and labels[self.key] in self.values
        return inside if self.operator == "In" else not inside


@dataclass(frozen=True)
class Selector:
    """Requirements on labels, and (path, value, whether equal) on fields; an object must satisfy all of them."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[tuple[str, str, bool], ...] = ()

    def matches(self, kind: Kind, item: Mapping[str, Any]) -> bool:
        labels = item["metadata"].get("labels", {})
        return all(requirement.matches(labels) for requirement in self.labels) and all(
            (_field(kind, item, path) == wanted) is equal for path, wanted, equal in self.fields
        )

    def __bool__(self) -> bool:
        return bool(self.labels or self.fields)


def parse_selector(kind: Kind, labels: str, fields: str) -> Selector:
    """A selector from labelSelector and fieldSelector. Refuses malformed ones, and fields without index, with 400."""
    return Selector(parse_labels(labels), tuple(_parse_fields(kind, fields)))


def parse_labels(text: str) -> tuple[Requirement, ...]:
    requirements, position = [], 0
    while position < len(text):
        match = TERM.match(text, position)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise bad_request(f'unable to parse requirement: found {text[position:]!r} in label selector "{text}"')
        requirements.append(_requirement(match))
        position = match.end() + 1
        if position == len(text):
            raise bad_request(f'unable to parse requirement: label selector "{text}" ends in a comma')
    return tuple(requirements)


def from_label_selector(selector: Mapping[str, Any]) -> tuple[Requirement, ...]:
    """The requirements of a validated LabelSelector object; an empty selector selects everything."""
    equal = [Requirement(key, "In", frozenset([value])) for key, value in selector.get("matchLabels", {}).items()]
    sets = [
        Requirement(expression["key"], expression["operator"], frozenset(expression.get("values", ())))
        for expression in selector.get("matchExpressions", ())
    ]
    return (*equal, *sets)


def select(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(requirement.matches(labels) for requirement in from_label_selector(selector))


def _requirement(match: re.Match[str]) -> Requirement:
    if match["absent"]:
        return _checked(Requirement(match["missing"], "DoesNotExist"))
    if match["set"]:
        values = frozenset(value.strip() for value in match["values"].split(","))
        return _checked(Requirement(match["set_key"], "In" if match["set"] == "in" else "NotIn", values))
    if match["operator"] is None:
        return _checked(Requirement(match["key"], "Exists"))
    return _checked(
        Requirement(match["key"], "NotIn" if match["operator"] == "!=" else "In", frozenset([match["value"]]))
    )


def _checked(requirement: Requirement) -> Requirement:
    problem = label_key_problem(requirement.key) or next(
        (wrong for value in requirement.values if (wrong := label_value_problem(value))), ""
    )
    if problem:
        raise bad_request(f"unable to parse requirement: {problem}")
    return requirement


def _parse_fields(kind: Kind, text: str) -> list[tuple[str, str, bool]]:
    terms = []
    for term in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([\w.]+)\s*(==|!=|=)\s*(.*?)\s*", term)
        if match is None:
            raise bad_request(f"invalid selector: {term!r}; can't understand it")
        if match[1] not in FIELDS[""] and match[1] not in FIELDS.get(kind.key, {}):
            raise bad_request(f'field label not supported: "{match[1]}"')
        terms.append((match[1], match[3], match[2] != "!="))
    return terms


def _field(kind: Kind, item: Mapping[str, Any], path: str) -> str:
    read = FIELDS.get(kind.key, {}).get(path) or FIELDS[""].get(path)
    assert read is not None
    return read(item)


def _path(*steps: str) -> Callable[[Mapping[str, Any]], str]:
    def read(item: Mapping[str, Any]) -> str:
        value: Any = item
        for step in steps:
            value = value.get(step) if isinstance(value, Mapping) else None
        return "" if value is None else str(value)

    return read


def _paths(*paths: str) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    return {path: _path(*path.split(".")) for path in paths}


# The selectable fields of the real API server, by resource.
FIELDS = {
    "": _paths("metadata.name", "metadata.namespace"),
    "pods": _paths(
        "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
        "status.phase", "status.podIP", "status.nominatedNodeName",
    ),
    "events": {
        **_paths(
            "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
            "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason", "type",
            "reportingComponent",
        ),
        "source": _path("source", "component"),
    },
    "secrets": _paths("type"),
    "namespaces": _paths("status.phase"),
    "nodes": _paths("spec.unschedulable"),
    "jobs.batch": {"status.successful": lambda item: str(item.get("status", {}).get("succeeded", 0))},
    "replicasets.apps": {"status.replicas": lambda item: str(item.get("status", {}).get("replicas", 0))},
    "services": _paths("spec.clusterIP", "spec.type"),
}  # fmt: skip
