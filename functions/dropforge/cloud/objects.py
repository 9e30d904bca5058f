"""Read an object that a container may have written: never more than a limit, and never decompressed."""

from __future__ import annotations

from typing import Any

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
