"""Compiles a source to a `Program`: resolves names, compiles expressions, turns every step into instructions.

The compiler passes twice over the steps. `Declarations` finds the scope of every assigned name, in the order of the
text; `_StepCompiler` then emits code. Both collect problems with their positions; any error refuses the deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from .. import decisions
from ..errors import DeployError, Problem
from ..limits import Limits
from ..values import Value
from . import instructions as ops
from . import stdlib, syntax
from .declarations import Declarations
from .emitter import Emitter, Label
from .evaluation import constant
from .expression_compiler import ExpressionCompiler
from .places import Jumps, Place
from .program import Code, Evaluate, ForkSignal, Mark, Program, Resume, ReturnSignal, Slots, WaitSignal
from .reader import Reader
from .reports import Reports
from .scopes import Scope, new_slot
from .source import load

_GKE = ("gke.request", "gke.create_job", "gke.await_job", "gke.delete_job")


def compile_source(text: str, limits: Limits) -> tuple[Program, list[Problem]]:
    """The program and its warnings. Raises DeployError with every problem in the source."""
    root = load(text, max_bytes=limits.source_bytes, max_nodes=limits.nodes)
    reader = Reader(limits)
    routines = reader.read(root)
    reports = Reports(reader.problems)
    program = _StepCompiler(routines, limits, reports).compile()
    errors = [problem for problem in reports.problems if problem.severity == "error"]
    if errors:
        raise DeployError(sorted(errors, key=lambda problem: (problem.line, problem.column)))
    return program, reports.problems


class _StepCompiler:
    """Emits the code of every routine's steps."""

    def __init__(self, routines: dict[str, syntax.Routine], limits: Limits, reports: Reports) -> None:
        self._reports = reports
        self._routines = routines
        self._codes = {name: Code(name, name) for name in routines}
        self._marks = [Mark("", "", "", 0, 0, 0, 0, 0)]
        self._program = Program(self._codes, self._marks)
        self._declarations = Declarations(self._codes, reports.step_problem)
        self._expressions = ExpressionCompiler(self._program, routines, limits, reports)

    def compile(self) -> Program:
        for routine in self._routines.values():
            self._declarations.routine(routine)
        for routine in self._routines.values():
            self._parameters(routine)
        for routine in self._routines.values():
            self._routine(routine)
        return self._program

    @property
    def _emitter(self) -> Emitter:
        return self._expressions.emitter

    # Routines and steps

    def _parameters(self, routine: syntax.Routine) -> None:
        scope = self._declarations.scopes[id(routine)]
        place = Place(Scope(Code("", ""), ""), Jumps({}, None, Label()), "", "", 0)
        with self._reports.activity(f"error evaluating the default of a parameter of {routine.name}"):
            for name, node in routine.parameters:
                default: Any = stdlib.REQUIRED
                if node is not None:
                    default = self._expressions.evaluate(node, place)
                elif routine.name == "main":
                    default = constant(None)
                scope.code.parameters.append((name, scope.names[name], default))

    def _routine(self, routine: syntax.Routine) -> None:
        scope = self._declarations.scopes[id(routine)]
        end = Label()
        place = Place(scope, Jumps({}, None, end), "", routine.name, 0)
        self._body(scope.code, routine.steps, place, end)

    def _body(self, code: Code, steps: list[syntax.Step], place: Place, end: Label) -> None:
        """Compile the steps into `code`, which returns null after the last of them."""
        with self._code(code):
            self._steps(steps, place, end)
            self._finish(end)

    @contextmanager
    def _code(self, code: Code) -> Iterator[None]:
        """Emit instructions into `code`."""
        outer, self._expressions.emitter = self._expressions.emitter, Emitter(code)
        yield
        self._expressions.emitter = outer

    def _finish(self, end: Label) -> None:
        """End the code at `end`: return null, then make the instructions."""
        self._emitter.place(end)
        self._emitter.emit("end", lambda: lambda slots: ReturnSignal(None))
        self._emitter.finish()

    def _steps(self, steps: list[syntax.Step], place: Place, after: Label) -> None:
        labels = [Label() for _ in steps]
        names = {step.name: label for step, label in zip(steps, labels, strict=True) if step.name}
        jumps = place.jumps
        if names:
            jumps = Jumps(names, jumps, jumps.end, jumps.break_, jumps.continue_)
        for index, step in enumerate(steps):
            following = labels[index + 1] if index + 1 < len(steps) else after
            self._emitter.place(labels[index])
            self._step(step, place, jumps, following)
        if not steps:
            self._goto(place, "empty", after)

    def _step(self, step: syntax.Step, place: Place, jumps: Jumps, following: Label) -> None:
        name = step.name or place.step
        path = f"{place.path}/{step.name}" if step.name else place.path
        place = Place(place.scope, jumps, name, path, place.mark, place.in_branch)
        with self._reports.step(name):
            after = self._jump(step, jumps) or following
            compile_action = _ACTIONS.get(type(step.action))
            if compile_action is None:
                self._begin(place, step, "GOTO")
                self._goto(place, "next", after)
            else:
                compile_action(self, step, step.action, place, after)

    def _jump(self, step: syntax.Step, jumps: Jumps) -> Label | None:
        name, node = step.next, step.next_node
        if name is None or node is None:
            return None
        special = {"end": jumps.end, "break": jumps.break_, "continue": jumps.continue_}
        label = special[name] if name in special else jumps.find(name)
        if label is None:
            reason = "is possible only in a loop" if name in special else "names no step of this list or one around it"
            self._reports.problem(f"'next: {name}' {reason}", node)
        return label

    def _begin(self, place: Place, step: syntax.Step, type_: str, cost: int = 1) -> Place:
        """Mark the next instruction as the beginning of a step; returns the place inside that step."""
        code = self._emitter.code
        node = step.node
        mark = Mark(code.routine, place.step, f"STEP_{type_}", place.mark, node.line, node.column, len(node.raw), cost)
        self._marks.append(mark)
        number = len(self._marks) - 1
        self._emitter.mark(number)
        return Place(place.scope, place.jumps, place.step, place.path, number, place.in_branch)

    def _goto(self, place: Place, label: str, to: Label) -> None:
        self._emitter.emit(f"{place.path}#{label}", lambda: partial(ops.always, to.pc))

    def _pass(self, label: str) -> None:
        """An instruction that only carries a mark."""
        following = Label()
        self._emitter.emit(label, lambda: partial(ops.always, following.pc))
        self._emitter.place(following)

    # Steps by kind

    def _assign(self, step: syntax.Step, action: syntax.Assign, place: Place, after: Label) -> None:
        self._begin(place, step, "ASSIGN", len(action.items))
        setters: list[ops.Setter] = []
        with self._reports.activity("error evaluating assignment"):
            for target, key, value in action.items:
                if self._expressions.calls_subworkflow(value) or any(map(self._expressions.has_call, target.path)):
                    setters = self._flush(place, setters)
                setters.append(self._expressions.setter(target, key, self._expressions.evaluate(value, place), place))
        memory = self._expressions.memory()
        self._emitter.emit(f"{place.path}#assign", lambda: ops.assign_op(setters, memory, after.pc))

    def _flush(self, place: Place, setters: list[ops.Setter]) -> list[ops.Setter]:
        if setters:
            here, memory, done = Label(), self._expressions.memory(), list(setters)
            self._emitter.emit(f"{place.path}#assign", lambda: ops.assign_op(done, memory, here.pc))
            self._emitter.place(here)
        return []

    def _call(self, step: syntax.Step, action: syntax.Call, place: Place, after: Label) -> None:
        self._begin(place, step, "CALL")
        with self._reports.activity("error evaluating call arguments"):
            self._name_arguments(action)
            if action.function in self._routines:
                self._call_subworkflow(action, place, after)
            elif (signature := stdlib.FUNCTIONS.get(action.function)) is not None:
                self._call_library(signature, action, place, after)
            elif _is_connector(action.function):
                arguments = self._arguments(action, place)
                self._wait(action, lambda slots: {name: value(slots) for name, value in arguments}, place, after)
            else:
                with self._reports.activity(""):
                    message = f"symbol '{action.function}' is neither a function nor a sub-workflow name"
                    self._reports.problem(message, action.node)

    def _name_arguments(self, action: syntax.Call) -> None:
        """Name positional arguments after the callee's parameters."""
        if not action.positional:
            return
        if action.function in self._routines:
            names = [name for name, _, _ in self._codes[action.function].parameters]
        elif (signature := stdlib.FUNCTIONS.get(action.function)) is not None:
            names = list(signature.parameters)
        else:
            self._reports.problem(f"{action.function} needs its arguments by name", action.positional[0])
            return
        if len(action.positional) > len(names):
            self._reports.problem(
                f"{action.function} takes {len(names)} arguments; got {len(action.positional)}", action.positional[0]
            )
        action.arguments = dict(zip(names, action.positional, strict=False))

    def _arguments(self, action: syntax.Call, place: Place) -> list[tuple[str, Evaluate]]:
        return [(name, self._expressions.evaluate(node, place)) for name, node in action.arguments.items()]

    def _call_subworkflow(self, action: syntax.Call, place: Place, after: Label) -> None:
        callee = self._codes[action.function]
        given = dict(self._arguments(action, place))
        self._match_arguments(action, {name: default for name, _, default in callee.parameters})
        result = self._store_result(action, place, after)
        self._emitter.emit(
            f"{place.path}#call", lambda: ops.call_op(callee, given, self._expressions.memory()), lambda: result()
        )

    def _match_arguments(self, action: syntax.Call, parameters: Mapping[str, Any]) -> None:
        for name, node in action.arguments.items():
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                self._reports.problem(f"{action.function} has no parameter '{name}'; it has: {known}", node)
        for name, default in parameters.items():
            if default is stdlib.REQUIRED and name not in action.arguments:
                self._reports.problem(f"{action.function} needs argument '{name}'", action.node)

    def _call_library(self, signature: stdlib.Signature, action: syntax.Call, place: Place, after: Label) -> None:
        self._match_arguments(action, signature.parameters)
        arguments = dict(self._arguments(action, place))
        if signature.style == "blocking" and signature.name != "sys.log":
            pairs = list(arguments.items())
            self._wait(action, lambda slots: {name: value(slots) for name, value in pairs}, place, after)
            return
        program, result = self._program, self._store_result(action, place, after)
        if signature.name == "sys.log":

            def log(slots: Slots) -> Value:
                assert program.runtime is not None
                program.runtime.log({name: value(slots) for name, value in arguments.items()})
                return None

            run: Evaluate = log
        else:
            function = self._expressions.library(signature)
            ordered = [
                arguments.get(name, constant(None if default is stdlib.REQUIRED else default))
                for name, default in signature.parameters.items()
            ]
            run = lambda slots: function(*[value(slots) for value in ordered])  # noqa: E731
        self._emitter.emit(f"{place.path}#call", lambda: ops.store_op(run, result()))

    def _wait(
        self, action: syntax.Call, arguments: Callable[[Slots], dict[str, Value]], place: Place, after: Label
    ) -> None:
        result = self._store_result(action, place, after)
        function = action.function
        self._emitter.emit(
            f"{place.path}#wait", lambda: lambda slots: WaitSignal(function, arguments(slots)), lambda: result()
        )

    def _store_result(self, action: syntax.Call, place: Place, after: Label) -> Callable[[], Resume]:
        memory = self._expressions.memory()
        if action.result is None:
            return lambda: partial(ops.ignore_result, after.pc)
        setter = self._expressions.setter(action.result, action.node, constant(None), place)
        return lambda: ops.result_setter(setter, memory, after.pc)

    def _switch(self, step: syntax.Step, action: syntax.Switch, place: Place, after: Label) -> None:
        inside = self._begin(place, step, "SWITCH")
        for index, (condition, body) in enumerate(action.conditions):
            self._emitter.owner = inside.mark
            with self._reports.activity("error evaluating condition"):
                test = self._expressions.evaluate(condition, place)
            then, otherwise = Label(), Label()
            self._emitter.emit(f"{place.path}#condition{index}", partial(ops.condition_op, test, then, otherwise))
            self._emitter.place(then)
            if body:
                branch = self._begin(inside, syntax.Step("", condition, None), "CONDITION", 0)
                self._pass(f"{place.path}#then{index}")
                self._steps(body, branch, after)
            else:
                self._goto(place, f"then{index}", after)
            self._emitter.place(otherwise)
        self._goto(place, "otherwise", after)

    def _nested(self, step: syntax.Step, action: syntax.Steps, place: Place, after: Label) -> None:
        self._steps(action.steps, place, after)

    def _raise(self, step: syntax.Step, action: syntax.Raise, place: Place, after: Label) -> None:
        self._begin(place, step, "RAISE")
        with self._reports.activity("error evaluating raise value"):
            value = self._expressions.evaluate(action.value, place)
        self._emitter.emit(f"{place.path}#raise", lambda: partial(ops.raise_op, value))

    def _return(self, step: syntax.Step, action: syntax.Return, place: Place, after: Label) -> None:
        self._begin(place, step, "RETURN")
        if place.in_branch and decisions.RETURN_IN_BRANCH_IS_REFUSED:
            self._reports.problem("'return' cannot be used inside a parallel step", step.node)
        with self._reports.activity("error evaluating return value"):
            value = self._expressions.evaluate(action.value, place)
        self._emitter.emit(f"{place.path}#return", lambda: lambda slots: ReturnSignal(value(slots)))

    def _for(self, step: syntax.Step, action: syntax.For, place: Place, after: Label) -> None:
        inside = self._begin(place, step, "FOR")
        scope = self._declarations.scopes[id(action)]
        code = self._emitter.code
        items, at = new_slot(code, f"#{place.path}/items"), new_slot(code, f"#{place.path}/at")
        value, index = scope.names.get(action.value, 0), scope.names.get(action.index or "", 0)
        evaluate = self._items(action, place)
        advance, body = Label(), Label()
        self._emitter.emit(
            f"{place.path}#for", lambda: ops.for_op(evaluate, items, at, sorted(scope.names.values()), advance.pc)
        )
        iteration = self._begin(inside, step, "FOR_ITERATION", 0)
        self._emitter.place(advance)
        self._emitter.emit(f"{place.path}#iterate", lambda: ops.iterate_op(items, at, value, index, body.pc, after.pc))
        self._emitter.place(body)
        jumps = Jumps({}, None, place.jumps.end, after, advance)
        self._steps(action.steps, Place(scope, jumps, place.step, place.path, iteration.mark, place.in_branch), advance)

    def _items(self, loop: syntax.For, place: Place) -> Evaluate:
        """The values of a loop: a list, or a range as `ops.range_of` returns it."""
        with self._reports.activity("error evaluating the loop's values"):
            if loop.in_ is not None:
                return partial(ops.list_of, self._expressions.evaluate(loop.in_, place))
            if isinstance(loop.range, tuple):
                first, last = (self._expressions.evaluate(node, place) for node in loop.range)
                return lambda slots: ops.range_of([first(slots), last(slots)])
            if loop.range is not None:
                both = self._expressions.evaluate(loop.range, place)
                return lambda slots: ops.range_of(both(slots))
            return constant([])

    def _parallel(self, step: syntax.Step, action: syntax.Parallel, place: Place, after: Label) -> None:
        inside = self._begin(place, step, "PARALLEL_FOR" if action.loop else "PARALLEL_BRANCH")
        with self._reports.activity("error evaluating concurrency_limit"):
            limit = self._expressions.evaluate(action.limit, place) if action.limit is not None else constant(None)
        codes: list[Code] = []
        if action.loop is None:
            count = len(action.branches)
            codes = [self._declarations.scopes[id(node)].code for _, _, node in action.branches]
            fork: Evaluate = lambda slots: ForkSignal(codes, count, ops.limit_of(limit(slots)), None, None)  # noqa: E731
        else:
            items = self._items(action.loop, place)
            scope = self._declarations.scopes[id(action.loop)]
            fork = partial(ops.fork_iterations, scope.code, items, limit)
            scope.code.value_slot = scope.names.get(action.loop.value, 0)
            scope.code.index_slot = scope.names.get(action.loop.index or "", 0)
        self._emitter.emit(f"{place.path}#parallel", lambda: fork, lambda: partial(ops.ignore_result, after.pc))
        if action.loop is not None:
            self._branch(step, action.loop.steps, scope, inside, "FOR_ITERATION", is_loop=True)
        for (name, steps, node), code in zip(action.branches, codes, strict=False):
            scope = self._declarations.scopes[id(node)]
            entry = Place(place.scope, place.jumps, name, code.key, inside.mark, True)
            self._branch(syntax.Step(name, node, None), steps, scope, entry, "PARALLEL_BRANCH_ENTRY", is_loop=False)

    def _branch(
        self, step: syntax.Step, steps: list[syntax.Step], scope: Scope, place: Place, type_: str, *, is_loop: bool
    ) -> None:
        with self._code(scope.code):
            inside = self._begin(place, step, type_, 0)
            end = Label()
            self._pass("start")
            jumps = Jumps({}, None, end, None, end if is_loop else None)
            self._steps(steps, Place(scope, jumps, place.step, scope.code.key, inside.mark, True), end)
            self._finish(end)

    def _try(self, step: syntax.Step, action: syntax.Try, place: Place, after: Label) -> None:
        inside = self._begin(place, step, "TRY_RETRY_EXCEPT", 0)
        emitter, code = self._emitter, self._emitter.code
        attempt, error = new_slot(code, f"#{place.path}/attempt"), new_slot(code, f"#{place.path}/error")
        body, failed = Label(), Label()
        emitter.emit(f"{place.path}#try", lambda: partial(ops.begin_try, attempt, body.pc))
        emitter.place(body)
        attempt_place = self._begin(inside, step, "TRY", 0)
        self._pass(f"{place.path}#attempt")
        outer, emitter.handler = emitter.handler, (failed, error)
        self._steps(action.steps, attempt_place, after)
        emitter.handler = outer
        emitter.owner = inside.mark
        emitter.place(failed)
        if action.retry is not None:
            self._retry(step, action.retry, inside, body, attempt, error)
        if action.handler is not None:
            self._except(step, action.handler, inside, error, after)
        else:
            emitter.owner = inside.mark
            emitter.emit(f"{place.path}#propagate", lambda: partial(ops.propagate, error))

    def _retry(
        self, step: syntax.Step, retry: syntax.Retry, place: Place, body: Label, attempt: int, error: int
    ) -> None:
        emitter, code = self._emitter, self._emitter.code
        policy, answer = new_slot(code, f"#{place.path}/policy"), new_slot(code, f"#{place.path}/answer")
        ask, decide, give_up = Label(), Label(), Label()
        with self._reports.activity("error evaluating retry policy"):
            parts = {
                name: self._expressions.evaluate(node, place)
                for name in (
                    "policy",
                    "predicate",
                    "max_retries",
                    "backoff",
                    "initial_delay",
                    "max_delay",
                    "multiplier",
                )
                if (node := getattr(retry, name)) is not None
            }
        emitter.emit(f"{place.path}#policy", lambda: partial(ops.policy_op, parts, policy, ask.pc))
        emitter.place(ask)
        emitter.emit(
            f"{place.path}#ask",
            lambda: partial(ops.ask_op, self._codes, policy, error, answer, decide.pc),
            lambda: partial(ops.answer, answer, decide.pc),
        )
        emitter.place(decide)
        emitter.emit(
            f"{place.path}#decide",
            lambda: partial(ops.decide_op, policy, answer, attempt, give_up.pc),
            lambda: partial(ops.retry_now, attempt, retrying.pc),
        )
        retrying = Label()
        self._begin(place, step, "RETRY")
        emitter.place(retrying)
        emitter.emit(f"{place.path}#retry", lambda: partial(ops.always, body.pc))
        emitter.place(give_up)

    def _except(self, step: syntax.Step, handler: syntax.Except, place: Place, error: int, after: Label) -> None:
        scope = self._declarations.scopes[id(handler)]
        inside = self._begin(place, step, "EXCEPT", 0)
        variable = scope.names.get(handler.variable or "", 0)
        entered = Label()
        self._emitter.emit(
            f"{place.path}#except",
            lambda: partial(ops.except_op, error, variable, sorted(scope.names.values()), entered.pc),
        )
        self._emitter.place(entered)
        self._steps(
            handler.steps, Place(scope, place.jumps, place.step, place.path, inside.mark, place.in_branch), after
        )


def _is_connector(function: str) -> bool:
    return function in _GKE or (function.startswith("googleapis.") and function.count(".") >= 3)


_ACTIONS: dict[Any, Callable[..., None]] = {
    syntax.Assign: _StepCompiler._assign,
    syntax.Call: _StepCompiler._call,
    syntax.Switch: _StepCompiler._switch,
    syntax.For: _StepCompiler._for,
    syntax.Parallel: _StepCompiler._parallel,
    syntax.Try: _StepCompiler._try,
    syntax.Raise: _StepCompiler._raise,
    syntax.Return: _StepCompiler._return,
    syntax.Steps: _StepCompiler._nested,
}
