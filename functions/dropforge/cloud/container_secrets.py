"""Secrets of a container whose platform cannot inject Secret Manager's values (GKE, TPU VM, Ray), read by reference.

    DROPFORGE_SECRETS={"HF_TOKEN": "projects/p/secrets/hf-token/versions/latest"}

The control plane writes the references; the container's own service account reads the values, so that no manifest, no
startup script and no process list has them. Cloud Run injects values by itself and sets no such variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping

from dropforge.base.errors import CloudError, ErrorClass

VARIABLE = "DROPFORGE_SECRETS"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+")


def load_secrets(environ: MutableMapping[str, str]) -> None:
    """Put the value of every secret that DROPFORGE_SECRETS names into `environ`; without the variable, do nothing.

    Raises CloudError, naming variable and secret but never a value, and leaves `environ` as it was: CONFIG when
    DROPFORGE_SECRETS is malformed, or a version is not there or not enabled; PERMISSION when it may not be read.
    Other failures of Secret Manager are raised as google.api_core raises them, and may pass.
    """
    if text := environ.get(VARIABLE):
        environ.update({name: _read(name, reference) for name, reference in _parse(text).items()})


def _parse(text: str) -> dict[str, str]:
    try:
        references = json.loads(text)
    except ValueError as error:
        raise _malformed(f"not JSON: {error}") from None
    if not isinstance(references, dict):
        raise _malformed(f"a JSON {type(references).__name__}")
    for name, reference in references.items():
        if not _NAME.fullmatch(name):
            raise _malformed(f"the variable name {name!r} in it")
        if not (isinstance(reference, str) and _REFERENCE.fullmatch(reference)):
            # Somebody may have written the value itself.
            raise _malformed(f"something else for {name}")
    return references


def _read(name: str, reference: str) -> str:
    from google.api_core.exceptions import BadRequest, Forbidden, NotFound, Unauthorized

    from . import clients

    try:
        data = clients.secrets().access_secret_version(name=reference, timeout=clients.TIMEOUT_SECONDS).payload.data
    except (Forbidden, Unauthorized):
        hint = "grant the container's service account roles/secretmanager.secretAccessor on the secret"
        raise CloudError(ErrorClass.PERMISSION, f"{reference}, for {name}, may not be read", hint) from None
    except NotFound:
        hint = "create the secret and a version of it, or mend the spec's `secrets`"
        raise CloudError(ErrorClass.CONFIG, f"{reference}, for {name}, does not exist", hint) from None
    except BadRequest as error:  # Google's text for a version that is disabled or destroyed says which
        hint = "enable the version, or add one"
        raise CloudError(ErrorClass.CONFIG, f"{reference}, for {name}, cannot be read: {error.message}", hint) from None
    try:
        value = str(data.decode())
    except UnicodeDecodeError:  # its text repeats the value
        value = "\0"
    if "\0" in value:
        hint = "environment variables hold text; keep other data in a bucket"
        raise CloudError(ErrorClass.CONFIG, f"{reference}, for {name}, is not UTF-8 text", hint)
    return value


def _malformed(found: str) -> CloudError:
    expected = "a JSON object of variable names and projects/P/secrets/S/versions/V"
    return CloudError(ErrorClass.CONFIG, f"{VARIABLE} is {found}; expected {expected}", "the control plane sets it")
