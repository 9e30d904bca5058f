"""Several runs side by side: their losses in one chart, their metrics, and the fields in which their specs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from pydantic import JsonValue

from dropforge.base.figures import duration, number, usd
from dropforge.run.series import Progress

from . import views
from .charts import Chart, Curve, chart, smoothed
from .reader import Run

MOST_RUNS = 6  # as many as there are kinds of lines


class Difference(NamedTuple):
    """A value that differs: its name, and its text for each run."""

    name: str
    values: list[str]


def losses(progress: Sequence[Sequence[Progress]], by: str, log: bool) -> Chart | None:
    """Return the smoothed losses of the runs in one chart; the line of run number N has the kind `cN`."""
    curves = [Curve(f"c{index}", smoothed(views.loss_points(events, by))) for index, events in enumerate(progress)]
    shown = sum(bool(curve.points) for curve in curves)
    return chart(curves, f"Training loss of {shown} runs by {by}", x_text=views.AXES[by].text, logarithmic=log)


def held_out(progress: Sequence[Sequence[Progress]], by: str, log: bool) -> Chart | None:
    """Return the losses of the runs on their held-out rows in one chart."""
    points = [views.held_out_points(events, by) for events in progress]
    curves = [Curve(f"c{index}", found, has_dots=True) for index, found in enumerate(points)]
    shown = sum(map(bool, points))
    return chart(curves, f"Held-out loss of {shown} runs by {by}", x_text=views.AXES[by].text, logarithmic=log)


class Asked(NamedTuple):
    """A held-out question with its expected answer, and the answer of each run: its text, and whether it is right.

    A run whose evaluation did not keep the question has None. `before` is the answer of the first run's base.
    """

    question: str
    expected: str
    before: str
    answers: list[views.Sample | None]


def questions(samples: Sequence[Sequence[views.Sample]]) -> list[Asked]:
    """Return the held-out questions that the evaluations kept, those of most runs first. Equal questions are one.

    An evaluation keeps five questions (samples.json beside the model). No other row of the data is read.
    """
    found: dict[tuple[str, str], list[views.Sample | None]] = {}
    for index, kept in enumerate(samples):
        for sample in kept:
            key = sample.question, sample.expected
            found.setdefault(key, [None] * len(samples))[index] = sample
    asked = [
        Asked(question, expected, next(each.before for each in answers if each), answers)
        for (question, expected), answers in found.items()
    ]
    return sorted(asked, key=lambda each: each.answers.count(None))


def results(runs: Sequence[Run], now: datetime) -> list[Difference]:
    """Return cost, time and each metric of the runs."""
    metrics = sorted({name for run in runs for name in run.record.metrics})
    return [
        Difference("Cost", [usd(run.record.cost(now)) for run in runs]),
        Difference("Time", [duration(sum(run.record.stage_seconds(now).values())) for run in runs]),
        *(
            Difference(name.replace("_", " ").capitalize(), [_metric(run.record.metrics.get(name)) for run in runs])
            for name in metrics
        ),
    ]


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Return the fields in which the specs differ, by their JSON pointers. A run without a spec has no values."""
    specs = [dict(_leaves(run.spec.model_dump(mode="json"))) if run.spec else {} for run in runs]
    pointers = dict.fromkeys(pointer for spec in specs for pointer in spec if pointer != "/schema_uri")
    found = [Difference(pointer, [_text(spec, pointer) for spec in specs]) for pointer in pointers]
    return [difference for difference in found if len(set(difference.values)) > 1]


def _leaves(value: JsonValue, pointer: str = "") -> Iterator[tuple[str, JsonValue]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{pointer}/{key}")
    else:
        yield pointer, value


def _text(spec: Mapping[str, JsonValue], pointer: str) -> str:
    return views.short(json.dumps(spec[pointer], ensure_ascii=False)) if pointer in spec else views.UNKNOWN


def _metric(value: float | None) -> str:
    return views.UNKNOWN if value is None else number(value)
