"""Exit codes of a training container, and the error class and exit code of any exception."""

from __future__ import annotations

import math
import re
import traceback
from pathlib import Path
from typing import Any

from dropforge.base.errors import CloudError, DropforgeError, ErrorClass, InvalidSpec, NotFound
from dropforge.cloud import classify as google

SEE_LOG = "see the container's log for the whole error"
DIVERGED = "the training diverged: lower training.learning_rate, or look for malformed rows"
DONE = 0
BAD_CONFIG = 64
BAD_DATA = 65
NOT_FOUND = 66  # or no permission
INTERNAL = 70
STOPPED = 75  # preempted or past the deadline: resume from the last checkpoint
OUT_OF_MEMORY = 76


class JobError(DropforgeError):
    """Training cannot continue; `error_class` says whether another attempt may help."""

    def __init__(self, error_class: ErrorClass, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.error_class = error_class
        self.exit_code = exit_code
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return JobError, (self.error_class, self.exit_code, self.message, self.hint)  # between processes

    def to_json(self) -> dict[str, Any]:
        """The error as another process reads it; see `from_json`."""
        return {
            "error_class": str(self.error_class),
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
        }

    @classmethod
    def from_json(cls, error: dict[str, Any]) -> JobError:
        return cls(ErrorClass(error["error_class"]), error["exit_code"], error["message"], error["hint"])


def config_error(message: str, hint: str = "correct the job spec and drop it again") -> JobError:
    return JobError(ErrorClass.CONFIG, BAD_CONFIG, message, hint)


def data_error(message: str, hint: str = "correct the data set and drop the job spec again") -> JobError:
    return JobError(ErrorClass.DATA, BAD_DATA, message, hint)


def missing(message: str, hint: str) -> JobError:
    return JobError(ErrorClass.CONFIG, NOT_FOUND, message, hint)


def forbidden(message: str, hint: str) -> JobError:
    return JobError(ErrorClass.PERMISSION, NOT_FOUND, message, hint)


def code_error(message: str, hint: str) -> JobError:
    """A defect of the training code, or training that diverged: another attempt does not help."""
    return JobError(ErrorClass.CODE, INTERNAL, message, hint)


def finite(value: float | None, what: str, hint: str = DIVERGED) -> float:
    """The value. Raises JobError for NaN, infinities and None: a comparison with NaN is always false."""
    if value is None or not math.isfinite(value):
        raise code_error(f"{what} is {value}; expected a finite number", hint)
    return value


def infrastructure_error(message: str, hint: str) -> JobError:
    """A machine or process was lost: the run continues in another attempt."""
    return JobError(ErrorClass.INFRASTRUCTURE, INTERNAL, message, hint)


def out_of_memory(message: str) -> JobError:
    hint = "lower training.per_device_train_batch_size or training.max_length, set training.gradient_checkpointing, "
    return JobError(ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY, message, hint + "or use a qlora adapter")


def classify(error: Exception) -> JobError:
    """The JobError that stands for any exception. An unknown exception is an error of the code."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, InvalidSpec):
        return config_error(str(error))
    if isinstance(error, CloudError):
        return JobError(error.error_class, _EXIT_CODES.get(error.error_class, INTERNAL), error.message, error.hint)
    names, text = {kind.__name__ for kind in type(error).__mro__}, f"{type(error).__name__}: {error}"
    known = _classify_library_error(names, text) or _classify_lost_rank(error, names)
    return known or _classify_request(error, text) or _unknown(error, names)


def _classify_library_error(names: set[str], text: str) -> JobError | None:
    """By class name: this module then need not import torch or huggingface_hub."""
    if names & {"OutOfMemoryError", "MemoryError"}:
        return out_of_memory(text)
    if names & {"GatedRepoError"}:
        return forbidden(text, "accept the licence on the Hub and name a token in `secrets`: HF_TOKEN")
    if names & {"LocalEntryNotFoundError"}:  # neither cached nor downloaded; a subclass of EntryNotFoundError
        return JobError(ErrorClass.TRANSIENT, INTERNAL, text, "the Hugging Face Hub was not reached")
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"}:
        return missing(text, "check the id and the revision; a private repository needs a token in `secrets`: HF_TOKEN")
    if names & {"HfHubHTTPError", "OfflineModeIsEnabled"}:
        return JobError(ErrorClass.TRANSIENT, INTERNAL, text, _AGAIN)
    return None


def _classify_lost_rank(error: Exception, names: set[str]) -> JobError | None:
    gloo = _GLOO.search(str(error))
    if names & _LOST or gloo:
        text = gloo[0] if gloo else str(error)
        hint = "another rank was lost; dropforge tries the run again"
        return infrastructure_error(f"{type(error).__name__}: {text}", hint)
    return None


def _classify_request(error: Exception, text: str) -> JobError | None:
    """The failure of a request, in the class that it has in the functions. None for another error."""
    if isinstance(error, NotFound):
        return missing(text, _ABSENT)
    if not google.is_client_error(error):
        return None
    error_class = google.classify(error).error_class
    if error_class is ErrorClass.PERMISSION:
        return forbidden(text, "grant the training service account access to the resource that the message names")
    if error_class is ErrorClass.CONFIG:
        return missing(text, _ABSENT) if google.status_of(error) == "NOT_FOUND" else config_error(text)
    # Also for a quota and a stock-out: no container asks for machines, so its request was one too many at that moment.
    return JobError(ErrorClass.TRANSIENT, INTERNAL, text, _AGAIN)


def _unknown(error: Exception, names: set[str]) -> JobError:
    """An error of the code, without its text: a library may quote a training row in it.

    The text is in the container's log, with the traceback.
    """
    if "TemplateError" in names:
        return config_error(f"the model's chat template fails: {place_of(error)}", SEE_LOG)
    return code_error(place_of(error), SEE_LOG)


def place_of(error: BaseException) -> str:
    """The type of an error and the place that raised it: `ValueError at trl/trainer/sft_trainer.py:120 in _prepare`."""
    name, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    if not frames:
        return name
    return f"{name} at {'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno} in {frames[-1].name}"


_EXIT_CODES = {ErrorClass.CONFIG: BAD_CONFIG, ErrorClass.PERMISSION: NOT_FOUND}

_AGAIN, _ABSENT = "a temporary failure; dropforge tries the run again", "check the URI and that the object exists"

# A collective that another rank did not finish. NCCL raises types of its own; gloo raises RuntimeError.
_LOST = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_GLOO = re.compile(r"gloo/transport|Connection closed by peer")
