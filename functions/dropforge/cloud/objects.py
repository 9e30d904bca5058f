"""Objects of other writers: read one, never more than a limit and never decompressed; write one once."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from dropforge.base.errors import Conflict

from .clients import TIMEOUT_SECONDS


def read_at_most(blob: Any, limit: int, timeout: float = TIMEOUT_SECONDS, **options: Any) -> bytes | None:
    """The first `limit` bytes of an object; None if it does not exist. Raises client errors.

    `options` are further arguments of Blob.download_as_bytes. A compressed object stays compressed (`raw_download`),
    because its plain size is known only after the decompression.
    """
    from google.api_core.exceptions import NotFound, RequestRangeNotSatisfiable

    try:
        return bytes(blob.download_as_bytes(end=limit - 1, raw_download=True, timeout=timeout, **options))
    except NotFound:
        return None
    except RequestRangeNotSatisfiable:  # an empty object has no first byte
        return b""


def md5_of(data: bytes) -> str:
    """The MD5 digest in base64, as Cloud Storage gives it for an object."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def write_once(blob: Any, data: bytes, generation: int) -> None:
    """Write an object over `generation` (0: a new object); `blob` has the metadata, and the new generation on return.

    The client repeats an upload whose reply was lost. The precondition refuses the repetition, and the object with
    these bytes is the success of the first. Raises Conflict if another writer was faster, and client errors.
    """
    from google.api_core.exceptions import PreconditionFailed

    metadata = dict(blob.metadata or {})
    try:
        blob.upload_from_string(
            data, content_type="application/json", if_generation_match=generation, timeout=TIMEOUT_SECONDS
        )
    except PreconditionFailed:
        blob.reload(timeout=TIMEOUT_SECONDS)
        if blob.md5_hash != md5_of(data) or dict(blob.metadata or {}) != metadata:
            raise Conflict(f"gs://{blob.bucket.name}/{blob.name} was written by somebody else meanwhile") from None
