"""Request preconditions: the state that an object or bucket must have for a request to proceed.

A failed `...Match` is 412 and a failed `...NotMatch` is 304, on every verb
(https://cloud.google.com/storage/docs/request-preconditions).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .errors import invalid, not_modified, precondition_failed


def etag_of(generation: int | None, metageneration: int) -> str:
    """The etag as Cloud Storage makes it: base64 of a protobuf with generation (field 1) and metageneration (2)."""
    numbers = [metageneration] if generation is None else [generation, metageneration]
    encoded = b"".join(bytes([field << 3]) + _varint(number) for field, number in enumerate(numbers, 1))
    return base64.b64encode(encoded).decode()


def parse_int64(value: str, parameter: str) -> int:
    """A decimal int64 from a query parameter; 400 otherwise."""
    try:
        number = int(value) if len(value) <= 20 and value.isascii() and "_" not in value else None
    except ValueError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise invalid(f"Invalid value for {parameter}: {value!r}; expected a 64-bit integer", "invalidParameter")
    return number


@dataclass(frozen=True)
class Preconditions:
    """Conditions on the current generation, metageneration and etag. A field that is None sets no condition."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None
    etag_match: str | None = None
    etag_none_match: str | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str], side: str = "") -> Preconditions:
        """Read `if<side>GenerationMatch` and so on; `side` is "Source" for the source of a copy."""

        def number(name: str) -> int | None:
            value = query.get(name)
            return None if value is None else parse_int64(value, name)

        # google-cloud-storage 3.17.1 writes ifMetaGenerationNotMatch on uploads.
        misspelt = number(f"if{side}MetaGenerationNotMatch")
        correct = number(f"if{side}MetagenerationNotMatch")
        return cls(
            number(f"if{side}GenerationMatch"),
            number(f"if{side}GenerationNotMatch"),
            number(f"if{side}MetagenerationMatch"),
            misspelt if correct is None else correct,
        )

    @classmethod
    def of_read(cls, query: Mapping[str, str], headers: Mapping[str, str]) -> Preconditions:
        """As `from_query`, with If-Match and If-None-Match, which the JSON API takes on reads only."""
        conditions = cls.from_query(query)
        return replace(conditions, etag_match=headers.get("If-Match"), etag_none_match=headers.get("If-None-Match"))

    def check(self, generation: int | None, metageneration: int) -> None:
        """Raise 412 or 304 unless the conditions hold for an existing resource; `generation` is None for a bucket."""
        etag = etag_of(generation, metageneration)
        if generation is not None:
            _must_equal("ifGenerationMatch", self.generation_match, "generation", generation)
        _must_equal("ifMetagenerationMatch", self.metageneration_match, "metageneration", metageneration)
        if self.etag_match is not None and not _names_etag(self.etag_match, etag):
            raise precondition_failed(f"If-Match is {self.etag_match!r}, the etag is {etag!r}.")
        if generation is not None and self.generation_not_match == generation:
            raise not_modified(f"ifGenerationNotMatch is the current generation, {generation}.")
        if self.metageneration_not_match == metageneration:
            raise not_modified(f"ifMetagenerationNotMatch is the current metageneration, {metageneration}.")
        if self.etag_none_match is not None and _names_etag(self.etag_none_match, etag):
            raise not_modified(f"If-None-Match names the current etag, {etag!r}.")

    def check_absent(self) -> None:
        """Raise 412 or 304 unless the conditions allow a new object where no live object exists."""
        _must_equal("ifGenerationMatch", self.generation_match, "generation", 0)
        _must_equal("ifMetagenerationMatch", self.metageneration_match, "metageneration", 0)
        if self.generation_not_match is not None:
            # "If no live object exists, the precondition fails" (storage.v1 discovery, objects.insert).
            raise not_modified(f"ifGenerationNotMatch is {self.generation_not_match}, and no live object exists.")


def _must_equal(parameter: str, wanted: int | None, field: str, actual: int) -> None:
    if wanted is not None and wanted != actual:
        raise precondition_failed(f"{parameter} is {wanted}, the current {field} is {actual}.")


def _names_etag(header: str, etag: str) -> bool:
    names = {name.strip().removeprefix("W/").strip('"') for name in header.split(",")}
    return "*" in names or etag in names


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
