"""The instructions of compiled steps. Functions take the frame's slots last, so that `partial` makes instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import decisions
from ..errors import WorkflowError, system_error
from ..values import UNSET, Function, Value, kind, to_json
from . import stdlib
from .emitter import Label
from .evaluation import constant, needs_check, unassigned
from .expressions import Literal
from .operators import truth
from .program import CallSignal, Code, Evaluate, ForkSignal, Op, Program, Resume, Slots, WaitSignal


def always(to: int, slots: Slots) -> int:
    return to


@dataclass(frozen=True)
class Setter:
    """An assignment: the variable `depth` parallel boundaries up, the path into its value, the value to assign."""

    depth: int
    slot: int
    name: str
    path: list[Evaluate]
    value: Evaluate

    def put(self, slots: Slots, value: Value) -> None:
        home = slots
        for _ in range(self.depth):
            home = home[0]
        if self.path:
            old = home[self.slot]
            if old is UNSET:
                raise unassigned(self.name)
            value = with_change(old, [key(slots) for key in self.path], 0, value)
        home[self.slot] = value


def with_change(owner: Value, path: list[Value], at: int, value: Value) -> Value:
    """A copy of `owner` with `value` at the path; the copy shares the parts that are not on the path."""
    key, last = path[at], at == len(path) - 1
    if type(owner) is dict:
        if type(key) is not str:
            raise system_error("TypeError", f"map key must be a string; got: {kind(key)}")
        inner = owner.get(key, {} if decisions.CREATE_INTERMEDIATE_MAPS else None)
    elif type(owner) is list:
        if type(key) is not int:
            raise system_error("TypeError", f"list index must be an integer; got: {kind(key)}")
        if not 0 <= key < len(owner):
            raise system_error("IndexError", f"index out of range [{key}] with length {len(owner)}")
        inner = owner[key]
    else:
        raise system_error("TypeError", f"cannot assign into {kind(owner)}; expected a list or a map")
    changed = owner.copy()
    changed[key] = value if last else with_change(inner, path, at + 1, value)
    return changed


@dataclass(frozen=True)
class Memory:
    """The limits of memory: `check` refuses a value by itself, `settle` the sum of all variables.

    `settle` is called after the assignment, because the variable's old value counts no longer.
    """

    check: Callable[[Value], None]
    settle: Callable[[], None]


def assign_op(setters: list[Setter], memory: Memory, to: int) -> Op:
    if len(setters) == 1 and setters[0].depth == 0 and not setters[0].path:
        slot, evaluate, check, settle = setters[0].slot, setters[0].value, memory.check, memory.settle

        def assign_local(slots: Slots) -> int:
            value = evaluate(slots)
            if needs_check(value):
                check(value)
                slots[slot] = value
                settle()
            else:
                slots[slot] = value
            return to

        return assign_local

    def assign(slots: Slots) -> int:
        for setter in setters:
            put_checked(setter, slots, setter.value(slots), memory)
        return to

    return assign


def put_checked(setter: Setter, slots: Slots, value: Value, memory: Memory) -> None:
    if needs_check(value):
        memory.check(value)
    setter.put(slots, value)
    if setter.path:
        home = slots
        for _ in range(setter.depth):
            home = home[0]
        memory.check(home[setter.slot])
    memory.settle()


def result_setter(setter: Setter, memory: Memory, to: int) -> Resume:
    def store(slots: Slots, value: Value) -> int:
        put_checked(setter, slots, value, memory)
        return to

    return store


def ignore_result(to: int, slots: Slots, value: Value) -> int:
    return to


def store_op(run: Evaluate, store: Resume) -> Op:
    return lambda slots: store(slots, run(slots))


def call_op(callee: Code, given: Mapping[str, Evaluate], memory: Memory) -> Op:
    bound = [(slot, given[name]) for name, slot, _ in callee.parameters if name in given]
    defaults = [(slot, default) for name, slot, default in callee.parameters if name not in given]

    def call(slots: Slots) -> CallSignal:
        inner = callee.new_slots()
        for slot, evaluate in bound:
            value = evaluate(slots)
            if needs_check(value):
                memory.check(value)
            inner[slot] = value
        for slot, default in defaults:
            inner[slot] = default(inner)
        return CallSignal(callee, inner)

    return call


def condition_op(test: Evaluate, then: Label, otherwise: Label) -> Op:
    yes, no = then.pc, otherwise.pc

    def condition(slots: Slots) -> int:
        value = test(slots)
        if value is True:
            return yes
        if value is False:
            return no
        raise system_error("TypeError", f"a condition must be a boolean; got: {kind(value)}")

    return condition


def grow(program: Program, run: Callable[[Value, Value], Value], objs: Value, val: Value) -> Value:
    """Run list.concat or list.prepend, and tell the sizer how the new list differs from the old one."""
    result = run(objs, val)
    assert program.runtime is not None
    program.runtime.sizer.grown(result, objs, val)
    return result


def raise_op(value: Evaluate, slots: Slots) -> int:
    raised = value(slots)
    text = to_json(raised, sort_keys=True) if is_json(raised) else kind(raised)
    raise WorkflowError(raised, context=f"RuntimeError: {text}")


def is_json(value: Value) -> bool:
    try:
        to_json(value)
    except Exception:  # noqa: BLE001  # every failure means that the value has no form in JSON
        return False
    return True


def list_of(evaluate: Evaluate, slots: Slots) -> Value:
    items = evaluate(slots)
    if type(items) is not list:
        raise system_error("TypeError", f"'in' of a for loop must be a list; got: {kind(items)}")
    return items


def range_of(bounds: Value) -> Value:
    """A range as {"first", "count"}, so that a long range takes no memory."""
    if type(bounds) is not list or len(bounds) != 2:
        raise system_error("TypeError", "'range' must be a list of two numbers")
    first, last = bounds
    for bound in bounds:
        if type(bound) is not int and type(bound) is not float:
            raise system_error("TypeError", f"'range' must be of numbers; got: {kind(bound)}")
    difference = last - first
    if difference != difference or difference in (float("inf"), float("-inf")):
        raise system_error("ValueError", "'range' must be of finite numbers")
    return {"first": first, "count": max(0, int(difference // 1) + 1)}


def for_op(evaluate: Evaluate, items: int, at: int, fresh: list[int], to: int) -> Op:
    def begin(slots: Slots) -> int:
        slots[items] = evaluate(slots)
        slots[at] = -1
        for slot in fresh:
            slots[slot] = UNSET
        return to

    return begin


def iterate_op(items: int, at: int, value: int, index: int, body: int, after: int) -> Op:
    def iterate(slots: Slots) -> int:
        number = slots[at] + 1
        values = slots[items]
        if values.__class__ is list:
            if number >= len(values):
                slots[items] = UNSET
                return after
            slots[value] = values[number]
        else:
            if number >= values["count"]:
                slots[items] = UNSET
                return after
            slots[value] = values["first"] + number
        slots[at] = number
        if index:
            slots[index] = number
        return body

    return iterate


def limit_of(value: Value) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise system_error("TypeError", f"concurrency_limit must be an integer; got: {kind(value)}")
    if value < 1:
        raise system_error("ValueError", f"concurrency_limit must be positive; got: {value}")
    return value


def fork_iterations(code: Code, items: Evaluate, limit: Evaluate, slots: Slots) -> ForkSignal:
    values = items(slots)
    bound = limit_of(limit(slots))
    if type(values) is list:
        return ForkSignal([code], len(values), bound, values, None)
    return ForkSignal([code], values["count"], bound, None, values["first"])


def begin_try(attempt: int, to: int, slots: Slots) -> int:
    slots[attempt] = 0
    return to


def propagate(error: int, slots: Slots) -> int:
    saved = slots[error]
    raised = WorkflowError(saved["value"], context=saved["context"])
    raised.trace = saved["trace"][:-1]  # the machine adds this frame's mark again
    raise raised


def except_op(error: int, variable: int, fresh: list[int], to: int, slots: Slots) -> int:
    value = slots[error]["value"]
    for slot in fresh:
        slots[slot] = UNSET
    if variable:
        slots[variable] = value
    slots[error] = UNSET
    return to


_POLICY_DEFAULTS = {"max_retries": decisions.RETRY_DEFAULT_MAX, **stdlib.DEFAULT_BACKOFF}


def policy_op(parts: Mapping[str, Evaluate], policy: int, to: int, slots: Slots) -> int:
    """Evaluate a retry policy into one flat map."""
    values = {name: evaluate(slots) for name, evaluate in parts.items()}
    whole = values.pop("policy", None)
    if "policy" in parts:
        if type(whole) is not dict:
            raise system_error("TypeError", f"a retry policy must be a map; got: {kind(whole)}")
        values = dict(whole)
    backoff = values.pop("backoff", None)
    if backoff is not None:
        if type(backoff) is not dict:
            raise system_error("TypeError", f"'backoff' must be a map; got: {kind(backoff)}")
        values = {**backoff, **values}
    result: dict[str, Value] = {"predicate": values.get("predicate", Function(decisions.RETRY_WITHOUT_PREDICATE))}
    for name, default in _POLICY_DEFAULTS.items():
        value = values.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or value < 0 or value != value:
            raise system_error("TypeError", f"retry: '{name}' must be a number, not negative; got: {kind(value)}")
        result[name] = value
    slots[policy] = result
    return to


def ask_op(codes: Mapping[str, Code], policy: int, error: int, answer: int, to: int, slots: Slots) -> Any:
    """Ask the retry predicate about the error: a library function at once, a subworkflow by a call."""
    predicate, value = slots[policy]["predicate"], slots[error]["value"]
    if type(predicate) is not Function:
        raise system_error("TypeError", f"a retry predicate must be a function; got: {kind(predicate)}")
    code = codes.get(predicate.name)
    if code is None:
        signature = stdlib.FUNCTIONS[predicate.name]
        if signature.run is None or len(signature.parameters) != 1:
            raise system_error("TypeError", f"{predicate.name} is not a retry predicate")
        slots[answer] = signature.run(value)
        return to
    if not code.parameters or any(default is stdlib.REQUIRED for _, _, default in code.parameters[1:]):
        raise system_error("TypeError", f"retry predicate {predicate.name} must take one parameter")
    inner = code.new_slots()
    inner[code.parameters[0][1]] = value
    for _, slot, default in code.parameters[1:]:
        inner[slot] = default(inner)
    return CallSignal(code, inner)


def answer(slot: int, to: int, slots: Slots, value: Value) -> int:
    slots[slot] = value
    return to


def decide_op(policy: int, answer: int, attempt: int, give_up: int, slots: Slots) -> Any:
    """Wait before the next attempt, or give up."""
    rule, tries = slots[policy], slots[attempt]
    if slots[answer] is not True or tries >= rule["max_retries"]:
        return give_up
    try:
        delay = min(rule["initial_delay"] * float(rule["multiplier"]) ** tries, rule["max_delay"])
    except OverflowError:
        delay = rule["max_delay"]
    return WaitSignal("retry", {"seconds": delay})


def retry_now(attempt: int, to: int, slots: Slots, value: Value) -> int:
    slots[attempt] += 1
    return to


def logical_op(left: Evaluate, operator: str, slot: int, right: int, done: int, slots: Slots) -> int:
    value = truth(left(slots), operator)
    slots[slot] = value
    return done if value is (operator == "or") else right


def operand_op(right: Evaluate, operator: str, slot: int, done: int, slots: Slots) -> int:
    slots[slot] = truth(right(slots), operator)
    return done


def list_of_values(items: list[Evaluate | Literal]) -> Evaluate | Literal:
    if all(isinstance(item, Literal) for item in items):
        return Literal([item.value for item in items if isinstance(item, Literal)])
    evaluators = [constant(item.value) if isinstance(item, Literal) else item for item in items]
    return lambda slots: [evaluate(slots) for evaluate in evaluators]


def map_of_values(pairs: list[tuple[Evaluate | Literal, Evaluate | Literal]]) -> Evaluate | Literal:
    if all(isinstance(key, Literal) and isinstance(value, Literal) for key, value in pairs):
        return Literal({key.value: value.value for key, value in pairs})  # type: ignore[union-attr]
    evaluators = [
        (
            constant(key.value) if isinstance(key, Literal) else key,
            constant(value.value) if isinstance(value, Literal) else value,
        )
        for key, value in pairs
    ]

    def build(slots: Slots) -> Value:
        result: dict[str, Value] = {}
        for key, value in evaluators:
            name = key(slots)
            if type(name) is int:
                name = str(name)
            if type(name) is not str:
                raise system_error("TypeError", f"map key must be a string; got: {kind(name)}")
            result[name] = value(slots)
        return result

    return build
