"""Writes the state of an execution as text, and reads it back.

A value of `REFERENCE_BYTES` or more is stored beside the state, and only once while it does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..language.program import Program
from ..values import UNSET, Sizer, Value, decode_value, encode_value
from .threads import Frame, Join, Thread

REFERENCE_BYTES: Final = 4096


class Snapshots:
    """The snapshots of an execution. `write` and `read` are inverse."""

    def __init__(self, program: Program, sizer: Sizer) -> None:
        self._program = program
        self._sizer = sizer
        self._references: dict[int, tuple[Value, int]] = {}  # by identity: the value, its key in the database
        self._next_reference = 0

    def write(self, counters: Mapping[str, Value], threads: Iterable[Thread]) -> tuple[str, dict[int, str], list[int]]:
        """(state, large values to add by key, keys to remove)."""
        kept: dict[int, tuple[Value, int]] = {}
        added: dict[int, str] = {}
        saved = [self._thread(thread, kept, added) for thread in threads]
        removed = [key for identity, (_, key) in self._references.items() if identity not in kept]
        self._references = kept
        state = {**counters, "threads": saved, "next_reference": self._next_reference}
        return encode_value(state), added, removed

    def _thread(self, thread: Thread, kept: dict[int, Any], added: dict[int, str]) -> dict[str, Value]:
        join = thread.join
        return {
            "id": thread.id,
            "parent": thread.parent,
            "branch": thread.branch,
            "seq": thread.seq,
            "waiting": thread.is_waiting,
            "depth": thread.depth,
            "nesting": thread.nesting,
            "frames": [
                {
                    "code": frame.code.key,
                    "at": frame.code.labels[frame.pc],
                    "slots": {
                        name: self._slot(value, kept, added)
                        for name, value in zip(frame.code.slot_names[1:], frame.slots[1:], strict=True)
                        if value is not UNSET
                    },
                }
                for frame in thread.frames
            ],
            "join": None if join is None else {**vars(join), "items": self._slot(join.items, kept, added)},
        }

    def _slot(self, value: Value, kept: dict[int, Any], added: dict[int, str]) -> Value:
        """The value in a list, or the key under which it is stored."""
        if value.__class__ not in (list, dict, str, bytes) or self._sizer.size(value) < REFERENCE_BYTES:
            return [value]
        known = self._references.get(id(value)) or kept.get(id(value))
        if known is None:
            self._next_reference += 1
            known = (value, self._next_reference)
            added[known[1]] = encode_value(value)
        kept[id(value)] = known
        return known[1]

    def read(self, text: str, values: Mapping[int, str]) -> tuple[dict[str, Value], dict[int, Thread]]:
        """(counters, threads by id) of a state that `write` returned, with all large values that it refers to."""
        state = decode_value(text)
        loaded = {key: decode_value(value) for key, value in values.items()}
        self._references = {id(value): (value, key) for key, value in loaded.items()}
        self._next_reference = state["next_reference"]
        threads: dict[int, Thread] = {}
        for saved in state["threads"]:  # a parent precedes its branches
            threads[saved["id"]] = self._read_thread(saved, loaded, threads)
        return state, threads

    def _read_thread(
        self, saved: dict[str, Value], loaded: Mapping[int, Value], threads: Mapping[int, Thread]
    ) -> Thread:
        parent = None if saved["parent"] is None else threads[saved["parent"]]
        frames: list[Frame] = []
        for index, frame in enumerate(saved["frames"]):
            code = self._program.codes[frame["code"]]
            outer = parent.frames[-1].slots if parent is not None and index == 0 else None
            slots = code.new_slots(outer)
            for name, value in frame["slots"].items():
                slots[code.slot_index[name]] = _value(value, loaded)
            frames.append(Frame(code, slots, code.label_index[frame["at"]]))
        thread = Thread(saved["id"], saved["parent"], saved["branch"], frames)
        thread.seq, thread.is_waiting = saved["seq"], saved["waiting"]
        thread.depth, thread.nesting = saved["depth"], saved["nesting"]
        if (join := saved["join"]) is not None:
            thread.join = Join(**{**join, "items": _value(join["items"], loaded)})
            thread.join.errors = [(index, error) for index, error in join["errors"]]
        return thread


def _value(slot: Value, loaded: Mapping[int, Value]) -> Value:
    return slot[0] if type(slot) is list else loaded[slot]
