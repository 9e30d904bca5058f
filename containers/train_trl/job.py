"""What the container is told by its environment, and how it says how it ended."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import redacted_output
from world import World, read_world

from dropforge.base.errors import CloudError, DropforgeError, ErrorClass, InvalidSpec
from dropforge.base.redact import TOKEN, redact

DONE = 0
BAD_CONFIG = 64
BAD_DATA = 65
NOT_FOUND = 66  # or no permission
INTERNAL = 70
STOPPED = 75  # preempted, or out of time: resume from the last checkpoint
OUT_OF_MEMORY = 76

GRACE_SECONDS = 10  # Cloud Run's, from SIGTERM to SIGKILL

_RUN = re.compile(r"[a-z][a-z0-9-]{0,48}")


class JobError(DropforgeError):
    """Training cannot go on; `error_class` says whether another attempt may help, `exit_code` how to end."""

    def __init__(self, error_class: ErrorClass, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.error_class = error_class
        self.exit_code = exit_code
        self.message = message
        self.hint = hint


def config_error(message: str, hint: str = "correct the job spec and drop it again") -> JobError:
    return JobError(ErrorClass.CONFIG, BAD_CONFIG, message, hint)


def data_error(message: str, hint: str = "correct the data set and drop the job spec again") -> JobError:
    return JobError(ErrorClass.DATA, BAD_DATA, message, hint)


def missing(message: str, hint: str) -> JobError:
    return JobError(ErrorClass.CONFIG, NOT_FOUND, message, hint)


def forbidden(message: str, hint: str) -> JobError:
    return JobError(ErrorClass.PERMISSION, NOT_FOUND, message, hint)


def out_of_memory(message: str) -> JobError:
    hint = "lower training.per_device_train_batch_size or training.max_length, set training.gradient_checkpointing, "
    return JobError(ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY, message, hint + "or use a qlora adapter")


@dataclass(frozen=True)
class Job:
    """One attempt of one run. `topic` is empty when nobody listens; `deadline` is in Unix seconds.

    `grace_seconds` are between SIGTERM and SIGKILL.
    """

    project: str
    run: str
    attempt: int
    bucket: str
    topic: str
    deadline: float | None
    grace_seconds: float
    world: World = field(default_factory=World)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Job:
        """Raises JobError naming every variable that is missing or malformed."""
        problems = [f"{name} is not set" for name in _REQUIRED if not environ.get(name)]
        run, attempt = environ.get("DROPFORGE_RUN", ""), environ.get("DROPFORGE_ATTEMPT", "")
        deadline, grace = environ.get("DROPFORGE_DEADLINE", ""), environ.get("DROPFORGE_GRACE_SECONDS", "")
        if run and not _RUN.fullmatch(run):
            problems.append(f"DROPFORGE_RUN is {run!r}; expected a run id")
        if attempt and not (attempt.isdecimal() and 1 <= int(attempt) <= 1000):
            problems.append(f"DROPFORGE_ATTEMPT is {attempt!r}; expected 1 to 1000")
        if deadline and not re.fullmatch(r"\d+(\.\d+)?", deadline):
            problems.append(f"DROPFORGE_DEADLINE is {deadline!r}; expected Unix seconds")
        if grace and not re.fullmatch(r"\d{1,4}", grace):
            problems.append(f"DROPFORGE_GRACE_SECONDS is {grace!r}; expected whole seconds")
        world = read_world(environ, problems)
        if problems:
            raise config_error("; ".join(problems), "the control plane sets these variables")
        return cls(
            project=environ["DROPFORGE_PROJECT"],
            run=run,
            attempt=int(attempt),
            bucket=environ["DROPFORGE_RUNS_BUCKET"],
            topic=environ.get("DROPFORGE_JOB_EVENTS_TOPIC", ""),
            deadline=float(deadline) if deadline else None,
            grace_seconds=float(grace or GRACE_SECONDS),
            world=world,
        )


_REQUIRED = ("DROPFORGE_PROJECT", "DROPFORGE_RUN", "DROPFORGE_ATTEMPT", "DROPFORGE_RUNS_BUCKET")


class Redactor:
    """Takes credentials out of text: what looks like one, and the values of the spec's own secrets."""

    def __init__(self) -> None:
        self._values: list[str] = []
        self._forms: list[str] = []

    def learn(self, names: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
        """Remember the values of the environment variables in `names` (the spec's `secrets`)."""
        self._values += [environ[name] for name in names if environ.get(name)]
        self._forms = [form for value in self._values for form in redacted_output.forms(value)]

    def guard_output(self) -> None:
        """From here on, take them out of what this process and its children print, too."""
        if self._values:
            redacted_output.start(self._values, TOKEN.pattern)

    def __call__(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, "[redacted]")
        return redact(text)


def classify(error: Exception) -> JobError:
    """What any exception means for the run. Unknown ones are errors of the code."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, InvalidSpec):
        return config_error(str(error))
    if isinstance(error, CloudError):
        return JobError(error.error_class, _EXIT_CODES.get(error.error_class, INTERNAL), error.message, error.hint)
    names = {kind.__name__ for kind in type(error).__mro__}
    # By name: torch, huggingface_hub and google.api_core need not be imported to tell their errors apart.
    if names & {"OutOfMemoryError", "MemoryError"}:
        return out_of_memory(_text(error))
    if names & {"GatedRepoError"}:
        return forbidden(_text(error), "accept the licence on the Hub and name a token in `secrets`: HF_TOKEN")
    if names & {"LocalEntryNotFoundError"}:  # not cached, and the Hub not reached
        return JobError(ErrorClass.TRANSIENT, INTERNAL, _text(error), "the Hugging Face Hub was not reached")
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"}:
        hint = "check the id and the revision; a private repository needs a token in `secrets`: HF_TOKEN"
        return missing(_text(error), hint)
    if names & {"Forbidden", "Unauthorized", "GoogleAuthError"}:
        return forbidden(_text(error), "grant the training service account access to what the message names")
    if "NotFound" in names:
        return missing(_text(error), "check the URI and that the object exists")
    if "TemplateError" in names:
        return config_error(f"the model's chat template refuses the rows: {_text(error)}")
    if names & _LOST or _GLOO.search(str(error)):
        return JobError(ErrorClass.INFRASTRUCTURE, INTERNAL, _text(error), "another rank was lost; it is tried again")
    if names & _PASSING:
        return JobError(ErrorClass.TRANSIENT, INTERNAL, _text(error), "this passes by itself; it is tried again")
    return JobError(ErrorClass.CODE, INTERNAL, _text(error), "see the container's log for the traceback")


_EXIT_CODES = {ErrorClass.CONFIG: BAD_CONFIG, ErrorClass.PERMISSION: NOT_FOUND}

# A connection that broke, a server that failed: Google's clients, requests and httpx under the Hub's client.
_PASSING = {
    "GoogleAPICallError",
    "RetryError",
    "RequestException",
    "TransportError",
    "HfHubHTTPError",
    "OfflineModeIsEnabled",
}

# A collective that another rank did not finish. NCCL's have types of their own, gloo's are RuntimeErrors.
_LOST = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_GLOO = re.compile(r"gloo/transport|Connection closed by peer")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:3000]
