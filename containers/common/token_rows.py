"""Rows of token ids in one array: a million rows of 200 tokens take 0.8 GB, and 7 GB as lists of integers.

The array is a file on the disk that is mapped, so its pages need no memory of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]
Starts = np.ndarray[Any, np.dtype[np.int64]]


class Column:
    """Numbers that are written to a file without a name, and then mapped: the memory does not grow with them."""

    def __init__(self, directory: Path | None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (`with` closes it)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file; the array stays."""
        self._file.close()

    def add(self, values: Ints) -> None:
        values.astype(np.int32, copy=False).tofile(self._file)

    def mapped(self) -> Ints:
        """All numbers; the disk is free again when the array is."""
        self._file.flush()
        if not self._file.tell():
            return np.empty(0, np.int32)
        mapped: Ints = np.memmap(self._file, np.int32, "r")
        return mapped


class TokenRows(Sequence[list[int]]):
    """Row i is values[starts[i]:starts[i + 1]], so there is one start more than rows."""

    def __init__(self, values: Ints, starts: Starts) -> None:
        self.values = values[starts[0] : starts[-1]]
        self.starts = starts - starts[0]

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | Ints]) -> TokenRows:
        arrays = [np.asarray(row, np.int32) for row in rows]
        starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.empty(0, np.int32), starts)

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in np.diff(self.starts)]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Ints:
        """A row without a copy."""
        return self.values[self.starts[index] : self.starts[index + 1]]

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> TokenRows: ...

    def __getitem__(self, index: int | slice) -> list[int] | TokenRows:
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return [int(value) for value in self.row(chosen)]
        if chosen.step != 1:
            return TokenRows.of(self[row] for row in chosen)
        return TokenRows(self.values, self.starts[chosen.start : max(chosen.start, chosen.stop) + 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenRows):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]
