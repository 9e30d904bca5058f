"""The steps of a workflow as data: `reader.py` makes them from source nodes, `compiler.py` compiles them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .expressions import Target
from .source import Node


@dataclass(slots=True)
class Step:
    """A step. `name` is empty for the inline body of a switch entry, `try` or `except`."""

    name: str
    node: Node
    action: Assign | Call | Switch | For | Parallel | Try | Raise | Return | Steps | None
    next: str | None = None
    next_node: Node | None = None


@dataclass(slots=True)
class Assign:
    items: list[tuple[Target, Node, Node]]  # target, its key node, value node


@dataclass(slots=True)
class Call:
    function: str
    node: Node
    arguments: dict[str, Node]
    result: Target | None
    positional: list[Node] = field(default_factory=list)  # `args` as a list; the compiler names them


@dataclass(slots=True)
class Switch:
    conditions: list[tuple[Node, list[Step]]]


@dataclass(slots=True)
class For:
    value: str
    index: str | None
    node: Node
    in_: Node | None
    range: tuple[Node, Node] | Node | None
    steps: list[Step]


@dataclass(slots=True)
class Parallel:
    node: Node
    shared: list[tuple[str, Node]]
    limit: Node | None
    branches: list[tuple[str, list[Step], Node]]
    loop: For | None


@dataclass(slots=True)
class Retry:
    node: Node
    policy: Node | None  # the whole policy as one expression
    predicate: Node | None = None
    max_retries: Node | None = None
    backoff: Node | None = None  # the whole backoff as one expression
    initial_delay: Node | None = None
    max_delay: Node | None = None
    multiplier: Node | None = None


@dataclass(slots=True)
class Except:
    node: Node
    variable: str | None
    steps: list[Step]


@dataclass(slots=True)
class Try:
    steps: list[Step]
    retry: Retry | None
    handler: Except | None


@dataclass(slots=True)
class Raise:
    value: Node


@dataclass(slots=True)
class Return:
    value: Node


@dataclass(slots=True)
class Steps:
    steps: list[Step]


@dataclass(slots=True)
class Routine:
    """`main` or a subworkflow. A parameter's default is a node, or None if the argument is required."""

    name: str
    node: Node
    parameters: list[tuple[str, Node | None]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def is_expression(node: Node) -> bool:
    if node.kind != "scalar" or type(node.value) is not str:
        return False
    text = node.value.strip()
    return text.startswith("${") and text.endswith("}")
