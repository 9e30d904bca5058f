"""Updates by a field mask (https://google.aip.dev/134)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from google.protobuf import field_mask_pb2

from dropforge_local.base.errors import ApiError


def merge(source: Any, target: Any, mask: field_mask_pb2.FieldMask, mutable: Collection[str]) -> None:
    """Replace the fields in `mask` by those of `source`. Raises INVALID_ARGUMENT unless each field is in `mutable`."""
    if not mask.paths:
        raise ApiError("INVALID_ARGUMENT", "update_mask is empty; expected the fields to change")
    for path in mask.paths:
        if path.partition(".")[0] not in mutable:
            raise ApiError("INVALID_ARGUMENT", f"update_mask names {path!r}; expected one of {sorted(mutable)}")
    try:
        mask.MergeMessage(source, target, replace_message_field=True, replace_repeated_field=True)
    except ValueError as error:
        raise ApiError("INVALID_ARGUMENT", f"invalid update_mask: {error}") from error
