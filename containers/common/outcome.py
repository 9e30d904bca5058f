"""How an attempt, or one of its ranks, ended. The last event and the exit code follow from it."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from dropforge.base.errors import ErrorClass
from dropforge.base.log import log

from .errors import DONE, STOPPED, JobError, classify
from .job import Job
from .redactor import Redactor
from .stop import Stopped, StopRequest

Reason = Literal["", "preempted", "deadline"]
_PATTERN = "outcome-{rank}.json"


@dataclass(frozen=True)
class Outcome:
    """`reason` is why the attempt stopped, `step` its last saved step.

    `agreed` is whether all ranks stopped at the same step.
    """

    exit_code: int
    reason: Reason = ""
    step: int = 0
    agreed: bool = False
    error_class: str = ""
    message: str = ""
    hint: str = ""
    time: float = field(default_factory=time.time)

    @classmethod
    def done(cls) -> Outcome:
        return cls(DONE)

    @classmethod
    def stopped(cls, reason: Reason, step: int, agreed: bool) -> Outcome:
        return cls(STOPPED, reason, step, agreed)

    @classmethod
    def failed(cls, error: JobError) -> Outcome:
        return cls(error.exit_code, error_class=str(error.error_class), message=error.message, hint=error.hint)

    @property
    def is_local_news(self) -> bool:
        """Whether only this machine knows the outcome: other machines see at most that ranks were lost."""
        if self.exit_code == STOPPED:
            return not self.agreed
        return self.exit_code != DONE and self.error_class != ErrorClass.INFRASTRUCTURE

    @property
    def error(self) -> JobError:
        """The failure, for an outcome that is neither done nor stopped."""
        return JobError(ErrorClass(self.error_class), self.exit_code, self.message, self.hint)

    def write(self, directory: Path, rank: int) -> None:
        """Leave the outcome for the process that started the ranks: accelerate's launcher always ends with 1."""
        path = directory / _PATTERN.format(rank=rank)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(path)


def outcome_of(run: Callable[[], Outcome], job: Job, stop: StopRequest, redact: Redactor) -> Outcome:
    """Run an attempt. Turns every exception into an outcome, and logs it."""
    try:
        return run()
    except Stopped as request:  # before the first checkpoint, or while another outcome was in progress
        return Outcome.stopped(request.reason, 0, agreed=False)
    except Exception as error:  # noqa: BLE001  (the control plane gets the class of any error)
        stop.disarm()
        failure = classify(error)
        if not isinstance(error, JobError) or error.__cause__ is not None:  # the record says less than the log
            print(redact(traceback.format_exc()), file=sys.stderr)
        log(redact(failure.message), stage="train", run=job.run, severity="ERROR", hint=redact(failure.hint))
        return Outcome.failed(failure)


def read_outcomes(directory: Path) -> dict[int, Outcome]:
    """Outcomes by rank; a killed rank left none."""
    paths = directory.glob(_PATTERN.format(rank="*"))
    return {int(path.stem.partition("-")[2]): Outcome(**json.loads(path.read_text())) for path in paths}
