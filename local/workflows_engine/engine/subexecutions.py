"""Executions that an execution starts and waits for."""

from __future__ import annotations

from collections.abc import Callable

from ..effects.subexecutions import joined_result, missing, refusal, requested_executions
from ..errors import InvalidArgument, NotFound, ResourceExhausted, WorkflowError
from ..interpreter.answers import error_value
from ..interpreter.waits import Wait
from .core import Core
from .inbox import Answer, WaitKey

Create = Callable[[str, str, WaitKey], object]  # workflow, argument, the wait of the parent


class SubExecutions:
    """Starts children, and answers a parent when its last child ends."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def start(self, id_: int, wait: Wait, create: Create) -> None:
        """Create the children that a call requests, in the transaction that records the wait."""
        parent = self._core.store.execution_by_id(id_)
        assert parent is not None
        key = (id_, wait.thread, wait.seq)
        try:
            for workflow, argument in requested_executions(wait, parent.name):
                create(workflow, argument, key)
            if not self._core.store.children(*key):
                self._put_after_commit(Answer(*key, []))
        except (NotFound, InvalidArgument, ResourceExhausted, WorkflowError) as error:
            failure = error if isinstance(error, WorkflowError) else refusal(error)
            self._put_after_commit(Answer(*key, error_value(failure), True))

    def recover(self) -> None:
        """Answer the parents whose children ended, or were refused, just before the engine did."""
        for id_, wait in self._core.store.waits_for_executions():
            parent = self._core.store.execution_by_id(id_)
            assert parent is not None
            key = (id_, wait.thread, wait.seq)
            children = self._core.store.children(*key)
            try:
                wanted = len(requested_executions(wait, parent.name))
            except WorkflowError as error:
                self._core.inbox.put(Answer(*key, error_value(error), True))
                continue
            if len(children) < wanted:
                self._core.inbox.put(Answer(*key, error_value(missing(wait)), True))
            elif all(child.is_finished for child in children):
                self._core.inbox.put(Answer(*key, *joined_result(wait, children)))

    def report_end(self, id_: int) -> None:
        """If the execution was the last child that its parent waits for, answer the parent."""
        parent = self._core.store.parent_of(id_)
        if parent is None:
            return
        children = self._core.store.children(*parent)
        if not all(child.is_finished for child in children):
            return
        wait = next((w for w in self._core.store.waits(parent[0]) if (w.thread, w.seq) == parent[1:]), None)
        if wait is not None:
            self._core.inbox.put(Answer(*parent, *joined_result(wait, children)))

    def _put_after_commit(self, answer: Answer) -> None:
        self._core.db.after_commit(lambda: self._core.inbox.put(answer))
