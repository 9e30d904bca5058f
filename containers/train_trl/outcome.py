"""How an attempt, or one of its ranks, ended: what events and exit codes are made of."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from job import DONE, STOPPED, Job, JobError, Redactor, classify
from stop import Stopped, StopRequest

from dropforge.base.errors import ErrorClass
from dropforge.base.log import log

Reason = Literal["", "preempted", "deadline"]
_PATTERN = "outcome-{rank}.json"


@dataclass(frozen=True)
class Outcome:
    """`reason` is why it was stopped, `step` the last saved one. `agreed` is whether all ranks stopped together."""

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
    def is_news(self) -> bool:
        """Whether other machines cannot tell it: at most they see that ranks were lost."""
        if self.exit_code == STOPPED:
            return not self.agreed
        return self.exit_code != DONE and self.error_class != ErrorClass.INFRASTRUCTURE

    @property
    def error(self) -> JobError:
        """What failed, for an outcome that is neither done nor stopped."""
        return JobError(ErrorClass(self.error_class), self.exit_code, self.message, self.hint)

    def write(self, directory: Path, rank: int) -> None:
        """Leave it for the process that started the ranks: accelerate's launcher ends with 1 whatever happened."""
        path = directory / _PATTERN.format(rank=rank)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(path)


def outcome_of(run: Callable[[], Outcome], job: Job, stop: StopRequest, redact: Redactor) -> Outcome:
    """Run an attempt; whatever goes wrong is an outcome, and in the log."""
    try:
        return run()
    except Stopped as request:  # before there was anything to save, or while something else was being ended
        return Outcome.stopped(request.reason, 0, agreed=False)
    except Exception as error:  # noqa: BLE001  (whatever it is, the control plane is told what it means)
        stop.disarm()
        failure = classify(error)
        if not isinstance(error, JobError):
            print(redact(traceback.format_exc()), file=sys.stderr)
        log(redact(failure.message), stage="train", run=job.run, severity="ERROR", hint=redact(failure.hint))
        return Outcome.failed(failure)


def read_outcomes(directory: Path) -> dict[int, Outcome]:
    """By rank; a rank that was killed has none."""
    paths = directory.glob(_PATTERN.format(rank="*"))
    return {int(path.stem.partition("-")[2]): Outcome(**json.loads(path.read_text())) for path in paths}
