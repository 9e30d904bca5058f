"""Naming rules of buckets and objects (https://cloud.google.com/storage/docs/buckets#naming, .../objects#naming)."""

from __future__ import annotations

import re

from .errors import invalid

MAX_OBJECT_NAME_BYTES = 1024
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")
_IP_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")


def check_bucket_name(name: str) -> None:
    """Raise 400 unless Cloud Storage would accept `name` for a new bucket."""
    parts = name.split(".")
    well_formed = (
        3 <= len(name) <= (222 if len(parts) > 1 else 63)
        and _BUCKET.fullmatch(name)
        and all(part and len(part) <= 63 and not part.startswith("-") and not part.endswith("-") for part in parts)
        and not _IP_ADDRESS.fullmatch(name)
    )
    if not well_formed:
        raise invalid(
            f"Invalid bucket name: {name!r}; expected 3 to 63 characters of a-z, 0-9, '-', '_' and '.', "
            "beginning and ending with a letter or digit, and not an IP address"
        )
    if name.startswith("goog") or "google" in name or "g00gle" in name:
        raise invalid(f"Invalid bucket name: {name!r}; a name may not begin with 'goog' nor contain 'google'")


def check_object_name(name: str) -> None:
    """Raise 400 unless Cloud Storage would accept `name` for a new object."""
    if not name:
        raise invalid("Required parameter: name (of the object)", "required")
    size = len(name.encode())
    if size > MAX_OBJECT_NAME_BYTES:
        raise invalid(f"The object name is {size} bytes long; expected at most {MAX_OBJECT_NAME_BYTES} in UTF-8")
    if name in (".", "..") or "\r" in name or "\n" in name or name.startswith(".well-known/acme-challenge/"):
        raise invalid(
            f"Invalid object name: {name!r}; expected no carriage return or line feed, "
            "and neither '.', '..' nor a name under .well-known/acme-challenge/"
        )
