"""Secrets of a container whose platform cannot inject values of Secret Manager (GKE, TPU VM, Ray).

    DROPFORGE_SECRETS={"HF_TOKEN": "projects/p/secrets/hf-token/versions/latest"}

The control plane writes references; the container's service account reads the values. So no manifest, startup script or
process list contains a value. Cloud Run injects values itself and does not set this variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from dropforge.base.errors import CloudError, ErrorClass

if TYPE_CHECKING:  # without the variable, nothing more is imported
    from .clients import Clients

VARIABLE = "DROPFORGE_SECRETS"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+")


def load_secrets(clients: Clients, environ: MutableMapping[str, str]) -> None:
    """Put the value of every secret that DROPFORGE_SECRETS names into `environ`; do nothing without the variable.

    Raises CloudError and leaves `environ` unchanged: CONFIG if DROPFORGE_SECRETS is malformed, or if a version does not
    exist or is not enabled; PERMISSION if the container may not read it. The error names variable and secret, never a
    value. A failure that may pass is waited for; then it is raised as google.api_core raises it.
    """
    if text := environ.get(VARIABLE):
        values = {name: _read(clients, name, reference) for name, reference in _parse(text).items()}
        environ.update(values)


def _parse(text: str) -> dict[str, str]:
    try:
        references = json.loads(text)
    except ValueError as error:
        raise _malformed(f"not JSON: {error}") from None
    if not isinstance(references, dict):
        raise _malformed(f"a JSON {type(references).__name__}")
    for name, reference in references.items():
        if not _NAME.fullmatch(name):
            raise _malformed(f"a map with the variable name {name!r}")
        if not (isinstance(reference, str) and _REFERENCE.fullmatch(reference)):
            # The error must not repeat the text: it may be the secret value itself.
            raise _malformed(f"not a reference for {name}")
    return references


def _read(clients: Clients, name: str, reference: str) -> str:
    from google.api_core.exceptions import BadRequest, Forbidden, NotFound, Unauthorized

    from .clients import TIMEOUT_SECONDS

    try:
        ask = clients.secrets().access_secret_version
        data = ask(name=reference, timeout=TIMEOUT_SECONDS, retry=clients.retrying.policy()).payload.data
    except (Forbidden, Unauthorized):
        hint = "grant the container's service account roles/secretmanager.secretAccessor on the secret"
        raise CloudError(ErrorClass.PERMISSION, f"{reference}, for {name}, may not be read", hint) from None
    except NotFound:
        hint = "create the secret and a version, or correct the spec's `secrets`"
        raise CloudError(ErrorClass.CONFIG, f"{reference}, for {name}, does not exist", hint) from None
    except BadRequest as error:  # Google's message says whether the version is disabled or destroyed
        hint = "enable the version, or add a new version"
        raise CloudError(ErrorClass.CONFIG, f"{reference}, for {name}, cannot be read: {error.message}", hint) from None
    try:
        value = str(data.decode())
    except UnicodeDecodeError:  # the text of the error repeats the value
        value = "\0"
    if "\0" in value:
        hint = "environment variables hold text; keep other data in a bucket"
        raise CloudError(ErrorClass.CONFIG, f"{reference}, for {name}, is not UTF-8 text", hint)
    return value


def _malformed(problem: str) -> CloudError:
    expected = "a JSON object of variable names and projects/P/secrets/S/versions/V"
    return CloudError(ErrorClass.CONFIG, f"{VARIABLE} is {problem}; expected {expected}", "the control plane sets it")
