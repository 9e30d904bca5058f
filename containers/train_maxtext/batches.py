"""Token ids in MaxText's layout: sequences of one length, in an order that only the seed decides.

The rows of a step depend on nothing else, so a run that resumes at a step sees exactly the rows that remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from containers.common.chat import IGNORED, Encoded
from containers.common.token_rows import Ints, TokenRows


@dataclass(frozen=True)
class Data:
    """The training data. A sequence is a list of rows that together fit `length` tokens."""

    train: Encoded
    probe: Encoded  # held-out rows, or training rows where none are held out: stages compare their loss on them
    sequences: list[list[int]]
    length: int
    held_out: Encoded = field(default_factory=lambda: Encoded.of([], []))
    # The number of tokens at the end of each held-out row that are its answer; 0 for an answer that cannot be matched.
    # The rows that did not fit `length`, and so are not in `held_out`, come last: their answers count, too.
    answers: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    def save(self, path: Path) -> None:
        parts = {"train": self.train, "probe": self.probe, "held_out": self.held_out}
        arrays: dict[str, Any] = {f"{part}_ids": rows.input_ids.values for part, rows in parts.items()}
        arrays |= {f"{part}_labels": rows.labels.values for part, rows in parts.items()}
        arrays |= {f"{part}_starts": rows.input_ids.starts for part, rows in parts.items()}
        np.savez(
            path,
            **arrays,
            sequences=_flat(self.sequences),
            sequence_starts=np.cumsum([0, *map(len, self.sequences)]),
            length=np.array(self.length),
            answers=self.answers,
        )

    @classmethod
    def load(cls, path: Path) -> Data:
        with np.load(path) as arrays:
            starts, flat = arrays["sequence_starts"], arrays["sequences"]
            train, probe, held_out = (
                Encoded(
                    TokenRows(arrays[f"{part}_ids"], arrays[f"{part}_starts"]),
                    TokenRows(arrays[f"{part}_labels"], arrays[f"{part}_starts"]),
                )
                for part in ("train", "probe", "held_out")
            )
            sequences = [flat[a:b].tolist() for a, b in pairwise(starts)]
            return cls(train, probe, sequences, int(arrays["length"]), held_out, arrays["answers"])

    def batch(self, step: int, size: int, seed: int) -> dict[str, Ints]:
        """The `size` sequences of step `step` (from 0). Every epoch has another order; there is no last step."""
        count = len(self.sequences)
        chosen = []
        for position in range(step * size, (step + 1) * size):
            epoch, index = divmod(position, count)
            chosen.append(self.sequences[_order(seed, epoch, count)[index]])
        return collate(self.train, chosen, self.length)

    def probes(self, size: int) -> list[dict[str, Ints]]:
        """The probe rows, one per sequence, in batches of `size`; empty sequences fill the last batch."""
        return [collate(self.probe, chosen, self.length) for chosen in _alone(len(self.probe.input_ids), size)]

    def judged(self, size: int) -> Iterator[dict[str, Ints]]:
        """The held-out rows as `probes` gives them, with `answers`: 1 at the targets that are tokens of an answer."""
        lengths = self.held_out.lengths
        for chosen in _alone(len(lengths), size):
            marks = np.zeros((size, self.length), np.int32)
            for line, row in enumerate(index for sequence in chosen for index in sequence):
                last = lengths[row] - 1  # a token is the target at the position before it
                marks[line, last - int(self.answers[row]) : last] = 1
            yield {**collate(self.held_out, chosen, self.length), "answers": marks}

    def exact_match(self, matches: float) -> float | None:
        """The share of the held-out rows that `matches` are; None for plain texts, which have no answers."""
        return matches / len(self.answers) if len(self.answers) else None


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Pack rows into sequences: each row (its index), longest first, joins the fullest sequence with enough room.

    Best fit by remaining room needs a few per cent more sequences than the optimum.
    """
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    sequences: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        room = next((room for room in range(lengths[row], length + 1) if by_room[room]), None)
        if room is None:
            sequences.append([])
            index, room = len(sequences) - 1, length
        else:
            index = by_room[room].pop()
        sequences[index].append(row)
        by_room[room - lengths[row]].append(index)
    return sequences


def collate(rows: Encoded, sequences: Sequence[Sequence[int]], length: int) -> dict[str, Ints]:
    """MaxText's batch: each token's target is the label of the next token; segments separate the rows of a sequence."""
    shape = (len(sequences), length)
    inputs, positions, segments, targets, labelled = (np.zeros(shape, np.int32) for _ in range(5))
    for line, sequence in enumerate(sequences):
        at = 0
        for number, row in enumerate(sequence, start=1):
            ids, labels = rows.input_ids.row(row), rows.labels.row(row)
            whole, shifted = slice(at, at + len(ids)), slice(at, at + len(ids) - 1)
            inputs[line, whole], positions[line, whole], segments[line, whole] = ids, np.arange(len(ids)), number
            targets[line, shifted] = ids[1:]
            labelled[line, shifted] = np.where(labels[1:] != IGNORED, number, 0)
            at += len(ids)
    return {
        "inputs": inputs,
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets": targets,
        "targets_position": positions,
        "targets_segmentation": labelled,
    }


def part(batch: dict[str, Ints], index: int, count: int) -> dict[str, Ints]:
    """The rows of part `index` of `count` equal parts."""
    return {
        name: values[index * len(values) // count : (index + 1) * len(values) // count]
        for name, values in batch.items()
    }


_orders: dict[tuple[int, int, int], Ints] = {}


def _order(seed: int, epoch: int, count: int) -> Ints:
    key = (seed, epoch, count)
    if key not in _orders:
        _orders.clear()  # only the current epoch's order is needed
        _orders[key] = np.random.default_rng([seed, epoch]).permutation(count).astype(np.int32)
    return _orders[key]


def _alone(count: int, size: int) -> list[list[list[int]]]:
    """Batches of `size` sequences with one row each."""
    alone = [[index] for index in range(count)]
    alone += [[] for _ in range(-count % size)]
    return [alone[at : at + size] for at in range(0, len(alone), size)]


def _flat(parts: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter((value for part in parts for value in part), np.int32)
