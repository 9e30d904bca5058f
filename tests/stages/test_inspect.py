"""A call of stage `await` that is slow: it decides only about the attempt that it looked at."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dropforge.base.clock import utc_now
from dropforge.base.errors import ErrorClass
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.training import Phase, Status
from dropforge.run.record import Record, RunError
from dropforge.run.store import RunStore
from dropforge.stages.await_ import inspect as stage

from ..deployments import SETTINGS, Memory, context_with
from ..platforms.shared import ME, make_run
from .test_job_events import SPEC

LOST = RunError(error_class=ErrorClass.INFRASTRUCTURE, message="its machine was lost")
ENDED = Status(Phase.FAILED, "exit code 70", ErrorClass.CODE, 70, utc_now() - timedelta(hours=1))
RUNS = Status(Phase.RUNNING)


class Target:
    """A target whose status takes so long that `meanwhile` happens before the answer."""

    def __init__(self, status: Status, meanwhile: Callable[[], object]) -> None:
        self.status = status
        self.meanwhile = meanwhile

    def inspect(self, *_: Any) -> Status:
        self.meanwhile()
        return self.status


def retried(record: Record) -> Record:
    """The record after another call has ended the first attempt, and `provision` has opened the second."""
    now = utc_now()
    opened = record.attempts[0].model_copy(update={"number": 2, "started": now, "seen": now - timedelta(hours=1)})
    ended = record.with_end(1, LOST, now)
    return ended.model_copy(update={"attempts": [*ended.attempts, opened]})


@pytest.mark.parametrize("status", [ENDED, RUNS], ids=["ended", "stuck"])
def test_a_call_about_an_earlier_attempt_does_not_end_the_present_one(status: Status) -> None:
    """Chaos seed 2522: the call hung, the workflow went on, and the call then ended the second attempt as stuck."""
    memory = Memory()
    store = RunStore(memory, SETTINGS.runs_bucket)
    run = make_run(store, {**SPEC, "limits": {"stuck_after": "10m", "on_stuck": "fail"}})
    target: Any = Target(status, lambda: store.update(run, retried))
    context = context_with(storage=memory, platforms=Platforms(target=lambda _: target))
    answer = stage.inspect(context, run, ME, 1, "https://callback")
    assert answer.status == "SUPERSEDED"
    first, second = store.record(run).attempts
    assert (first.error, second.error, second.ended) == (LOST, None, None)
