"""Read an object that a container may have written: never more than a limit, and never decompressed."""

from __future__ import annotations

from typing import Any

from .clients import TIMEOUT_SECONDS


def read_at_most(blob: Any, limit: int, timeout: float = TIMEOUT_SECONDS) -> bytes | None:
    """The first `limit` bytes of an object; None if it does not exist. Raises client errors.

    `raw_download`: a compressed object stays compressed, because its plain size is known only after it is too late.
    """
    from google.api_core.exceptions import NotFound, RequestRangeNotSatisfiable

    try:
        return bytes(blob.download_as_bytes(end=limit - 1, raw_download=True, timeout=timeout))
    except NotFound:
        return None
    except RequestRangeNotSatisfiable:  # an empty object has no first byte
        return b""
