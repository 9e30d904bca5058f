"""The compiler's first pass: finds the scope of every assigned name."""

from __future__ import annotations

from collections.abc import Callable

from . import syntax
from .expressions import Target
from .program import Code
from .scopes import Scope
from .source import Node


class Declarations:
    """Declares variables in the order of the text, and reports assignments to variables that are not shared."""

    def __init__(self, codes: dict[str, Code], problem: Callable[..., None]) -> None:
        self.scopes: dict[int, Scope] = {}
        self._codes = codes
        self._problem = problem
        self._loop_variables: dict[int, set[str]] = {}
        # The variables that were first assigned in the tries of the except blocks around the present step.
        self._created_by_try: frozenset[str] = frozenset()
        self._step = ""

    def routine(self, routine: syntax.Routine) -> None:
        scope = Scope(self._codes[routine.name], "")
        self.scopes[id(routine)] = scope
        for name, _ in routine.parameters:
            scope.declare(name)
        self._steps(routine.steps, scope, routine.name)

    def _steps(self, steps: list[syntax.Step], scope: Scope, path: str) -> None:
        for step in steps:
            outer = self._step
            self._step = step.name or outer
            self._step_action(step, scope, f"{path}/{step.name}" if step.name else path)
            self._step = outer

    def _step_action(self, step: syntax.Step, scope: Scope, path: str) -> None:
        action = step.action
        if isinstance(action, syntax.Assign):
            for target, key, _ in action.items:
                self._assigned(target, key, scope)
        elif isinstance(action, syntax.Call):
            if action.result is not None:
                self._assigned(action.result, action.node, scope)
        elif isinstance(action, syntax.Switch):
            for _, body in action.conditions:
                self._steps(body, scope, path)
        elif isinstance(action, syntax.Steps):
            self._steps(action.steps, scope, path)
        elif isinstance(action, syntax.For):
            self._loop(action, Scope(scope.code, path, scope), path)
        elif isinstance(action, syntax.Try):
            self._try(action, scope, path)
        elif isinstance(action, syntax.Parallel):
            self._parallel(action, scope, path)

    def _assigned(self, target: Target, node: Node, scope: Scope) -> None:
        if scope.crosses_unshared(target.name):
            self._problem(
                f"variable '{target.name}' is assigned in a parallel step, but is not in its 'shared' list",
                node,
                self._step,
            )
        elif scope.find(target.name) is None:
            if target.path:
                self._problem(f"symbol '{target.name}' is neither a variable nor a sub-workflow name", node, self._step)
            scope.declare(target.name)
        elif target.name in self._created_by_try:
            message = (
                f"variable '{target.name}' is first assigned in the try; what an except block creates exists only "
                f"there: assign '{target.name}' before the try"
            )
            self._problem(message, node, self._step, severity="warning")

    def _loop(self, loop: syntax.For, scope: Scope, path: str) -> None:
        self.scopes[id(loop)] = scope
        for name in filter(None, (loop.value, loop.index)):
            if self._is_loop_variable(name, scope):
                self._problem(
                    f"loop variable '{name}' is already used by a loop around this one", loop.node, self._step
                )
            scope.declare(name)
        self._loop_variables.setdefault(id(scope), set()).update(filter(None, (loop.value, loop.index)))
        self._steps(loop.steps, scope, path)

    def _is_loop_variable(self, name: str, scope: Scope) -> bool:
        outer: Scope | None = scope
        while outer is not None:
            if name in self._loop_variables.get(id(outer), ()):
                return True
            outer = outer.parent
        return False

    def _try(self, action: syntax.Try, scope: Scope, path: str) -> None:
        known = set(scope.names)
        self._steps(action.steps, scope, path)
        if action.handler is not None:
            outer = self._created_by_try
            self._created_by_try = outer | (scope.names.keys() - known)
            inner = Scope(scope.code, f"{path}/except", scope)
            self.scopes[id(action.handler)] = inner
            if action.handler.variable:
                inner.declare(action.handler.variable)
            self._steps(action.handler.steps, inner, path)
            self._created_by_try = outer

    def _parallel(self, action: syntax.Parallel, scope: Scope, path: str) -> None:
        shared = frozenset(name for name, _ in action.shared)
        for name, node in action.shared:
            if scope.find(name) is None:
                self._problem(f"shared variable '{name}' is not defined before the parallel step", node, self._step)
            elif scope.crosses_unshared(name):
                self._problem(f"variable '{name}' is not shared by the parallel step around this one", node, self._step)
        if action.loop is not None:
            self._loop(action.loop, self._branch(f"{path}/for", scope, shared), f"{path}/for")
        for name, steps, node in action.branches:
            inner = self._branch(f"{path}/{name}", scope, shared)
            self.scopes[id(node)] = inner
            self._steps(steps, inner, f"{path}/{name}")

    def _branch(self, key: str, scope: Scope, shared: frozenset[str]) -> Scope:
        unique, number = key, 2
        while unique in self._codes:
            unique, number = f"{key}~{number}", number + 1
        self._codes[unique] = Code(unique, scope.code.routine)
        return Scope(self._codes[unique], "", scope, True, shared)
