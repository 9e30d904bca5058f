"""The status that startup.sh writes when its container ends. Any container's account may write any text there.

A text that is not such a status, or has no proof of its run, counts as no status. Then the machine's state and the job
events decide.
"""

from __future__ import annotations

from pydantic import AwareDatetime, BaseModel, ConfigDict

from dropforge.base.changes import evolve
from dropforge.base.errors import ErrorClass
from dropforge.base.redact import cut
from dropforge.cloud.context import Cloud
from dropforge.cloud.objects import read_at_most
from dropforge.run.proof import is_document_proved

MAX_STATUS_BYTES = 64 * 1024  # the script cuts its texts at a few thousand characters
MAX_MESSAGE = 4000


class Written(BaseModel):
    """A status.json. Its `error_class` is None for an end that the container has published itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: str
    attempt: int
    time: AwareDatetime
    exit_code: int | None
    error_class: ErrorClass | None
    message: str


def read_written(cloud: Cloud, bucket: str, name: str, run: str, attempt: int, key: str) -> Written | None:
    """The status that a machine has written in `name`; None before, and for another text. Raises client errors."""
    data = read_at_most(cloud.clients.storage().bucket(bucket).blob(name), MAX_STATUS_BYTES)
    if data is None:
        return None
    try:
        if not is_document_proved(key, name, data):
            raise ValueError("it has no proof of its run")
        written = Written.model_validate_json(data)
        if (written.run, written.attempt) != (run, attempt):
            raise ValueError(f"it is about attempt {written.attempt} of run {cut(written.run, 80)!r}")
    except ValueError as error:
        message, problem = "a machine's status is not readable", cut(str(error), 300)
        cloud.log(message, stage="await", run=run, severity="WARNING", resource=name, problem=problem)
        return None
    return evolve(written, message=cut(written.message, MAX_MESSAGE))
