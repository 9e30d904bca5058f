"""The verify stage: whether training did what was asked. MaxText's exit code does not say so."""

from __future__ import annotations

import math
import sys
from typing import Any

from job import INTERNAL, JobError, data_error
from stages import Result, Work, stage_main

from dropforge.base.errors import ErrorClass


def run(work: Work) -> Result:
    """Find the checkpoint of the last step. Raises JobError when there is none, or a loss is not finite."""
    trained = work.done("train")
    check_trained(trained)
    parameters = work.checkpoints / str(trained["step"]) / "model_params"
    if not (parameters / "_METADATA").is_file():
        raise JobError(
            ErrorClass.CODE,
            INTERNAL,
            f"training ended at step {trained['step']} and left no checkpoint of it in {str(work.checkpoints)!r}",
            "nothing was published; the log of the train stage says what became of it",
        )
    return {"parameters": str(parameters)}


def check_trained(trained: dict[str, Any]) -> None:
    """Raises JobError unless the last step was reached, with a finite loss."""
    step, total = trained["step"], trained["total_steps"]
    if step < total:
        raise data_error(
            f"training ended at step {step} of {total}: the data ran out, or could not be read",
            "see the container's log, add rows, or lower training.max_steps",
        )
    for name in ("train_loss", "loss"):
        value = trained[name]
        if value is None and name == "train_loss":
            continue  # nothing was left to train in this attempt
        if value is None or not math.isfinite(value):
            raise JobError(
                ErrorClass.CODE,
                INTERNAL,
                f"the {name} after step {step} is {value}; expected a finite number",
                "lower training.learning_rate",
            )


if __name__ == "__main__":
    sys.exit(stage_main("verify", run))
