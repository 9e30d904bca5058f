"""Source to a `Program`: names resolved, expressions compiled, every step an instruction or a few.

Two passes over the steps. `Declarations` finds which scope every assigned name belongs to (in the order of the text);
`_Compiler` then emits code. Both collect problems with positions; any error refuses the deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import decisions
from ..errors import DeployError, Problem
from ..limits import Limits
from ..values import Function, Value
from . import instructions as ops
from . import stdlib, syntax
from .declarations import Declarations
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
from .program import Code, Evaluate, ForkSignal, Mark, Program, Resume, ReturnSignal, Slots, WaitSignal
from .reader import Reader
from .scopes import Scope, new_slot
from .source import Node, load


def compile_source(text: str, limits: Limits) -> tuple[Program, list[Problem]]:
    """The program and its warnings. Raises DeployError with every problem found."""
    root = load(text, max_bytes=limits.source_bytes, max_nodes=limits.nodes)
    reader = Reader(limits)
    routines = reader.read(root)
    compiler = _Compiler(routines, limits, reader.problems)
    program = compiler.compile()
    errors = [problem for problem in compiler.problems if problem.severity == "error"]
    if errors:
        raise DeployError(sorted(errors, key=lambda problem: (problem.line, problem.column)))
    return program, compiler.problems


_GKE = ("gke.request", "gke.create_job", "gke.await_job", "gke.delete_job")
_VERSIONS = "googleapis.secretmanager.v1.projects.secrets.versions"
_HELPERS = {
    f"{_VERSIONS}.accessString": ("secret_id", "version", "project_id"),
    "googleapis.secretmanager.v1.projects.secrets.addVersionString": ("secret_id", "data", "project_id"),
}


@dataclass(frozen=True)
class _Jumps:
    """Where `next` may go from here: the steps of this list, then those of the lists around it."""

    names: Mapping[str, Label]
    outer: _Jumps | None
    end: Label
    break_: Label | None = None
    continue_: Label | None = None

    def find(self, name: str) -> Label | None:
        jumps: _Jumps | None = self
        while jumps is not None:
            if name in jumps.names:
                return jumps.names[name]
            jumps = jumps.outer
        return None


@dataclass(frozen=True)
class _Place:
    """What surrounds the code being emitted."""

    scope: Scope
    jumps: _Jumps
    step: str
    path: str
    mark: int
    in_branch: bool = False


class _Compiler:
    def __init__(self, routines: dict[str, syntax.Routine], limits: Limits, problems: list[Problem]) -> None:
        self.problems = problems
        self._routines = routines
        self._limits = limits
        self._codes = {name: Code(name, name) for name in routines}
        self._marks = [Mark("", "", "", 0, 0, 0, 0, 0)]
        self._program = Program(self._codes, self._marks)
        self._declarations = Declarations(self._codes, self._declaration_problem)
        self._emitter = Emitter(Code("", ""))
        self._what = ""
        self._in_step = ""

    def compile(self) -> Program:
        for routine in self._routines.values():
            self._declarations.routine(routine)
        for routine in self._routines.values():
            self._parameters(routine)
        for routine in self._routines.values():
            self._routine(routine)
        return self._program

    # Problems

    def _declaration_problem(self, message: str, node: Node, step: str) -> None:
        self.problems.append(Problem(message, node.line, node.column, step))

    def _problem(self, message: str, node: Node, offset: int = 0, severity: str = "error") -> None:
        message = f"{self._what}: {message}" if self._what else message
        self.problems.append(Problem(message, node.line, node.column + offset, self._in_step, severity))

    # Routines and steps

    def _parameters(self, routine: syntax.Routine) -> None:
        scope = self._declarations.scopes[id(routine)]
        place = _Place(Scope(Code("", ""), ""), _Jumps({}, None, Label()), "", "", 0)
        self._in_step, self._what = "", f"error evaluating the default of a parameter of {routine.name}"
        for name, node in routine.parameters:
            default: Any = stdlib.REQUIRED
            if node is not None:
                default = self._evaluate(node, place)
            elif routine.name == "main":
                default = constant(None)
            scope.code.parameters.append((name, scope.names[name], default))
        self._what = ""

    def _routine(self, routine: syntax.Routine) -> None:
        scope = self._declarations.scopes[id(routine)]
        end = Label()
        place = _Place(scope, _Jumps({}, None, end), "", routine.name, 0)
        self._body(scope.code, routine.steps, place, end)

    def _body(self, code: Code, steps: list[syntax.Step], place: _Place, end: Label) -> None:
        """Compile the steps into `code`, which returns null where they end."""
        outer, self._emitter = self._emitter, Emitter(code)
        self._steps(steps, place, end)
        self._emitter.place(end)
        self._emitter.emit("end", lambda: lambda slots: ReturnSignal(None))
        self._emitter.finish()
        self._emitter = outer

    def _steps(self, steps: list[syntax.Step], place: _Place, after: Label) -> None:
        labels = [Label() for _ in steps]
        names = {step.name: label for step, label in zip(steps, labels, strict=True) if step.name}
        jumps = place.jumps
        if names:
            jumps = _Jumps(names, jumps, jumps.end, jumps.break_, jumps.continue_)
        for index, step in enumerate(steps):
            following = labels[index + 1] if index + 1 < len(steps) else after
            self._emitter.place(labels[index])
            self._step(step, place, jumps, following)
        if not steps:
            self._goto(place, "empty", after)

    def _step(self, step: syntax.Step, place: _Place, jumps: _Jumps, following: Label) -> None:
        name = step.name or place.step
        path = f"{place.path}/{step.name}" if step.name else place.path
        place = _Place(place.scope, jumps, name, path, place.mark, place.in_branch)
        outer, self._in_step = self._in_step, name
        after = self._jump(step, jumps) or following
        compile_action = _ACTIONS.get(type(step.action))
        if compile_action is None:
            self._begin(place, step, "GOTO")
            self._goto(place, "next", after)
        else:
            compile_action(self, step, step.action, place, after)
        self._in_step = outer

    def _jump(self, step: syntax.Step, jumps: _Jumps) -> Label | None:
        name, node = step.next, step.next_node
        if name is None or node is None:
            return None
        special = {"end": jumps.end, "break": jumps.break_, "continue": jumps.continue_}
        label = special[name] if name in special else jumps.find(name)
        if label is None:
            reason = "is only possible in a loop" if name in special else "names no step of this list or one around it"
            self._problem(f"'next: {name}' {reason}", node)
        return label

    def _begin(self, place: _Place, step: syntax.Step, type_: str, cost: int = 1) -> _Place:
        """Note that the next instruction begins a step; the place inside that step."""
        code = self._emitter.code
        node = step.node
        mark = Mark(code.routine, place.step, f"STEP_{type_}", place.mark, node.line, node.column, len(node.raw), cost)
        self._marks.append(mark)
        number = len(self._marks) - 1
        self._emitter.mark(number)
        return _Place(place.scope, place.jumps, place.step, place.path, number, place.in_branch)

    def _goto(self, place: _Place, label: str, to: Label) -> None:
        self._emitter.emit(f"{place.path}#{label}", lambda: partial(ops.always, to.pc))

    def _pass(self, label: str) -> None:
        """An instruction that only carries a mark."""
        following = Label()
        self._emitter.emit(label, lambda: partial(ops.always, following.pc))
        self._emitter.place(following)

    # Steps by kind

    def _assign(self, step: syntax.Step, action: syntax.Assign, place: _Place, after: Label) -> None:
        self._begin(place, step, "ASSIGN", len(action.items))
        setters: list[ops.Setter] = []
        self._what = "error evaluating assignment"
        for target, key, value in action.items:
            if self._calls_subworkflow(value) or any(map(self._has_call, target.path)):
                setters = self._flush(place, setters)
            setters.append(self._setter(target, key, self._evaluate(value, place), place))
        self._what = ""
        check = self._check()
        self._emitter.emit(f"{place.path}#assign", lambda: ops.assign_op(setters, check, after.pc))

    def _flush(self, place: _Place, setters: list[ops.Setter]) -> list[ops.Setter]:
        if setters:
            here, check, done = Label(), self._check(), list(setters)
            self._emitter.emit(f"{place.path}#assign", lambda: ops.assign_op(done, check, here.pc))
            self._emitter.place(here)
        return []

    def _setter(self, target: Target, node: Node, value: Evaluate, place: _Place) -> ops.Setter:
        path = [self._compile(self._lower(tree, node, place), node, place) for tree in target.path]
        depth, slot = place.scope.find(target.name) or (0, 0)
        return ops.Setter(depth, slot, target.name, path, value)

    def _call(self, step: syntax.Step, action: syntax.Call, place: _Place, after: Label) -> None:
        self._begin(place, step, "CALL")
        self._what = "error evaluating call arguments"
        self._name_arguments(action)
        if action.function in self._routines:
            self._call_subworkflow(action, place, after)
        elif (signature := stdlib.FUNCTIONS.get(action.function)) is not None:
            self._call_library(signature, action, place, after)
        elif action.function in _GKE or (action.function.startswith("googleapis.") and action.function.count(".") >= 3):
            arguments = self._arguments(action, place)
            self._wait(action, lambda slots: {name: value(slots) for name, value in arguments}, place, after)
        else:
            self._what = ""
            self._problem(f"symbol '{action.function}' is neither a function nor a sub-workflow name", action.node)
        self._what = ""

    def _name_arguments(self, action: syntax.Call) -> None:
        """Give a list of arguments the names of the callee's parameters, in their order."""
        if not action.positional:
            return
        if action.function in self._routines:
            names = [name for name, _, _ in self._codes[action.function].parameters]
        elif (signature := stdlib.FUNCTIONS.get(action.function)) is not None:
            names = list(signature.parameters)
        else:
            self._problem(f"{action.function} needs its arguments by name", action.positional[0])
            return
        if len(action.positional) > len(names):
            self._problem(
                f"{action.function} takes {len(names)} arguments; got {len(action.positional)}", action.positional[0]
            )
        action.arguments = dict(zip(names, action.positional, strict=False))

    def _arguments(self, action: syntax.Call, place: _Place) -> list[tuple[str, Evaluate]]:
        return [(name, self._evaluate(node, place)) for name, node in action.arguments.items()]

    def _call_subworkflow(self, action: syntax.Call, place: _Place, after: Label) -> None:
        callee = self._codes[action.function]
        given = dict(self._arguments(action, place))
        self._match_arguments(action, {name: default for name, _, default in callee.parameters})
        result = self._store_result(action, place, after)
        self._emitter.emit(f"{place.path}#call", lambda: ops.call_op(callee, given, self._check()), lambda: result())

    def _match_arguments(self, action: syntax.Call, parameters: Mapping[str, Any]) -> None:
        for name, node in action.arguments.items():
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                self._problem(f"{action.function} has no parameter '{name}'; it has: {known}", node)
        for name, default in parameters.items():
            if default is stdlib.REQUIRED and name not in action.arguments:
                self._problem(f"{action.function} needs argument '{name}'", action.node)

    def _call_library(self, signature: stdlib.Signature, action: syntax.Call, place: _Place, after: Label) -> None:
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
            function = self._library(signature)
            ordered = [
                arguments.get(name, constant(None if default is stdlib.REQUIRED else default))
                for name, default in signature.parameters.items()
            ]
            run = lambda slots: function(*[value(slots) for value in ordered])  # noqa: E731
        self._emitter.emit(f"{place.path}#call", lambda: ops.store_op(run, result()))

    def _wait(
        self, action: syntax.Call, arguments: Callable[[Slots], dict[str, Value]], place: _Place, after: Label
    ) -> None:
        result = self._store_result(action, place, after)
        function = action.function
        self._emitter.emit(
            f"{place.path}#wait", lambda: lambda slots: WaitSignal(function, arguments(slots)), lambda: result()
        )

    def _store_result(self, action: syntax.Call, place: _Place, after: Label) -> Callable[[], Resume]:
        check = self._check()
        if action.result is None:
            return lambda: partial(ops.ignore_result, after.pc)
        setter = self._setter(action.result, action.node, constant(None), place)
        return lambda: ops.result_setter(setter, check, after.pc)

    def _switch(self, step: syntax.Step, action: syntax.Switch, place: _Place, after: Label) -> None:
        inside = self._begin(place, step, "SWITCH")
        for index, (condition, body) in enumerate(action.conditions):
            self._emitter.owner = inside.mark
            self._what = "error evaluating condition"
            test = self._evaluate(condition, place)
            self._what = ""
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

    def _nested(self, step: syntax.Step, action: syntax.Steps, place: _Place, after: Label) -> None:
        self._steps(action.steps, place, after)

    def _raise(self, step: syntax.Step, action: syntax.Raise, place: _Place, after: Label) -> None:
        self._begin(place, step, "RAISE")
        self._what = "error evaluating raise value"
        value = self._evaluate(action.value, place)
        self._what = ""
        self._emitter.emit(f"{place.path}#raise", lambda: partial(ops.raise_op, value))

    def _return(self, step: syntax.Step, action: syntax.Return, place: _Place, after: Label) -> None:
        self._begin(place, step, "RETURN")
        if place.in_branch and decisions.RETURN_IN_BRANCH_IS_REFUSED:
            self._problem("'return' cannot be used inside a parallel step", step.node)
        self._what = "error evaluating return value"
        value = self._evaluate(action.value, place)
        self._what = ""
        self._emitter.emit(f"{place.path}#return", lambda: lambda slots: ReturnSignal(value(slots)))

    def _for(self, step: syntax.Step, action: syntax.For, place: _Place, after: Label) -> None:
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
        jumps = _Jumps({}, None, place.jumps.end, after, advance)
        self._steps(
            action.steps, _Place(scope, jumps, place.step, place.path, iteration.mark, place.in_branch), advance
        )

    def _items(self, loop: syntax.For, place: _Place) -> Evaluate:
        """What a loop runs over: a list, or a range as [first, count]."""
        self._what = "error evaluating the loop's values"
        try:
            if loop.in_ is not None:
                return partial(ops.list_of, self._evaluate(loop.in_, place))
            if isinstance(loop.range, tuple):
                first, last = (self._evaluate(node, place) for node in loop.range)
                return lambda slots: ops.range_of([first(slots), last(slots)])
            if loop.range is not None:
                both = self._evaluate(loop.range, place)
                return lambda slots: ops.range_of(both(slots))
            return constant([])
        finally:
            self._what = ""

    def _parallel(self, step: syntax.Step, action: syntax.Parallel, place: _Place, after: Label) -> None:
        inside = self._begin(place, step, "PARALLEL_FOR" if action.loop else "PARALLEL_BRANCH")
        self._what = "error evaluating concurrency_limit"
        limit = self._evaluate(action.limit, place) if action.limit is not None else constant(None)
        self._what = ""
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
            entry = _Place(place.scope, place.jumps, name, code.key, inside.mark, True)
            self._branch(syntax.Step(name, node, None), steps, scope, entry, "PARALLEL_BRANCH_ENTRY", is_loop=False)

    def _branch(
        self, step: syntax.Step, steps: list[syntax.Step], scope: Scope, place: _Place, type_: str, *, is_loop: bool
    ) -> None:
        outer, self._emitter = self._emitter, Emitter(scope.code)
        inside = self._begin(place, step, type_, 0)
        end = Label()
        self._pass("start")
        jumps = _Jumps({}, None, end, None, end if is_loop else None)
        self._steps(steps, _Place(scope, jumps, place.step, scope.code.key, inside.mark, True), end)
        self._emitter.place(end)
        self._emitter.emit("end", lambda: lambda slots: ReturnSignal(None))
        self._emitter.finish()
        self._emitter = outer

    def _try(self, step: syntax.Step, action: syntax.Try, place: _Place, after: Label) -> None:
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
        self, step: syntax.Step, retry: syntax.Retry, place: _Place, body: Label, attempt: int, error: int
    ) -> None:
        emitter, code = self._emitter, self._emitter.code
        policy, answer = new_slot(code, f"#{place.path}/policy"), new_slot(code, f"#{place.path}/answer")
        ask, decide, give_up = Label(), Label(), Label()
        self._what = "error evaluating retry policy"
        parts = {
            name: self._evaluate(node, place)
            for name in ("policy", "predicate", "max_retries", "backoff", "initial_delay", "max_delay", "multiplier")
            if (node := getattr(retry, name)) is not None
        }
        self._what = ""
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

    def _except(self, step: syntax.Step, handler: syntax.Except, place: _Place, error: int, after: Label) -> None:
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
            handler.steps, _Place(scope, place.jumps, place.step, place.path, inside.mark, place.in_branch), after
        )

    # Values and expressions

    def _check(self) -> Callable[[Value], None]:
        program = self._program

        def check(value: Value) -> None:
            assert program.runtime is not None
            program.runtime.sizer.check(value)

        return check

    def _evaluate(self, node: Node, place: _Place) -> Evaluate:
        compiled = self._value(node, place)
        return constant(compiled.value) if isinstance(compiled, Literal) else compiled

    def _value(self, node: Node, place: _Place) -> Evaluate | Literal:
        """A value tree with expressions inside: a constant when it has none."""
        if node.kind == "scalar":
            if syntax.is_expression(node):
                return self._expression(node, place)
            if type(node.value) is str and "${" in node.value:
                self._problem(
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

    def _expression(self, node: Node, place: _Place) -> Evaluate | Literal:
        tree = self._parse(node)
        if tree is None:
            return Literal(None)
        lowered = self._lower(tree, node, place)
        return lowered if isinstance(lowered, Literal) else self._compile(lowered, node, place)

    def _parse(self, node: Node) -> Any:
        text = node.value.strip()[2:-1]
        if len(text) > self._limits.expression_characters:
            self._problem(
                f"an expression of {len(text)} characters; the limit is {self._limits.expression_characters}", node
            )
            return None
        try:
            return parse(text)
        except ExpressionError as error:
            self._problem(f"parse error in expression: {error}", node, error.offset + 2 + node.quoted)
            return None

    def _compile(self, tree: Tree, node: Node, place: _Place) -> Evaluate:
        def resolve(name: str) -> tuple[int, int] | Literal:
            return place.scope.find(name) or Literal(None)  # _lower has reported a name that is not there

        def function(name: str, count: int) -> Callable[..., Value]:
            return self._library(stdlib.FUNCTIONS[name])

        return Evaluation(resolve, function).compile(tree)

    def _library(self, signature: stdlib.Signature) -> Callable[..., Value]:
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

    def _calls_subworkflow(self, node: Node) -> bool:
        if node.kind == "list":
            return any(map(self._calls_subworkflow, node.value))
        if node.kind == "map":
            return any(self._calls_subworkflow(key) or self._calls_subworkflow(value) for _, key, value in node.items())
        if not syntax.is_expression(node):
            return False
        try:
            return self._has_call(parse(node.value.strip()[2:-1]))
        except ExpressionError:
            return False

    def _has_call(self, tree: Tree) -> bool:
        if isinstance(tree, Call):
            hoisted = tree.function in self._routines or tree.function in _HELPERS
            return hoisted or any(map(self._has_call, tree.arguments))
        return any(map(self._has_call, _children(tree)))

    def _lower(self, tree: Tree, node: Node, place: _Place) -> Tree:
        """Resolve what is no variable, check names and calls, and move subworkflow calls in front of the expression."""
        if isinstance(tree, Name | Field) and (known := self._named(tree, node, place)) is not None:
            return known
        if isinstance(tree, Call):
            return self._lower_call(tree, node, place)
        if isinstance(tree, Logical) and self._has_call(tree.right):
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

    def _named(self, tree: Name | Field, node: Node, place: _Place) -> Tree | None:
        """A name or dotted name that is no variable: a library constant, a function, a subworkflow, or a mistake."""
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
            self._problem(f"symbol '{root}' is neither a variable nor a sub-workflow name", node)
            return Literal(None)
        if path.count(".") == 1:
            self._problem(f"symbol '{path}' is not a function of the standard library", node)
            return Literal(None)
        return None

    def _lower_call(self, tree: Call, node: Node, place: _Place) -> Tree:
        arguments = tuple(self._lower(argument, node, place) for argument in tree.arguments)
        if tree.function in self._routines:
            return self._hoist(tree.function, arguments, node, place)
        if tree.function in _HELPERS:
            return self._hoist_helper(tree.function, arguments, node, place)
        signature = stdlib.FUNCTIONS.get(tree.function)
        if signature is None:
            if tree.function.startswith("googleapis."):
                self._problem(f"{tree.function} blocks and cannot be used in an expression; use a call step", node)
            else:
                self._problem(f"symbol '{tree.function}' is neither a function nor a sub-workflow name", node)
            return Literal(None)
        if signature.style == "blocking":
            self._problem(f"{tree.function} blocks and cannot be used in an expression; use a call step", node)
        required = sum(default is stdlib.REQUIRED for default in signature.parameters.values())
        if not required <= len(arguments) <= len(signature.parameters):
            wanted = (
                f"{required}" if required == len(signature.parameters) else f"{required} to {len(signature.parameters)}"
            )
            self._problem(f"{tree.function} takes {wanted} arguments; got {len(arguments)}", node)
            return Literal(None)
        if tree.function == "math.floor":
            self._problem("math.floor is not documented everywhere; // and int() are", node, severity="warning")
        return Call(tree.function, arguments, tree.depth)  # type: ignore[arg-type]

    def _hoist(self, name: str, arguments: tuple[Tree, ...], node: Node, place: _Place) -> Tree:
        """Call a subworkflow before the expression, which then reads the result from a slot."""
        callee = self._codes[name]
        if len(arguments) > len(callee.parameters):
            self._problem(f"{name} takes {len(callee.parameters)} arguments; got {len(arguments)}", node)
        for parameter, _, default in callee.parameters[len(arguments) :]:
            if default is stdlib.REQUIRED:
                self._problem(f"{name} needs argument '{parameter}'", node)
        slot = new_slot(self._emitter.code, f"#{place.path}/{name}")
        given = {
            parameter: self._compile(argument, node, place)
            for (parameter, _, _), argument in zip(callee.parameters, arguments, strict=False)
        }
        here = Label()
        self._emitter.emit(
            f"{place.path}#call-{name}",
            lambda: ops.call_op(callee, given, self._check()),
            lambda: partial(ops.answer, slot, here.pc),
        )
        self._emitter.place(here)
        return Slot(slot)

    def _hoist_helper(self, name: str, arguments: tuple[Tree, ...], node: Node, place: _Place) -> Tree:
        """Wait for a connector's helper before the expression; official samples call these in expressions."""
        slot, here = new_slot(self._emitter.code, f"#{place.path}/{name}"), Label()
        given = [self._compile(argument, node, place) for argument in arguments]
        names = _HELPERS[name][: len(given)]
        self._emitter.emit(
            f"{place.path}#call-{name}",
            lambda: (
                lambda slots: WaitSignal(name, {key: value(slots) for key, value in zip(names, given, strict=True)})
            ),
            lambda: partial(ops.answer, slot, here.pc),
        )
        self._emitter.place(here)
        return Slot(slot)

    def _lower_logical(self, tree: Logical, node: Node, place: _Place) -> Tree:
        """`and`/`or` whose right side calls a subworkflow: not called when the left side decides."""
        slot = new_slot(self._emitter.code, f"#{place.path}/{tree.operator}")
        left = self._compile(self._lower(tree.left, node, place), node, place)
        right_label, done = Label(), Label()
        emitter, operator = self._emitter, tree.operator
        emitter.emit(
            f"{place.path}#{operator}", lambda: partial(ops.logical_op, left, operator, slot, right_label.pc, done.pc)
        )
        emitter.place(right_label)
        right = self._compile(self._lower(tree.right, node, place), node, place)
        emitter.emit(f"{place.path}#{operator}-right", lambda: partial(ops.operand_op, right, operator, slot, done.pc))
        emitter.place(done)
        return Slot(slot)


_ACTIONS: dict[Any, Callable[..., None]] = {
    syntax.Assign: _Compiler._assign,
    syntax.Call: _Compiler._call,
    syntax.Switch: _Compiler._switch,
    syntax.For: _Compiler._for,
    syntax.Parallel: _Compiler._parallel,
    syntax.Try: _Compiler._try,
    syntax.Raise: _Compiler._raise,
    syntax.Return: _Compiler._return,
    syntax.Steps: _Compiler._nested,
}


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
