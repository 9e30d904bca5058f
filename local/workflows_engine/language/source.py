"""Parses workflow source to a tree of nodes with positions, by YAML's core schema, which includes JSON.

PyYAML's own schema is YAML 1.1, where `no` and `on` are booleans, even as step names; this module uses only the events
of its parser. The walk is iterative: libyaml's composer recurses in C, and a deep document crashes the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from ..errors import DeployError, Problem

MAX_DEPTH = 100


@dataclass(slots=True)
class Node:
    """A value in the source. `value`: a scalar, a list of nodes, or a list of (key node, value node)."""

    kind: Literal["scalar", "list", "map"]
    value: Any
    line: int
    column: int
    raw: str = ""  # a scalar's text in the source
    quoted: bool = False

    def items(self) -> Iterator[tuple[str, Node, Node]]:
        """(key text, key node, value node) of a map's pairs."""
        for key, value in self.value:
            yield key.raw, key, value

    def get(self, name: str) -> Node | None:
        return next((value for key, _, value in self.items() if key == name), None)


def load(text: str, *, max_bytes: int, max_nodes: int) -> Node:
    """The root node of a document. Raises DeployError with the position of the mistake."""
    if len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise DeployError([Problem(f"source is {len(text)} bytes; the limit is {max_bytes}")])
    if text.lstrip()[:1] in ("{", "["):
        # JSON allows tabs as indentation, YAML does not. JSON may write a character as two surrogates, which YAML's
        # parser refuses.
        text = _SURROGATES.sub(lambda pair: str(json.loads(f'"{pair.group()}"')), text.replace("\t", " "))
    try:
        return _Builder(max_nodes).build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise DeployError([Problem(f"parse error: {error.problem or error.context}", line, column)]) from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise DeployError([Problem(f"parse error: {error}")]) from error


class _Builder:
    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._anchors: dict[str, Node] = {}
        self._sizes: dict[int, int] = {}
        self._open: list[tuple[Node, list[Node], str | None]] = []
        self._root: Node | None = None

    def build(self, text: str) -> Node:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._problem("expected one document; got a second", event)
            elif isinstance(event, yaml.ScalarEvent):
                self._add(self._scalar(event), event)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                self._start(event)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                self._end(event)
        if self._root is None:
            raise DeployError([Problem("the source is empty; expected a list of steps or a map with 'main'")])
        return self._root

    def _start(self, event: Any) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise self._problem(f"nested deeper than {MAX_DEPTH}", event)
        kind: Literal["list", "map"] = "list" if isinstance(event, yaml.SequenceStartEvent) else "map"
        node = Node(kind, [], event.start_mark.line + 1, event.start_mark.column + 1)
        self._open.append((node, [], event.anchor))

    def _end(self, event: Any) -> None:
        node, parts, anchor = self._open.pop()
        if node.kind == "list":
            node.value = parts
        else:
            node.value = list(zip(parts[::2], parts[1::2], strict=True))
            self._check_keys(node)
        self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
        if anchor:  # only a complete node may be referred to: a node that contains itself has no end
            self._anchors[anchor] = node
        self._attach(node, event)

    def _check_keys(self, node: Node) -> None:
        seen: set[str] = set()
        for text, key, _ in node.items():
            if key.kind != "scalar":
                raise DeployError([Problem("a key must be a scalar", key.line, key.column)])
            if text in seen:
                raise DeployError([Problem(f"duplicate key {text!r}", key.line, key.column)])
            seen.add(text)

    def _alias(self, event: Any) -> None:
        node = self._anchors.get(event.anchor)
        if node is None:
            raise self._problem(f"alias *{event.anchor} names no finished anchor", event)
        self._attach(node, event)

    def _add(self, node: Node, event: Any) -> None:
        self._sizes[id(node)] = 1
        if event.anchor:
            self._anchors[event.anchor] = node
        self._attach(node, event)

    def _attach(self, node: Node, event: Any) -> None:
        if self._sizes[id(node)] > self._max_nodes:
            raise self._problem(f"the source expands to more than {self._max_nodes} nodes", event)
        if self._open:
            self._open[-1][1].append(node)
        else:
            self._root = node

    def _scalar(self, event: Any) -> Node:
        text = event.value
        plain = event.style is None or event.style == ""
        value: Any = text
        if event.tag in (None, "!"):
            value = resolve(text) if plain and event.tag is None else text
        elif event.tag == "tag:yaml.org,2002:str":
            value = text
        elif event.tag.startswith("tag:yaml.org,2002:"):
            value = resolve(text)
        else:
            raise self._problem(f"tag {event.tag!r} is not supported", event)
        return Node("scalar", value, event.start_mark.line + 1, event.start_mark.column + 1, text, not plain)

    @staticmethod
    def _problem(message: str, event: Any) -> DeployError:
        return DeployError([Problem(message, event.start_mark.line + 1, event.start_mark.column + 1)])


_SURROGATES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_INTEGER = re.compile(r"[-+]?[0-9]+\Z")
_OCTAL = re.compile(r"0o[0-7]+\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}


def resolve(text: str) -> Any:
    """A plain scalar's value by the core schema of YAML 1.2. An integer beyond 64 bits becomes a double, as in JSON."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > 400:
        return text
    if _INTEGER.match(text):
        return _int64(int(text), text)
    if _OCTAL.match(text):
        return _int64(int(text[2:], 8), text)
    if _HEX.match(text):
        return _int64(int(text[2:], 16), text)
    if _FLOAT.match(text):
        return float(text)
    return text


def _int64(number: int, text: str) -> Any:
    return number if -(2**63) <= number < 2**63 else float(number) if abs(number) < 10**300 else text
