"""One execution's interpreter: threads of frames over compiled code, and nothing that cannot be written down.

Pure: it knows no clock, network or database. `run` goes on until every thread waits; what it wants from outside is in
`waits`, `new_callbacks`, `logs`; `complete` brings an answer. `snapshot` and `Machine.restore` are inverse.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from . import decisions, http
from .errors import WorkflowError, limit_error, system_error
from .limits import Limits
from .program import CallSignal, Code, ForkSignal, Program, ReturnSignal, Slots, WaitSignal
from .values import UNSET, NotJson, Sizer, Value, kind, memory_error, restore, store, to_json

SLICE_STEPS: Final = 2000  # steps between looks at the clock, the total of memory and other executions
CALLBACK_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
SEVERITIES: Final = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY")
RUN_EXECUTION: Final = "googleapis.workflowexecutions.v1.projects.locations.workflows.executions.run"
REFERENCE_BYTES: Final = 4096  # values from this size on are stored once, and not again while they do not change

# Codes in the event log, beside the marks of steps (see history.py).
PUSH, POP, FAILED, LOGGED, FORKED, ENDED, RESUMED = -1, -2, -3, -4, -5, -6, -7


class Frame:
    """A running routine or branch: its code, where it is, and its variables."""

    __slots__ = ("code", "pc", "slots")

    def __init__(self, code: Code, slots: Slots, pc: int = 0) -> None:
        self.code = code
        self.slots = slots
        self.pc = pc


@dataclass
class Wait:
    """What a thread stopped for. `seq` numbers the thread's waits: an answer to an older one is stale."""

    thread: int
    seq: int
    kind: str  # http, connector, sleep, callback, execution
    call: str
    detail: dict[str, Value] = field(default_factory=dict)
    due: float | None = None
    ref: str | None = None  # the callback or execution waited for
    step: str = ""


@dataclass
class Join:
    """A parallel step in progress."""

    codes: list[str]
    count: int
    limit: int | None
    items: list[Value] | None
    start: Value
    next: int = 0
    running: int = 0
    errors: list[tuple[int, dict[str, Value]]] = field(default_factory=list)
    failed: int = 0


class Thread:
    """main, or a parallel branch or iteration."""

    __slots__ = ("branch", "depth", "frames", "id", "join", "nesting", "parent", "seq", "waiting")

    def __init__(self, id_: int, parent: int | None, branch: int, frames: list[Frame]) -> None:
        self.id = id_
        self.parent = parent
        self.branch = branch
        self.frames = frames
        self.seq = 0
        self.waiting = False
        self.join: Join | None = None
        self.depth = 0  # frames below this thread's own
        self.nesting = 0  # parallel steps around it


class Machine:
    """An execution. `outcome` is None until it has ended, then ("SUCCEEDED", JSON) or ("FAILED", error)."""

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
        self._threads: dict[int, Thread] = {}
        self._ready: deque[int] = deque()
        self._next_thread = 0
        self._references: dict[int, tuple[Value, int]] = {}
        self._next_reference = 0
        self._last_steps: list[dict[str, str]] = []
        self._current_events: list[Any] = []

    # Driving it

    def start(self, argument: Value) -> None:
        """Begin main with the execution's argument."""
        try:
            self.sizer.check(argument)
        except WorkflowError as error:
            self.outcome = ("FAILED", self.describe(error))
            return
        code = self.program.main
        slots = code.new_slots()
        for position, (_, slot, default) in enumerate(code.parameters):
            given = argument is not None and position == 0
            slots[slot] = argument if given else default(slots)
        self._new_thread(None, 0, code, slots)

    @property
    def is_ready(self) -> bool:
        return bool(self._ready) and self.outcome is None

    def run(self, steps: int = SLICE_STEPS) -> None:
        """Run ready threads, each until it waits or ends, for about so many steps."""
        self.program.runtime = self
        budget = self.steps + steps
        while self._ready and self.outcome is None and self.steps < budget:
            thread = self._threads[self._ready[0]]
            if self._run_thread(thread, budget):
                self._ready.rotate(-1)  # it has more to do, after the others
            else:
                self._ready.remove(thread.id)
        if self.outcome is None:
            try:
                self._check_total()
            except RecursionError:
                self.fail(limit_error(f"a value is nested deeper than {decisions.MAX_VALUE_DEPTH}"))

    def complete(self, thread_id: int, seq: int, value: Value, error: bool = False) -> bool:
        """Answer a wait. False if nothing waits for this answer any more."""
        thread = self._threads.get(thread_id)
        if self.outcome is not None or thread is None or not thread.waiting or thread.seq != seq:
            return False
        self.program.runtime = self
        thread.waiting = False
        self.events.append([thread_id, RESUMED, self.now()])
        frame = thread.frames[-1]
        try:
            if error:
                raise self._answered_error(value)
            frame.pc = frame.code.resumes[frame.pc](frame.slots, value)
        except WorkflowError as failure:
            if not self._throw(thread, failure):
                return True
        self._ready.append(thread_id)
        return True

    def is_waiting(self, thread_id: int, seq: int) -> bool:
        thread = self._threads.get(thread_id)
        return self.outcome is None and thread is not None and thread.waiting and thread.seq == seq

    def fail(self, error: WorkflowError) -> None:
        """End the execution with an error that no step can catch."""
        if 0 in self._threads and not error.trace:
            error.trace = [self._mark_at(frame) for frame in reversed(self._threads[0].frames)]
            self._last_steps = self._step_at(error.trace[0])
        self.outcome = ("FAILED", self.describe(error))

    @staticmethod
    def _answered_error(value: Value) -> WorkflowError:
        return WorkflowError(value["value"], context=value.get("context"), catchable=value.get("catchable", True))

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
        """Run one thread. True if it could go on, False if it waits, joins or has ended."""
        events: list[Any] = [thread.id]
        self._current_events = events
        self.events.append(events)
        while True:
            frame = thread.frames[-1]
            try:
                signal = self._run_frame(frame, events, budget)
                if signal is None:
                    return True
                if not self._signal(thread, frame, signal, events):
                    return False
            except WorkflowError as error:
                if not self._throw(thread, error, events):
                    return False
            except Exception as error:  # noqa: BLE001  # an engine defect must fail this execution, not all of them
                failure = system_error("SystemError", f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                if not self._throw(thread, failure, events):
                    return False

    def _run_frame(self, frame: Frame, events: list[Any], budget: int) -> Any:
        """The inner loop: instructions of one frame until a signal, or None when the budget is used up."""
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

    def _signal(self, thread: Thread, frame: Frame, signal: Any, events: list[Any]) -> bool:
        """Do what an instruction asked for. False if the thread cannot go on now."""
        if type(signal) is CallSignal:
            if thread.depth + len(thread.frames) >= self.limits.call_depth:
                raise system_error("RecursionError", f"call stack depth limit exceeded: {self.limits.call_depth}")
            thread.frames.append(Frame(signal.code, signal.slots))
            events += (PUSH, self.now())
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
            events += (ENDED, self.now())
            self._end_thread(thread, value)
            return False
        thread.frames.pop()
        events += (POP, self.now())
        frame = thread.frames[-1]
        frame.pc = frame.code.resumes[frame.pc](frame.slots, value)
        return True

    def _throw(self, thread: Thread, error: WorkflowError, events: list[Any] | None = None) -> bool:
        """Give an error to the nearest handler. False if it ended the thread."""
        if events is None:
            events = [thread.id]
            self.events.append(events)
        events += (FAILED, self.now(), _payload(error.value))
        while True:
            frame = thread.frames[-1]
            error.trace.append(self._mark_at(frame))
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

    @staticmethod
    def _mark_at(frame: Frame) -> int:
        return frame.code.owners[frame.pc]

    def _end_thread(self, thread: Thread, value: Value) -> None:
        last = self._mark_at(thread.frames[-1])
        del self._threads[thread.id]
        if thread.parent is None:
            self._last_steps = self._step_at(last)
            self._succeed(value, last)
        else:
            self._joined(self._threads[thread.parent])

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
        self._joined(parent)

    def _succeed(self, value: Value, last: int) -> None:
        """End with main's value; `last` is the mark of the step that gave it."""
        try:
            text = to_json(value)
            if len(text.encode("utf-8", "replace")) > self.limits.result_bytes:
                raise limit_error(
                    f"the result is over {self.limits.result_bytes} bytes", "ResultSizeLimitExceededError"
                )
            self.outcome = ("SUCCEEDED", text)
        except NotJson as error:
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
            self._fill()

    def _fill(self) -> None:
        """Start branches wherever their step's limit and the execution's allow."""
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

    def _joined(self, parent: Thread) -> None:
        join = parent.join
        assert join is not None
        join.running -= 1
        if join.next >= join.count and join.running == 0 and self._finish_join(parent):
            self._ready.append(parent.id)
        self._fill()

    def _finish_join(self, thread: Thread) -> bool:
        """All branches have ended: go on, or throw what they threw. False if that ended the thread."""
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
        mark = self.program.marks[self._mark_at(frame)]
        wait = self._make_wait(thread.id, thread.seq + 1, signal.call, signal.arguments)
        wait.step = mark.step
        if wait.kind == "callback" or (wait.kind == "http" and http.is_external(wait.detail["url"])):
            self.external_steps += 1
        thread.seq += 1
        thread.waiting = True
        self.waits.append(wait)

    def _make_wait(self, thread: int, seq: int, call: str, arguments: dict[str, Value]) -> Wait:
        if call.startswith("http."):
            return Wait(thread, seq, "http", call, http.prepare(call, arguments, self.limits))
        if call == "retry":
            return Wait(thread, seq, "sleep", call, {}, self.now() + arguments["seconds"])
        if call == "sys.sleep":
            return Wait(thread, seq, "sleep", call, {}, self.now() + self._sleep_seconds(arguments.get("seconds")))
        if call == "sys.sleep_until":
            return Wait(thread, seq, "sleep", call, {}, _timestamp(arguments.get("time")))
        if call == "events.await_callback":
            return self._callback_wait(thread, seq, arguments)
        if call.startswith("experimental.executions.") or call == RUN_EXECUTION:
            return Wait(thread, seq, "execution", call, arguments)
        return Wait(thread, seq, "connector", call, {"arguments": arguments})

    def _sleep_seconds(self, seconds: Value) -> float:
        if type(seconds) is not int and type(seconds) is not float:
            raise system_error("TypeError", f"sys.sleep: argument 'seconds' must be a number; got: {kind(seconds)}")
        if not 0 <= seconds <= self.limits.sleep_seconds:
            raise system_error(
                "ValueError", f"sys.sleep: seconds must be 0 to {self.limits.sleep_seconds}; got: {seconds}"
            )
        return float(seconds)

    def _callback_wait(self, thread: int, seq: int, arguments: dict[str, Value]) -> Wait:
        callback, timeout = arguments.get("callback"), arguments.get("timeout")
        timeout = 43200.0 if timeout is None else timeout
        if type(callback) is not dict or type(callback.get("url")) is not str:
            raise system_error("TypeError", "events.await_callback: argument 'callback' must be a map with 'url'")
        if type(timeout) is not int and type(timeout) is not float:
            raise system_error(
                "TypeError", f"events.await_callback: argument 'timeout' must be a number; got: {kind(timeout)}"
            )
        if not 0 <= timeout <= self.limits.duration_seconds:
            raise system_error("ValueError", f"events.await_callback: timeout {timeout} is out of range")
        head, _, ref = callback["url"].rpartition("/callbacks/")
        if not head.endswith(self.execution) or not ref:
            raise system_error("ValueError", "events.await_callback: the callback was not created by this execution")
        return Wait(thread, seq, "callback", "events.await_callback", {}, self.now() + timeout, ref)

    # What running code asks for (program.Runtime)

    def get_env(self, name: Value, default: Value) -> Value:
        if type(name) is not str:
            raise system_error("TypeError", f"sys.get_env: argument 'name' must be a string; got: {kind(name)}")
        if default is not None and type(default) is not str:
            raise system_error("TypeError", f"sys.get_env: argument 'default' must be a string; got: {kind(default)}")
        return self._environment.get(name, default)

    def uuid(self) -> str:
        return str(uuid.uuid4())

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
        ref = f"{uuid.uuid4()}"
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
            found = " and ".join(given) or "none of them"
            raise system_error("TypeError", f"sys.log: exactly one of data, text, json must be given; got: {found}")
        value = arguments[given[0]]
        if given == ["json"] and type(value) is not dict:
            raise system_error("TypeError", f"sys.log: argument 'json' must be a map; got: {kind(value)}")
        if type(value) is bytes:
            raise system_error("TypeError", f"sys.log: argument '{given[0]}' cannot be logged; got: bytes")
        self.logs.append({"severity": severity.upper(), "data": value, "time": self.now()})
        self._current_events += (LOGGED, self.now(), severity.upper(), value)

    # Errors as the outside sees them

    def describe(self, error: WorkflowError) -> dict[str, Value]:
        """Execution.error: payload, context, stack trace."""
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
        """Execution.status.currentSteps: where main is or was last.

        The API's own text: "Presently, if the current step is inside a subworkflow, the list only includes that step."
        """
        main = self._threads.get(0)
        return self._last_steps if main is None else self._step_at(self._mark_at(main.frames[-1]))

    def _step_at(self, number: int) -> list[dict[str, str]]:
        mark = self.program.marks[number]
        return [{"routine": mark.routine, "step": mark.step}]

    # Memory

    def _check_total(self) -> None:
        total = 0
        size = self.sizer.size
        for thread in self._threads.values():
            for frame in thread.frames:
                for value in frame.slots[1:]:
                    if value is not UNSET:
                        total += size(value)
        if total > self.limits.variables_bytes:
            self.fail(memory_error(total, self.limits.variables_bytes))

    # Snapshots

    def snapshot(self) -> tuple[str, dict[int, str], list[int]]:
        """(state, values to add, values to remove): big values are stored beside the state, and only once."""
        kept: dict[int, tuple[Value, int]] = {}
        added: dict[int, str] = {}
        state = {
            "next_thread": self._next_thread,
            "steps": self.steps,
            "external_steps": self.external_steps,
            "ready": list(self._ready),
            "threads": [self._thread_state(thread, kept, added) for thread in self._threads.values()],
            "next_reference": self._next_reference,
        }
        state["next_reference"] = self._next_reference
        removed = [key for identity, (_, key) in self._references.items() if identity not in kept]
        self._references = kept
        return store(state), added, removed

    def _thread_state(self, thread: Thread, kept: dict[int, Any], added: dict[int, str]) -> dict[str, Value]:
        join = thread.join
        return {
            "id": thread.id,
            "parent": thread.parent,
            "branch": thread.branch,
            "seq": thread.seq,
            "waiting": thread.waiting,
            "depth": thread.depth,
            "nesting": thread.nesting,
            "frames": [
                {
                    "code": frame.code.key,
                    "at": frame.code.labels[frame.pc],
                    "slots": {
                        name: self._slot_state(value, kept, added)
                        for name, value in zip(frame.code.slot_names[1:], frame.slots[1:], strict=True)
                        if value is not UNSET
                    },
                }
                for frame in thread.frames
            ],
            "join": None if join is None else {**vars(join), "items": self._slot_state(join.items, kept, added)},
        }

    def _slot_state(self, value: Value, kept: dict[int, Any], added: dict[int, str]) -> Value:
        """The value in a list, or the number of the place where it is stored."""
        if value.__class__ not in (list, dict, str, bytes) or self.sizer.size(value) < REFERENCE_BYTES:
            return [value]
        known = self._references.get(id(value)) or kept.get(id(value))
        if known is None:
            self._next_reference += 1
            known = (value, self._next_reference)
            added[known[1]] = store(value)
        kept[id(value)] = known
        return known[1]

    def restore(self, text: str, values: Mapping[int, str]) -> None:
        """Take over the state that `snapshot` gave."""
        state = restore(text)
        loaded = {key: restore(value) for key, value in values.items()}
        self._references = {id(value): (value, key) for key, value in loaded.items()}
        self._next_reference = state["next_reference"]
        self._next_thread = state["next_thread"]
        self.steps, self.external_steps = state["steps"], state["external_steps"]
        self._ready = deque(state["ready"])
        for saved in state["threads"]:
            self._restore_thread(saved, loaded)

    def _restore_thread(self, saved: dict[str, Value], loaded: Mapping[int, Value]) -> None:
        def value_of(slot: Value) -> Value:
            return slot[0] if type(slot) is list else loaded[slot]

        parent = None if saved["parent"] is None else self._threads[saved["parent"]]
        frames: list[Frame] = []
        for index, frame in enumerate(saved["frames"]):
            code = self.program.codes[frame["code"]]
            outer = parent.frames[-1].slots if parent is not None and index == 0 else None
            slots = code.new_slots(outer)
            for name, value in frame["slots"].items():
                slots[code.slot_index[name]] = value_of(value)
            frames.append(Frame(code, slots, code.label_index[frame["at"]]))
        thread = Thread(saved["id"], saved["parent"], saved["branch"], frames)
        thread.seq, thread.waiting = saved["seq"], saved["waiting"]
        thread.depth, thread.nesting = saved["depth"], saved["nesting"]
        if (join := saved["join"]) is not None:
            thread.join = Join(**{**join, "items": value_of(join["items"])})
            thread.join.errors = [(index, error) for index, error in join["errors"]]
        self._threads[thread.id] = thread


def _payload(value: Value) -> str:
    try:
        return to_json(value, sort_keys=True)
    except (NotJson, RecursionError, TypeError) as error:
        return to_json(f"{kind(value)}: {error}")


def _timestamp(value: Value) -> float:
    if type(value) is not str:
        raise system_error("TypeError", f"sys.sleep_until: argument 'time' must be a string; got: {kind(value)}")
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError("no time zone")
        return moment.timestamp()
    except (ValueError, OverflowError) as error:
        raise system_error(
            "ValueError", f"sys.sleep_until: {value[:60]!r} is not a timestamp with a time zone"
        ) from error


def run_to_end(machine: Machine, answers: Iterable[Value] = ()) -> tuple[str, Any]:
    """Run a machine that waits for nothing but the given answers; for benchmarks and tests of the language."""
    pending = iter(answers)
    while machine.outcome is None:
        machine.run()
        waits, machine.waits = machine.waits, []
        for wait in waits:
            machine.complete(wait.thread, wait.seq, next(pending, None))
    return machine.outcome
