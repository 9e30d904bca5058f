"""Exit codes of a training container, and the error class and exit code of any exception."""

from __future__ import annotations

import re
from typing import Any

from dropforge.base.errors import CloudError, DropforgeError, ErrorClass, InvalidSpec

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
    names = {kind.__name__ for kind in type(error).__mro__}
    return _classify_library_error(names, _text(error)) or _classify_passing_error(names, _text(error))


def _classify_library_error(names: set[str], text: str) -> JobError | None:
    """Errors that the user or the operator can mend.

    By class name: this module then need not import torch, huggingface_hub or google.api_core.
    """
    if names & {"OutOfMemoryError", "MemoryError"}:
        return out_of_memory(text)
    if names & {"GatedRepoError"}:
        return forbidden(text, "accept the licence on the Hub and name a token in `secrets`: HF_TOKEN")
    if names & {"LocalEntryNotFoundError"}:  # neither cached nor downloaded; a subclass of EntryNotFoundError
        return JobError(ErrorClass.TRANSIENT, INTERNAL, text, "the Hugging Face Hub was not reached")
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"}:
        return missing(text, "check the id and the revision; a private repository needs a token in `secrets`: HF_TOKEN")
    if names & {"Forbidden", "Unauthorized", "GoogleAuthError"}:
        return forbidden(text, "grant the training service account access to the resource that the message names")
    if "NotFound" in names:
        return missing(text, "check the URI and that the object exists")
    if "TemplateError" in names:
        return config_error(f"the model's chat template fails: {text}")
    return None


def _classify_passing_error(names: set[str], text: str) -> JobError:
    if names & _LOST or _GLOO.search(text):
        return infrastructure_error(text, "another rank was lost; dropforge tries the run again")
    if names & _PASSING:
        return JobError(ErrorClass.TRANSIENT, INTERNAL, text, "a temporary failure; dropforge tries the run again")
    return code_error(text, "see the container's log for the traceback")


_EXIT_CODES = {ErrorClass.CONFIG: BAD_CONFIG, ErrorClass.PERMISSION: NOT_FOUND}

# A broken connection or a failing server: Google's clients, requests, and httpx below the Hub's client.
_PASSING = {
    "GoogleAPICallError",
    "RetryError",
    "RequestException",
    "TransportError",
    "HfHubHTTPError",
    "OfflineModeIsEnabled",
}

# A collective that another rank did not finish. NCCL raises types of its own; gloo raises RuntimeError.
_LOST = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_GLOO = re.compile(r"gloo/transport|Connection closed by peer")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:3000]
