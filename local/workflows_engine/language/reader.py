"""Reads routines and steps from source nodes, and reports every mistake in their shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from ..errors import Problem
from ..limits import Limits
from .expressions import ExpressionError, Target, parse_target
from .source import Node
from .syntax import (
    Assign,
    Call,
    Except,
    For,
    Parallel,
    Raise,
    Retry,
    Return,
    Routine,
    Step,
    Steps,
    Switch,
    Try,
    is_expression,
)

ACTIONS: Final = ("assign", "call", "switch", "for", "parallel", "try", "raise", "return", "steps")
_COMPANIONS: Final = {"args": "call", "result": "call", "retry": "try", "except": "try"}
_KEYS: Final = {*ACTIONS, *_COMPANIONS, "next"}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED: Final = {"end", "break", "continue"}


class Reader:
    """Reads routines from a source tree, and collects all problems instead of stopping at the first."""

    def __init__(self, limits: Limits) -> None:
        self.problems: list[Problem] = []
        self._limits = limits
        self._step = ""

    def problem(self, message: str, node: Node, severity: str = "error") -> None:
        self.problems.append(Problem(message, node.line, node.column, self._step, severity))

    def read(self, root: Node) -> dict[str, Routine]:
        if root.kind == "list":
            return {"main": Routine("main", root, [], self._steps(root))}
        if root.kind != "map" or root.get("main") is None:
            self.problem("expected a list of steps, or a map with 'main'", root)
            return {}
        return {name: self._routine(name, key, node) for name, key, node in root.items()}

    def _routine(self, name: str, key: Node, node: Node) -> Routine:
        self._step = ""
        routine = Routine(name, key)
        if not _NAME.match(name):
            self.problem(f"invalid subworkflow name {name!r}", key)
        if node.kind == "list":
            routine.steps = self._steps(node)
            return routine
        if node.kind != "map":
            self.problem(f"{name!r} must be a map with 'steps'", node)
            return routine
        for text, part, _ in node.items():
            if text not in ("params", "steps"):
                self.problem(f"unexpected {text!r} in {name!r}; expected params or steps", part)
        if (parameters := node.get("params")) is not None:
            routine.parameters = self._parameters(name, parameters)
        steps = node.get("steps")
        if steps is None:
            self.problem(f"{name!r} has no 'steps'", key)
        else:
            routine.steps = self._steps(steps)
        return routine

    def _parameters(self, routine: str, node: Node) -> list[tuple[str, Node | None]]:
        if node.kind != "list":
            self.problem("'params' must be a list of names", node)
            return []
        most = 1 if routine == "main" else self._limits.parameters
        if len(node.value) > most:
            self.problem(f"{routine!r} has {len(node.value)} parameters; the limit is {most}", node)
        parameters: list[tuple[str, Node | None]] = []
        for item in node.value:
            default = None
            if item.kind == "map" and len(item.value) == 1:
                item, default = item.value[0]
            if item.kind != "scalar" or not _NAME.match(item.raw):
                self.problem("a parameter must be a name, or a name with a default", item)
            elif item.raw in [name for name, _ in parameters]:
                self.problem(f"parameter {item.raw!r} is declared twice", item)
            else:
                parameters.append((item.raw, default))
        return parameters

    def _steps(self, node: Node) -> list[Step]:
        if node.kind != "list" or not node.value:
            self.problem("expected a list with at least one step", node)
            return []
        steps: list[Step] = []
        seen: set[str] = set()
        outer = self._step
        for item in node.value:
            if item.kind != "map" or len(item.value) != 1:
                self.problem("a step must be a map with one key, the step's name", item)
                continue
            key, body = item.value[0]
            self._step = key.raw
            if key.raw in seen:
                self.problem(f"duplicate step name {key.raw!r}", key)
            if key.raw in _RESERVED or not key.raw:
                self.problem(f"{key.raw!r} cannot be a step's name", key)
            seen.add(key.raw)
            if (step := self._body(key.raw, key, body)) is not None:
                steps.append(step)
        self._step = outer
        return steps

    def _body(self, name: str, key: Node, node: Node, extra: tuple[str, ...] = ()) -> Step | None:
        if node.kind == "list":  # `- name: [steps]` is short for `- name: {steps: [steps]}`
            return Step(name, key, Steps(self._steps(node)))
        if node.kind != "map":
            self.problem("a step must be a map, for example {assign: […]} or {call: …}", node)
            return None
        actions: list[tuple[str, Node]] = []
        parts: dict[str, Node] = {}
        for text, part, value in node.items():
            if text in extra:
                continue
            if text not in _KEYS:
                self.problem(f"unexpected {text!r} in a step; expected one of {', '.join(sorted(_KEYS))}", part)
                continue
            parts[text] = value
            if text in ACTIONS:
                actions.append((text, part))
        if len(actions) > 1:
            names = " and ".join(text for text, _ in actions)
            self.problem(f"a step has a single action; got: {names}", actions[1][1])
        for text, owner in _COMPANIONS.items():
            if text in parts and owner not in parts:
                self.problem(f"{text!r} needs {owner!r}", parts[text])
        step = Step(name, key, None)
        if (next_ := parts.get("next")) is not None:
            self._next(step, next_)
        if actions:
            step.action = self._read_action(actions[0][0], parts)
        elif step.next is None:
            self.problem("the step does nothing", node)
        return step

    def _next(self, step: Step, node: Node) -> None:
        if node.kind != "scalar" or not node.raw:
            self.problem("'next' must be a step's name, end, break or continue", node)
        else:
            step.next, step.next_node = node.raw, node

    def _read_action(self, action: str, parts: dict[str, Node]) -> Any:
        node = parts[action]
        readers: dict[str, Callable[[], Any]] = {
            "assign": lambda: self._assign(node),
            "call": lambda: self._call(node, parts),
            "switch": lambda: self._switch(node),
            "for": lambda: self._for(node),
            "parallel": lambda: self._parallel(node),
            "try": lambda: self._try(node, parts),
            "raise": lambda: Raise(node),
            "return": lambda: Return(node),
            "steps": lambda: Steps(self._steps(node)),
        }
        return readers[action]()

    def _assign(self, node: Node) -> Assign:
        items: list[tuple[Target, Node, Node]] = []
        shape = "'assign' must be a list of assignments, each a map with one key"
        for item in self._items(node, shape, "assignments in one step", self._limits.assignments_per_step):
            if item.kind != "map" or len(item.value) != 1:
                self.problem("an assignment must be a map with one key", item)
                continue
            key, value = item.value[0]
            if (target := self._target(key)) is not None:
                items.append((target, key, value))
        return Assign(items)

    def _items(self, node: Node, shape: str, noun: str, limit: int) -> list[Node]:
        """The items of a list. Reports a node of another shape, an empty list, and a list over the limit."""
        if node.kind != "list" or not node.value:
            self.problem(shape, node)
            return []
        if len(node.value) > limit:
            self.problem(f"{len(node.value)} {noun}; the limit is {limit}", node)
        items: list[Node] = node.value
        return items

    def _target(self, node: Node) -> Target | None:
        try:
            if node.kind != "scalar":
                raise ExpressionError("expected a variable")
            return parse_target(node.raw)
        except ExpressionError as error:
            self.problem(f"cannot assign to {node.raw!r}: {error}", node)
            return None

    def _call(self, node: Node, parts: dict[str, Node]) -> Call:
        arguments: dict[str, Node] = {}
        positional: list[Node] = []
        if node.kind != "scalar" or type(node.value) is not str or is_expression(node):
            self.problem("'call' must be the name of a function or subworkflow", node)
        if (args := parts.get("args")) is not None and args.value is not None:
            if args.kind == "list":  # documented with sys.log: args: ["text", "ERROR"]
                positional = args.value
            elif args.kind != "map":
                self.problem("'args' must be a map from parameter names to values, or a list of values", args)
            else:
                arguments = {name: value for name, _, value in args.items()}
        result = parts.get("result")
        target = self._target(result) if result is not None else None
        return Call(node.raw, node, arguments, target, positional)

    def _switch(self, node: Node) -> Switch:
        conditions: list[tuple[Node, list[Step]]] = []
        shape = "'switch' must be a list of conditions"
        for item in self._items(node, shape, "conditions in one switch", self._limits.conditions_per_switch):
            condition = item.get("condition") if item.kind == "map" else None
            if condition is None:
                self.problem("a switch entry must be a map with 'condition'", item)
                continue
            if not is_expression(condition) and type(condition.value) is not bool:
                self.problem("'condition' must be an expression or a boolean", condition)
            conditions.append((condition, self._inline(item, ("condition",))))
        return Switch(conditions)

    def _inline(self, node: Node, extra: tuple[str, ...]) -> list[Step]:
        """An inline body: an unnamed step, or no step."""
        if all(text in extra for text, _, _ in node.items()):
            return []
        step = self._body("", node, node, extra)
        return [step] if step is not None else []

    def _for(self, node: Node) -> For:
        loop = For("", None, node, None, None, [])
        if node.kind != "map":
            self.problem("'for' must be a map with value, in or range, and steps", node)
            return loop
        for text, part, _ in node.items():
            if text not in ("value", "index", "in", "range", "steps"):
                self.problem(f"unexpected {text!r} in 'for'; expected value, index, in, range, steps", part)
        loop.value = self._variable(node.get("value"), "value", node) or ""
        if (index := node.get("index")) is not None:
            loop.index = self._variable(index, "index", node)
        loop.in_ = node.get("in")
        if (range_ := node.get("range")) is not None:
            loop.range = self._range(range_)
        if (loop.in_ is None) == (range_ is None):
            self.problem("'for' needs either 'in' or 'range'", node)
        if (steps := node.get("steps")) is None:
            self.problem("'for' needs 'steps'", node)
        else:
            loop.steps = self._steps(steps)
        return loop

    def _range(self, node: Node) -> tuple[Node, Node] | Node | None:
        if node.kind == "list" and len(node.value) == 2:
            return node.value[0], node.value[1]
        if is_expression(node):
            return node
        self.problem("'range' must be a list of two numbers, or an expression", node)
        return None

    def _variable(self, node: Node | None, key: str, owner: Node) -> str | None:
        if node is None:
            self.problem(f"'for' needs {key!r}", owner)
        elif node.kind != "scalar" or not _NAME.match(node.raw):
            self.problem(f"{key!r} must be a variable's name", node)
        else:
            return node.raw
        return None

    def _parallel(self, node: Node) -> Parallel:
        parallel = Parallel(node, [], None, [], None)
        if node.kind != "map":
            self.problem("'parallel' must be a map with branches or for", node)
            return parallel
        for text, part, _ in node.items():
            if text not in ("shared", "concurrency_limit", "exception_policy", "branches", "for"):
                self.problem(f"unexpected {text!r} in 'parallel'", part)
        policy = node.get("exception_policy")
        if policy is not None and policy.value != "continueAll":
            self.problem("'exception_policy' must be continueAll, the only policy there is", policy)
        parallel.limit = node.get("concurrency_limit")
        if (shared := node.get("shared")) is not None:
            parallel.shared = self._shared(shared)
        branches, loop = node.get("branches"), node.get("for")
        if (branches is None) == (loop is None):
            self.problem("'parallel' needs either 'branches' or 'for'", node)
        if loop is not None:
            parallel.loop = self._for(loop)
        if branches is not None:
            parallel.branches = self._branches(branches)
        return parallel

    def _shared(self, node: Node) -> list[tuple[str, Node]]:
        if node.kind == "list" and all(item.kind == "scalar" and _NAME.match(item.raw) for item in node.value):
            return [(item.raw, item) for item in node.value]
        self.problem("'shared' must be a list of variables' names", node)
        return []

    def _branches(self, node: Node) -> list[tuple[str, list[Step], Node]]:
        if node.kind != "list" or not node.value:
            self.problem("'branches' must be a list of branches", node)
            return []
        if not 2 <= len(node.value) <= self._limits.branches:
            self.problem(f"{len(node.value)} branches; expected 2 to {self._limits.branches}", node)
        branches: list[tuple[str, list[Step], Node]] = []
        for step in self._steps(node):
            if isinstance(step.action, Steps) and step.next is None:
                branches.append((step.name, step.action.steps, step.node))
            else:  # one inline step
                branches.append((step.name, [step], step.node))
        return branches

    def _try(self, node: Node, parts: dict[str, Node]) -> Try:
        if node.kind == "map":
            steps = self._inline(node, ())
            if steps and isinstance(steps[0].action, For):
                self.problem(
                    "loop step name should not be empty (Code: 3); put the 'for' into 'steps' under a name", node
                )
        else:
            steps = self._steps(node)
        retry = self._retry(parts["retry"]) if "retry" in parts else None
        handler = self._except(parts["except"]) if "except" in parts else None
        if retry is None and handler is None:
            self.problem("'try' needs 'retry' or 'except'", node)
        return Try(steps, retry, handler)

    def _retry(self, node: Node) -> Retry:
        if is_expression(node):
            return Retry(node, node)
        retry = Retry(node, None)
        if node.kind != "map":
            self.problem("'retry' must be a policy: an expression, or a map", node)
            return retry
        for text, part, value in node.items():
            if text == "backoff":
                self._backoff(retry, value)
            elif text in ("predicate", "max_retries"):
                setattr(retry, text, value)
            else:
                self.problem(f"unexpected {text!r} in 'retry'; expected predicate, max_retries, backoff", part)
        return retry

    def _backoff(self, retry: Retry, node: Node) -> None:
        if is_expression(node):
            retry.backoff = node
            return
        if node.kind != "map":
            self.problem("'backoff' must be a map or an expression", node)
            return
        for text, part, value in node.items():
            if text in ("initial_delay", "max_delay", "multiplier"):
                setattr(retry, text, value)
            else:
                self.problem(f"unexpected {text!r} in 'backoff'", part)

    def _except(self, node: Node) -> Except:
        handler = Except(node, None, [])
        if node.kind != "map":
            self.problem("'except' must be a map with as and steps", node)
            return handler
        if (variable := node.get("as")) is not None:
            if variable.kind == "scalar" and _NAME.match(variable.raw):
                handler.variable = variable.raw
            else:
                self.problem("'as' must be a variable's name", variable)
        steps = node.get("steps")
        if steps is not None and steps.kind == "map":
            handler.steps = self._inline(steps, ())
        elif steps is None or steps.value is not None:
            handler.steps = self._inline(node, ("as",))
        return handler
