"""The verify stage: checks that training is complete. MaxText's exit code does not say so."""

from __future__ import annotations

import sys
from typing import Any

from containers.common.errors import code_error, data_error, finite

from .stages import stage_main
from .work import Result, Work


def run(work: Work) -> Result:
    """Find the checkpoint of the last step. Raises JobError if it is missing, or a loss is not finite."""
    trained = work.done("train")
    check_trained(trained)
    parameters = work.checkpoints / str(trained["step"]) / "model_params"
    if not (parameters / "_METADATA").is_file():
        raise code_error(
            f"training ended at step {trained['step']} and left no checkpoint of it in {str(work.checkpoints)!r}",
            "nothing was published; see the log of the train stage",
        )
    return {"parameters": str(parameters)}


def check_trained(trained: dict[str, Any]) -> None:
    """Raise JobError unless training reached the last step with a finite loss."""
    step, total = trained["step"], trained["total_steps"]
    if step < total:
        raise data_error(
            f"training ended at step {step} of {total}: the data ran out, or could not be read",
            "see the container's log, add rows, or lower training.max_steps",
        )
    for name in ("train_loss", "loss"):
        value = trained[name]
        if value is None and name == "train_loss":
            continue  # this attempt had no step left to train
        finite(value, f"the {name} after step {step}")


if __name__ == "__main__":
    sys.exit(stage_main("verify", run))
