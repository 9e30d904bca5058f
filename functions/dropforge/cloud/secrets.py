"""Values of Secret Manager secrets."""

from __future__ import annotations

from dropforge.base import names

from .clients import TIMEOUT_SECONDS
from .context import Cloud


def read_secret(cloud: Cloud, secret: str) -> str:
    """The value of a secret, `name` or `name:version`. Raises LookupError, whose text never contains the value."""
    from google.api_core.exceptions import FailedPrecondition, Forbidden, NotFound

    project = cloud.settings.project
    name = names.secret_version(project, secret)
    try:
        payload = cloud.clients.secrets().access_secret_version(name=name, timeout=TIMEOUT_SECONDS).payload
    except (FailedPrecondition, Forbidden, NotFound) as error:
        raise LookupError(f"secret {secret!r} of project {project} cannot be read: {type(error).__name__}") from None
    try:
        return str(payload.data.decode()).strip()
    except UnicodeDecodeError:  # the text of the error repeats the value
        raise LookupError(f"secret {secret!r} of project {project} is not UTF-8 text") from None
