"""The interpreter of an execution: threads of frames over compiled code.

A machine is pure: it knows no clock, network or database. `run` continues until every thread waits. The machine leaves
its requests to the outside in `waits`, `new_callbacks` and `logs`; `complete` brings an answer. `snapshot` writes the
machine's whole state, and `restore` reads it.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import decisions
from ..errors import WorkflowError, limit_error, system_error
from ..language.program import CallSignal, Code, ForkSignal, Program, ReturnSignal, Slots, WaitSignal
from ..limits import Limits
from ..values import UNSET, NotJson, Sizer, Value, kind, memory_error, to_json, utf8
from .answers import error_of
from .http_requests import is_external
from .snapshots import Snapshots
from .threads import Frame, Join, Thread
from .waits import Wait, WaitFactory

SLICE_STEPS: Final = 2000  # steps before other executions may run
CALLBACK_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
SEVERITIES: Final = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY")

# Codes in the event log, beside the marks of steps (see history.py).
PUSH, POP, FAILED, LOGGED, FORKED, ENDED, RESUMED = -1, -2, -3, -4, -5, -6, -7


class Machine:
    """An execution. `outcome` is None until it has ended, then ("SUCCEEDED", JSON) or ("FAILED", error).

    `new_id` makes the ids of callbacks and of `uuid.generate`; a simulation passes its own.
    """

    def __init__(
        self,
        program: Program,
        *,
        execution: str,
        environment: Mapping[str, str],
        callback_base_url: str,
        limits: Limits,
        now: Callable[[], float],
        sizer: Sizer | None = None,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.program = program
        self.execution = execution
        self.limits = limits
        self.now = now
        self.sizer = sizer or Sizer(limits.variables_bytes, limits.string_bytes)
        self.outcome: tuple[str, Any] | None = None
        self.waits: list[Wait] = []
        self.new_callbacks: list[tuple[str, str]] = []
        self.logs: list[dict[str, Value]] = []
        self.events: list[list[Any]] = []
        self.steps = 0
        self.external_steps = 0
        self._environment = environment
        self._callback_base_url = callback_base_url
        self._new_id = new_id
        self._wait_factory = WaitFactory(execution, limits)
        self._snapshots = Snapshots(program, self.sizer)
        self._threads: dict[int, Thread] = {}
        self._ready: deque[int] = deque()
        self._next_thread = 0
        self.room = 0  # bytes that assignments may add before the variables are counted again
        self._last_steps: list[dict[str, str]] = []
        self._current_events: list[Any] = []

    # For the engine

    def start(self, argument: Value) -> None:
        """Begin `main` with the execution's argument."""
        try:
            self.sizer.check(argument)
        except WorkflowError as error:
            self.outcome = ("FAILED", self.describe(error))
            return
        code = self.program.main
        slots = code.new_slots()
        for position, (_, slot, default) in enumerate(code.parameters):
            is_given = argument is not None and position == 0
            slots[slot] = argument if is_given else default(slots)
        self._new_thread(None, 0, code, slots)

    @property
    def is_ready(self) -> bool:
        return bool(self._ready) and self.outcome is None

    def run(self, steps: int = SLICE_STEPS) -> None:
        """Run ready threads, each until it waits or ends, for about `steps` steps."""
        self.program.runtime = self
        budget = self.steps + steps
        while self._ready and self.outcome is None and self.steps < budget:
            thread = self._threads[self._ready[0]]
            if self._run_thread(thread, budget):
                self._ready.rotate(-1)  # the thread continues after the other threads
            else:
                self._ready.remove(thread.id)
        if self.outcome is None:
            try:
                self.count_variables()
            except WorkflowError as error:
                self.fail(error)

    def complete(self, thread_id: int, seq: int, value: Value, is_error: bool = False) -> bool:
        """Answer a wait. False if the thread no longer waits for this answer."""
        thread = self._threads.get(thread_id)
        if self.outcome is not None or thread is None or not thread.is_waiting or thread.seq != seq:
            return False
        self.program.runtime = self
        thread.is_waiting = False
        self.events.append([thread_id, RESUMED, self.now()])
        frame = thread.frames[-1]
        try:
            if is_error:
                raise error_of(value)
            frame.pc = frame.code.resumes[frame.pc](frame.slots, value)
        except WorkflowError as failure:
            if not self._throw(thread, failure):
                return True
        self._ready.append(thread_id)
        return True

    def fail(self, error: WorkflowError) -> None:
        """End the execution with an error that no step can catch."""
        if 0 in self._threads and not error.trace:
            error.trace = [frame.mark for frame in reversed(self._threads[0].frames)]
            self._last_steps = self._step_at(error.trace[0])
        self.outcome = ("FAILED", self.describe(error))

    def _new_thread(self, parent: Thread | None, branch: int, code: Code, slots: Slots) -> Thread:
        thread = Thread(self._next_thread, parent.id if parent else None, branch, [Frame(code, slots)])
        if parent is not None:
            thread.depth = parent.depth + len(parent.frames)
            thread.nesting = parent.nesting + 1
        self._next_thread += 1
        self._threads[thread.id] = thread
        self._ready.append(thread.id)
        return thread

    # The interpreter

    def _run_thread(self, thread: Thread, budget: int) -> bool:
        """Run a thread. True if its budget is used up, False if it waits, joins or has ended."""
        events: list[Any] = [thread.id]
        self._current_events = events
        self.events.append(events)
        while True:
            frame = thread.frames[-1]
            try:
                signal = self._run_frame(frame, events, budget)
                if signal is None:
                    return True
                if not self._handle_signal(thread, frame, signal, events):
                    return False
            except WorkflowError as error:
                if not self._throw(thread, error, events):
                    return False
            except Exception as error:  # noqa: BLE001  # a defect of the engine must fail only this execution
                failure = system_error("SystemError", f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                if not self._throw(thread, failure, events):
                    return False

    def _run_frame(self, frame: Frame, events: list[Any], budget: int) -> Any:
        """The inner loop: run a frame's instructions until a signal; None when the budget is used up."""
        code, slots, pc = frame.code, frame.slots, frame.pc
        ops, marks, table, now = code.ops, code.marks, self.program.marks, self.now
        append = events.append
        steps, most = self.steps, self.limits.steps
        try:
            while True:
                mark = marks[pc]
                if mark:
                    if steps >= budget:
                        frame.pc = pc
                        return None
                    steps += table[mark].cost
                    append(mark)
                    append(now())
                    if steps > most:
                        frame.pc = pc
                        raise limit_error(f"steps limit exceeded: {most}")
                frame.pc = pc
                pc = ops[pc](slots)
                if pc.__class__ is not int:
                    return pc
        finally:
            self.steps = steps

    def _handle_signal(self, thread: Thread, frame: Frame, signal: Any, events: list[Any]) -> bool:
        """Handle an instruction's signal. False if the thread waits, joins or has ended."""
        if type(signal) is CallSignal:
            if thread.depth + len(thread.frames) >= self.limits.call_depth:
                raise system_error("RecursionError", f"call stack depth limit exceeded: {self.limits.call_depth}")
            thread.frames.append(Frame(signal.code, signal.slots))
            events += (PUSH, self.now())
            if self.room < 0:
                self.count_variables()
            return True
        if type(signal) is ReturnSignal:
            return self._return(thread, signal.value, events)
        if type(signal) is WaitSignal:
            self._wait(thread, signal, frame)
            return False
        self._fork(thread, signal)
        return not thread.join

    def _return(self, thread: Thread, value: Value, events: list[Any]) -> bool:
        if len(thread.frames) == 1:
            self.count_variables()
            events += (ENDED, self.now())
            self._end_thread(thread, value)
            return False
        thread.frames.pop()
        events += (POP, self.now())
        frame = thread.frames[-1]
        frame.pc = frame.code.resumes[frame.pc](frame.slots, value)
        return True

    def _throw(self, thread: Thread, error: WorkflowError, events: list[Any] | None = None) -> bool:
        """Pass an error to the nearest handler. False if no handler took it, which ends the thread."""
        if events is None:
            events = [thread.id]
            self.events.append(events)
        events += (FAILED, self.now(), _payload(error.value))
        while True:
            frame = thread.frames[-1]
            error.trace.append(frame.mark)
            handler = frame.code.handlers[frame.pc] if error.catchable else None
            if handler is not None:
                frame.pc, slot = handler
                frame.slots[slot] = {"value": error.value, "context": error.context, "trace": error.trace}
                return True
            if len(thread.frames) == 1:
                break
            thread.frames.pop()
            events += (POP, self.now())
        events += (ENDED, self.now())
        self._fail_thread(thread, error)
        return False

    def _end_thread(self, thread: Thread, value: Value) -> None:
        last = thread.frames[-1].mark
        del self._threads[thread.id]
        if thread.parent is None:
            self._last_steps = self._step_at(last)
            self._succeed(value, last)
        else:
            self._branch_ended(self._threads[thread.parent])

    def _fail_thread(self, thread: Thread, error: WorkflowError) -> None:
        if thread.parent is None:
            self._last_steps = self._step_at(error.trace[0])
        del self._threads[thread.id]
        if thread.parent is None or not error.catchable:
            self.outcome = ("FAILED", self.describe(error))
            return
        parent = self._threads[thread.parent]
        join = parent.join
        assert join is not None
        join.failed += 1
        if len(join.errors) < self.limits.branch_errors:
            described = self.describe(error)
            join.errors.append((thread.branch, {"context": described["context"], "payload": described["payload"]}))
        self._branch_ended(parent)

    def _succeed(self, value: Value, last: int) -> None:
        """End with the value of `main`; `last` is the mark of the step that returned it."""
        try:
            text = to_json(value)
            if len(utf8(text)) > self.limits.result_bytes:
                raise limit_error(
                    f"the result is over {self.limits.result_bytes} bytes", "ResultSizeLimitExceededError"
                )
            self.outcome = ("SUCCEEDED", text)
        except (NotJson, UnicodeError) as error:
            self._refuse_result(system_error("ValueError", f"the workflow's result: {error}"), last)
        except WorkflowError as error:
            self._refuse_result(error, last)

    def _refuse_result(self, error: WorkflowError, last: int) -> None:
        error.trace = [last]
        self.fail(error)

    # Parallel steps

    def _fork(self, thread: Thread, fork: ForkSignal) -> None:
        if thread.nesting >= self.limits.parallel_depth:
            raise system_error(
                "ParallelNestingError", f"parallel steps are nested deeper than {self.limits.parallel_depth}"
            )
        codes = [code.key for code in fork.codes]
        thread.join = Join(codes, fork.count, fork.limit, fork.items, fork.start)
        if fork.count == 0:
            self._finish_join(thread)
        else:
            self._start_branches()

    def _start_branches(self) -> None:
        """Start branches while the limit of their step and the limit of the execution allow."""
        active = sum(1 for thread in self._threads.values() if thread.parent is not None and thread.join is None)
        for thread in list(self._threads.values()):
            join = thread.join
            if join is None:
                continue
            most = join.limit or self.limits.concurrent_branches
            while join.next < join.count and join.running < most and active < self.limits.concurrent_branches:
                self._start_branch(thread, join)
                active += 1

    def _start_branch(self, thread: Thread, join: Join) -> None:
        index = join.next
        join.next += 1
        join.running += 1
        code = self.program.codes[join.codes[index] if len(join.codes) > 1 else join.codes[0]]
        slots = code.new_slots(thread.frames[-1].slots)
        if code.value_slot:
            slots[code.value_slot] = join.items[index] if join.items is not None else join.start + index
        if code.index_slot:
            slots[code.index_slot] = index
        child = self._new_thread(thread, index, code, slots)
        self.events.append([thread.id, FORKED, self.now(), child.id, index])

    def _branch_ended(self, parent: Thread) -> None:
        join = parent.join
        assert join is not None
        join.running -= 1
        if join.next >= join.count and join.running == 0 and self._finish_join(parent):
            self._ready.append(parent.id)
        self._start_branches()

    def _finish_join(self, thread: Thread) -> bool:
        """Continue after all branches have ended, or throw their errors. False if an error ended the thread."""
        join = thread.join
        assert join is not None
        thread.join = None
        if join.failed:
            return self._throw(thread, self._branch_error(join))
        frame = thread.frames[-1]
        frame.pc = frame.code.resumes[frame.pc](frame.slots, None)
        return True

    def _branch_error(self, join: Join) -> WorkflowError:
        branches = [
            {"id": str(index + decisions.FIRST_BRANCH_ID), "error": error}
            for index, error in sorted(join.errors, key=lambda pair: pair[0])
        ]
        message = "One or more branches or iterations encountered an unhandled runtime error"
        return system_error("UnhandledBranchError", message, branches=branches, truncated=join.failed > len(branches))

    # Waiting

    def _wait(self, thread: Thread, signal: WaitSignal, frame: Frame) -> None:
        mark = self.program.marks[frame.mark]
        wait = self._wait_factory.make(thread.id, thread.seq + 1, signal.call, signal.arguments, self.now())
        wait.step = mark.step
        if wait.kind == "callback" or (wait.kind == "http" and is_external(wait.detail["url"])):
            self.external_steps += 1
        thread.seq += 1
        thread.is_waiting = True
        self.waits.append(wait)

    # For running code (program.Runtime)

    def get_env(self, name: Value, default: Value) -> Value:
        if type(name) is not str:
            raise system_error("TypeError", f"sys.get_env: argument 'name' must be a string; got: {kind(name)}")
        if default is not None and type(default) is not str:
            raise system_error("TypeError", f"sys.get_env: argument 'default' must be a string; got: {kind(default)}")
        return self._environment.get(name, default)

    def uuid(self) -> str:
        return self._new_id()

    def create_callback(self, method: Value) -> Value:
        if type(method) is not str:
            raise system_error(
                "TypeError",
                f"events.create_callback_endpoint: 'http_callback_method' must be a string; got: {kind(method)}",
            )
        if method.upper() not in CALLBACK_METHODS:
            raise system_error(
                "ValueError",
                f"events.create_callback_endpoint: unknown method {method!r}; expected {', '.join(CALLBACK_METHODS)}",
            )
        ref = self._new_id()
        self.new_callbacks.append((ref, method.upper()))
        return {"url": f"{self._callback_base_url}/v1/{self.execution}/callbacks/{ref}"}

    def log(self, arguments: Mapping[str, Value]) -> None:
        severity = arguments.get("severity") or "DEFAULT"
        if type(severity) is not str:
            raise system_error("TypeError", f"sys.log: argument 'severity' must be a string; got: {kind(severity)}")
        if severity.upper() not in SEVERITIES:
            raise system_error(
                "ValueError", f"sys.log: unknown severity {severity!r}; expected {', '.join(SEVERITIES)}"
            )
        given = [name for name in ("data", "text", "json") if arguments.get(name) is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none of them"
            raise system_error("TypeError", f"sys.log: exactly one of data, text, json must be given; got: {names}")
        value = arguments[given[0]]
        if given == ["json"] and type(value) is not dict:
            raise system_error("TypeError", f"sys.log: argument 'json' must be a map; got: {kind(value)}")
        if type(value) is bytes:
            raise system_error("TypeError", f"sys.log: argument '{given[0]}' cannot be logged; got: bytes")
        self.logs.append({"severity": severity.upper(), "data": value, "time": self.now()})
        self._current_events += (LOGGED, self.now(), severity.upper(), value)

    # Errors and steps as the API shows them

    def describe(self, error: WorkflowError) -> dict[str, Value]:
        """The API's Execution.error: payload, context, stack trace."""
        marks = [self.program.marks[mark] for mark in error.trace if mark]
        payload = _payload(error.value)
        lines = [error.context or f"RuntimeError: {payload}"]
        lines += [f'in step "{mark.step}", routine "{mark.routine}", line: {mark.line}' for mark in marks]
        elements = [
            {
                "step": mark.step,
                "routine": mark.routine,
                "position": {"line": str(mark.line), "column": str(mark.column), "length": str(mark.length)},
            }
            for mark in marks
        ]
        return {"payload": payload, "context": "\n".join(lines), "stackTrace": {"elements": elements}}

    def current_steps(self) -> list[dict[str, str]]:
        """The API's Execution.status.currentSteps: the present or last step of `main`.

        The API's own text: "Presently, if the current step is inside a subworkflow, the list only includes that step."
        """
        main = self._threads.get(0)
        return self._last_steps if main is None else self._step_at(main.frames[-1].mark)

    def _step_at(self, number: int) -> list[dict[str, str]]:
        mark = self.program.marks[number]
        return [{"routine": mark.routine, "step": mark.step}]

    # Memory

    def count_variables(self) -> None:
        """Raise ResourceLimitError if all variables are over the limit. Else they may grow by `room` until the next
        count: each assigned value takes its own size from it, at most 4 bytes a character."""
        total = 0
        size = self.sizer.size
        try:
            for thread in self._threads.values():
                for frame in thread.frames:
                    for value in frame.slots[1:]:
                        if value is not UNSET:
                            total += size(value)
        except RecursionError as error:
            raise limit_error(f"a value is nested deeper than {decisions.MAX_VALUE_DEPTH}") from error
        if total > self.limits.variables_bytes:
            raise memory_error(total, self.limits.variables_bytes)
        self.room = self.limits.variables_bytes - total

    # Snapshots

    def snapshot(self) -> tuple[str, dict[int, str], list[int]]:
        """(state, values to add, keys of values to remove)."""
        counters = {
            "next_thread": self._next_thread,
            "steps": self.steps,
            "external_steps": self.external_steps,
            "ready": list(self._ready),
        }
        return self._snapshots.write(counters, self._threads.values())

    def restore(self, text: str, values: Mapping[int, str]) -> None:
        """Continue from a snapshot. `values` are all values that the snapshots have added and not removed."""
        state, self._threads = self._snapshots.read(text, values)
        self._next_thread = state["next_thread"]
        self.steps, self.external_steps = state["steps"], state["external_steps"]
        self._ready = deque(state["ready"])


def _payload(value: Value) -> str:
    try:
        return to_json(value, sort_keys=True)
    except (NotJson, RecursionError, TypeError) as error:
        return to_json(f"{kind(value)}: {error}")
