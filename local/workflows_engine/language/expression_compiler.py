"""Compiles values and expressions of steps.

A call of a subworkflow inside an expression becomes an instruction before the expression ("hoisting"); the expression
then reads the call's result from a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..limits import Limits
from ..values import Function, Value
from . import instructions as ops
from . import stdlib, syntax
from .emitter import Emitter, Label
from .evaluation import Evaluation, Slot, Tree, constant
from .expressions import (
    Binary,
    Call,
    ExpressionError,
    Field,
    Index,
    ListOf,
    Literal,
    Logical,
    Name,
    Target,
    Unary,
    dotted,
    parse,
)
from .places import Place
from .program import Code, Evaluate, Program, WaitSignal
from .reports import Reports
from .scopes import new_slot
from .source import Node

_VERSIONS = "googleapis.secretmanager.v1.projects.secrets.versions"
_HELPERS = {
    f"{_VERSIONS}.accessString": ("secret_id", "version", "project_id"),
    "googleapis.secretmanager.v1.projects.secrets.addVersionString": ("secret_id", "data", "project_id"),
}


class ExpressionCompiler:
    """`emitter` receives the instructions of hoisted calls; the step compiler sets it for each routine and branch."""

    def __init__(self, program: Program, routines: Mapping[str, Any], limits: Limits, reports: Reports) -> None:
        self.emitter = Emitter(Code("", ""))
        self._program = program
        self._codes = program.codes
        self._routines = routines
        self._limits = limits
        self._reports = reports

    def setter(self, target: Target, node: Node, value: Evaluate, place: Place) -> ops.Setter:
        """The assignment of a value to a target; `node` holds the target's text."""
        path = [self._compile(self._lower(tree, node, place), node, place) for tree in target.path]
        depth, slot = place.scope.find(target.name) or (0, 0)
        return ops.Setter(depth, slot, target.name, path, value)

    def memory(self) -> ops.Memory:
        """The limits of memory of the running execution."""
        program = self._program

        def check(value: Value) -> None:
            runtime = program.runtime
            assert runtime is not None
            runtime.sizer.check(value)
            runtime.room -= 8 + 4 * len(value) if value.__class__ is str else runtime.sizer.size(value)

        def settle() -> None:
            runtime = program.runtime
            assert runtime is not None
            if runtime.room < 0:
                runtime.count_variables()

        return ops.Memory(check, settle)

    def evaluate(self, node: Node, place: Place) -> Evaluate:
        """A function from the frame's slots to the value of a node. Emits the calls that it hoists."""
        compiled = self._value(node, place)
        return constant(compiled.value) if isinstance(compiled, Literal) else compiled

    def _value(self, node: Node, place: Place) -> Evaluate | Literal:
        """A value tree: a constant if it holds no expression."""
        if node.kind == "scalar":
            if syntax.is_expression(node):
                return self._expression(node, place)
            if type(node.value) is str and "${" in node.value:
                self._reports.problem(
                    "'${' inside text is not interpolated; write ${\"text\" + value}", node, severity="warning"
                )
            return Literal(node.value)
        if node.kind == "list":
            return ops.list_of_values([self._value(item, place) for item in node.value])
        pairs: list[tuple[Evaluate | Literal, Evaluate | Literal]] = []
        for _, key, value in node.items():
            name = self._expression(key, place) if syntax.is_expression(key) else Literal(key.raw)
            pairs.append((name, self._value(value, place)))
        return ops.map_of_values(pairs)

    def _expression(self, node: Node, place: Place) -> Evaluate | Literal:
        tree = self._parse(node)
        if tree is None:
            return Literal(None)
        lowered = self._lower(tree, node, place)
        return lowered if isinstance(lowered, Literal) else self._compile(lowered, node, place)

    def _parse(self, node: Node) -> Any:
        text = node.value.strip()[2:-1]
        if len(text) > self._limits.expression_characters:
            self._reports.problem(
                f"an expression of {len(text)} characters; the limit is {self._limits.expression_characters}", node
            )
            return None
        try:
            return parse(text)
        except ExpressionError as error:
            self._reports.problem(f"parse error in expression: {error}", node, offset=error.offset + 2 + node.quoted)
            return None

    def _compile(self, tree: Tree, node: Node, place: Place) -> Evaluate:
        def resolve(name: str) -> tuple[int, int] | Literal:
            return place.scope.find(name) or Literal(None)  # `_lower` has reported an unknown name

        def function(name: str) -> Callable[..., Value]:
            return self.library(stdlib.FUNCTIONS[name])

        return Evaluation(resolve, function).compile(tree)

    def library(self, signature: stdlib.Signature) -> Callable[..., Value]:
        """The Python function of a pure or contextual library function."""
        program, name = self._program, signature.name
        if name in ("list.concat", "list.prepend"):
            assert signature.run is not None
            return partial(ops.grow, program, signature.run)
        if signature.run is not None:
            return signature.run

        def contextual(*arguments: Value) -> Value:
            runtime = program.runtime
            assert runtime is not None
            if name == "sys.now":
                return runtime.now()
            if name == "sys.get_env":
                return runtime.get_env(arguments[0], arguments[1] if len(arguments) > 1 else None)
            if name == "uuid.generate":
                return runtime.uuid()
            return runtime.create_callback(arguments[0] if arguments else "POST")

        return contextual

    def calls_subworkflow(self, node: Node) -> bool:
        """True if an expression in the value tree hoists a call."""
        if node.kind == "list":
            return any(map(self.calls_subworkflow, node.value))
        if node.kind == "map":
            return any(self.calls_subworkflow(key) or self.calls_subworkflow(value) for _, key, value in node.items())
        if not syntax.is_expression(node):
            return False
        try:
            return self.has_call(parse(node.value.strip()[2:-1]))
        except ExpressionError:
            return False

    def has_call(self, tree: Tree) -> bool:
        """True if the expression hoists a call: of a subworkflow or of a connector's helper."""
        if isinstance(tree, Call):
            is_hoisted = tree.function in self._routines or tree.function in _HELPERS
            return is_hoisted or any(map(self.has_call, tree.arguments))
        return any(map(self.has_call, _children(tree)))

    def _lower(self, tree: Tree, node: Node, place: Place) -> Tree:
        """Resolve library names, check names and calls, and hoist the calls of subworkflows."""
        if isinstance(tree, Name | Field) and (literal := self._named(tree, node, place)) is not None:
            return literal
        if isinstance(tree, Call):
            return self._lower_call(tree, node, place)
        if isinstance(tree, Logical) and self.has_call(tree.right):
            return self._lower_logical(tree, node, place)
        lower = partial(self._lower, node=node, place=place)
        if isinstance(tree, Field):
            return Field(lower(tree.owner), tree.name, tree.depth)  # type: ignore[arg-type]
        if isinstance(tree, Index):
            return Index(lower(tree.owner), lower(tree.index), tree.depth)  # type: ignore[arg-type]
        if isinstance(tree, Unary):
            return Unary(tree.operator, lower(tree.operand), tree.depth)  # type: ignore[arg-type]
        if isinstance(tree, Binary):
            return Binary(tree.operator, lower(tree.left), lower(tree.right), tree.depth)  # type: ignore[arg-type]
        if isinstance(tree, Logical):
            return Logical(tree.operator, lower(tree.left), lower(tree.right), tree.depth)  # type: ignore[arg-type]
        if isinstance(tree, ListOf):
            return ListOf(tuple(lower(item) for item in tree.items), tree.depth)  # type: ignore[misc]
        return tree

    def _named(self, tree: Name | Field, node: Node, place: Place) -> Tree | None:
        """The literal behind a name that is not a variable: a library constant, a function, a subworkflow.

        None if the name is a variable or a field of a value. Reports an unknown name.
        """
        path = dotted(tree)
        if path is None:
            return None
        root = path.split(".")[0]
        if place.scope.find(root) is not None:
            return None
        if path in stdlib.CONSTANTS:
            return Literal(stdlib.CONSTANTS[path])
        if path in stdlib.FUNCTIONS or path in self._routines:
            return Literal(Function(path))
        if isinstance(tree, Name) or root not in stdlib.MODULES:
            self._reports.problem(f"symbol '{root}' is neither a variable nor a sub-workflow name", node)
            return Literal(None)
        if path.count(".") == 1:
            self._reports.problem(f"symbol '{path}' is not a function of the standard library", node)
            return Literal(None)
        return None

    def _lower_call(self, tree: Call, node: Node, place: Place) -> Tree:
        arguments = tuple(self._lower(argument, node, place) for argument in tree.arguments)
        if tree.function in self._routines:
            return self._hoist(tree.function, arguments, node, place)
        if tree.function in _HELPERS:
            return self._hoist_helper(tree.function, arguments, node, place)
        signature = stdlib.FUNCTIONS.get(tree.function)
        if signature is None:
            if tree.function.startswith("googleapis."):
                self._reports.problem(
                    f"{tree.function} blocks and cannot be used in an expression; use a call step", node
                )
            else:
                self._reports.problem(f"symbol '{tree.function}' is neither a function nor a sub-workflow name", node)
            return Literal(None)
        if signature.style == "blocking":
            self._reports.problem(f"{tree.function} blocks and cannot be used in an expression; use a call step", node)
        required = sum(default is stdlib.REQUIRED for default in signature.parameters.values())
        if not required <= len(arguments) <= len(signature.parameters):
            most = len(signature.parameters)
            count = f"{required}" if required == most else f"{required} to {most}"
            self._reports.problem(f"{tree.function} takes {count} arguments; got {len(arguments)}", node)
            return Literal(None)
        if tree.function == "math.floor":
            self._reports.problem("math.floor is not documented everywhere; // and int() are", node, severity="warning")
        return Call(tree.function, arguments, tree.depth)  # type: ignore[arg-type]

    def _hoist(self, name: str, arguments: tuple[Tree, ...], node: Node, place: Place) -> Tree:
        """Call a subworkflow before the expression; returns the slot of the result."""
        callee = self._codes[name]
        if len(arguments) > len(callee.parameters):
            self._reports.problem(f"{name} takes {len(callee.parameters)} arguments; got {len(arguments)}", node)
        for parameter, _, default in callee.parameters[len(arguments) :]:
            if default is stdlib.REQUIRED:
                self._reports.problem(f"{name} needs argument '{parameter}'", node)
        slot = new_slot(self.emitter.code, f"#{place.path}/{name}")
        given = {
            parameter: self._compile(argument, node, place)
            for (parameter, _, _), argument in zip(callee.parameters, arguments, strict=False)
        }
        here = Label()
        self.emitter.emit(
            f"{place.path}#call-{name}",
            lambda: ops.call_op(callee, given, self.memory()),
            lambda: partial(ops.answer, slot, here.pc),
        )
        self.emitter.place(here)
        return Slot(slot)

    def _hoist_helper(self, name: str, arguments: tuple[Tree, ...], node: Node, place: Place) -> Tree:
        """Wait for a connector's helper before the expression: official samples call helpers in expressions."""
        slot, here = new_slot(self.emitter.code, f"#{place.path}/{name}"), Label()
        given = [self._compile(argument, node, place) for argument in arguments]
        names = _HELPERS[name][: len(given)]
        self.emitter.emit(
            f"{place.path}#call-{name}",
            lambda: (
                lambda slots: WaitSignal(name, {key: value(slots) for key, value in zip(names, given, strict=True)})
            ),
            lambda: partial(ops.answer, slot, here.pc),
        )
        self.emitter.place(here)
        return Slot(slot)

    def _lower_logical(self, tree: Logical, node: Node, place: Place) -> Tree:
        """`and`/`or` whose right side calls a subworkflow: the left side may decide, and then no call happens."""
        slot = new_slot(self.emitter.code, f"#{place.path}/{tree.operator}")
        left = self._compile(self._lower(tree.left, node, place), node, place)
        right_label, done = Label(), Label()
        emitter, operator = self.emitter, tree.operator
        emitter.emit(
            f"{place.path}#{operator}", lambda: partial(ops.logical_op, left, operator, slot, right_label.pc, done.pc)
        )
        emitter.place(right_label)
        right = self._compile(self._lower(tree.right, node, place), node, place)
        emitter.emit(f"{place.path}#{operator}-right", lambda: partial(ops.operand_op, right, operator, slot, done.pc))
        emitter.place(done)
        return Slot(slot)


def _children(tree: Tree) -> tuple[Tree, ...]:
    if isinstance(tree, Field):
        return (tree.owner,)
    if isinstance(tree, Index):
        return (tree.owner, tree.index)
    if isinstance(tree, Unary):
        return (tree.operand,)
    if isinstance(tree, Binary | Logical):
        return (tree.left, tree.right)
    return tree.items if isinstance(tree, ListOf) else ()
