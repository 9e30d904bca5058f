"""The rules for many runs against quotas: they read only the history, as the rules of one run do (checker.py).

In such a life nothing fails: only quotas refuse. A quota frees itself, so every valid run must succeed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from .checker import Problem, check
from .history import Fact, History
from .lives import TERMINAL, seconds_of

# The quotas of the API delay what a function may see, so an attempt may be charged for longer than it ran.
NOT_FOR_CROWDS = frozenset({"cost_is_true"})
RECENT_SECONDS = 120.0  # an answer of the cloud to a run is at most so old when the record repeats it
SILENT_SECONDS = 900.0  # a run that waits for longer says why
FAIR_SECONDS = 900.0  # a run that was submitted so much later begins later, where a policy gives out places
Found = Iterator[tuple[float, str]]


def check_crowd(history: History) -> list[Problem]:
    """Every promise that the history of a crowd breaks: those of each run, and those of all runs together."""
    found = [problem for problem in check(history) if problem.rule not in NOT_FOR_CROWDS]
    found += [Problem(rule.__name__, "", *problem) for rule in RULES for problem in rule(history)]
    return sorted(found, key=lambda problem: problem.time)


def every_run_succeeds(history: History) -> Found:
    """No run is lost, and none ends otherwise than with success: it has its time, and every quota frees itself."""
    end, last = history.facts[-1].time, {run: writes[-1] for run, writes in records(history).items()}
    for dropped in history.of("dropped"):
        run = dropped.data["run"]
        if run not in last:
            yield end, f"run {run} was dropped, and has no record"
        elif (state := last[run].data["content"]["state"]) not in TERMINAL:
            yield end, f"run {run} is still {state}"
        elif state != "SUCCEEDED":
            error = last[run].data["content"]["error"] or {"message": "no error"}
            yield last[run].time, f"run {run} is {state} for a quota that frees itself: {error['message']}"


def nothing_is_left(history: History) -> Found:
    """In the end no resource exists, no execution runs, and no run holds a place."""
    end = history.facts[-1]
    for name in end.data["living"]:
        yield end.time, f"{name} still exists"
    ended = {fact.data["id"] for fact in history.of("execution_ended")}
    for fact in history.of("execution"):
        if fact.data["id"] not in ended:
            yield end.time, f"execution {fact.data['id']} has not ended"


def reasons_are_true(history: History) -> Found:
    """A record names a quota only while that quota refuses, in that region, and no machine of the attempt runs."""
    refusals: dict[str, list[float]] = defaultdict(list)
    for fact in history.of("quota"):
        refusals[fact.data["place"]].append(fact.time)
    begun = starts(history)
    for run, writes in records(history).items():
        before = ""
        for write in writes:
            attempt = (write.data["content"]["attempts"] or [{}])[-1]
            reason = attempt.get("wait_reason") or ""
            if "uota" in reason and reason != before:
                times, region = refusals[attempt["region"]], attempt["region"]
                near = bisect_right(times, write.time) - bisect_left(times, write.time - RECENT_SECONDS)
                began = begun.get((run, attempt["number"]))
                if began is not None and began < write.time - RECENT_SECONDS:
                    yield write.time, f"run {run} waits for {reason!r}, but its attempt runs since {began:.0f}"
                elif not near and not _waits_in(history, run, attempt["number"]):
                    yield write.time, f"run {run} waits for {reason!r}, but nothing refused in {region}"
            before = reason


def waits_are_explained(history: History) -> Found:
    """A run that has got a function, and waits for long, says why: it names its place in the queue, or a quota."""
    begun = starts(history)
    for run, writes in records(history).items():
        explained = any(_explains(write.data["content"]) for write in writes)
        seen = next((write for write in writes if write.data["content"]["attempts"]), None)
        first = min((time for (other, _), time in begun.items() if other == run), default=None)
        if seen is not None and first is not None and first - seen.time > SILENT_SECONDS and not explained:
            yield first, f"run {run} waited {first - seen.time:.0f} s for a machine, and its record never said why"


def starts_are_fair(history: History) -> Found:
    """With places, no run begins before a run that was submitted much earlier and still waits."""
    if not next(history.of("limit")).data["runs"]:
        return
    placed = []
    for run, writes in records(history).items():
        last = writes[-1].data["content"]
        if last["placed"]:
            placed.append((seconds_of(last["placed"]), seconds_of(last["created"]), run))
    earliest, held = float("inf"), ""
    for began, created, run in sorted(placed, reverse=True):  # from the last that began
        if earliest < created - FAIR_SECONDS:
            yield (
                began,
                f"run {run} got a place before run {held}, which was submitted {created - earliest:.0f} s earlier",
            )
        if created < earliest:
            earliest, held = created, run


def records(history: History) -> dict[str, list[Fact]]:
    """The writes of each record, by run."""
    found: dict[str, list[Fact]] = {}
    for fact in history.of("write"):
        parts = fact.data["name"].split("/")
        if len(parts) == 3 and parts[2] == "record.json":
            found.setdefault(parts[1], []).append(fact)
    return found


def starts(history: History) -> dict[tuple[str, int], float]:
    """When the machine of each attempt began to run, by run and number."""
    found = {}
    for fact in history.of("running"):
        run, _, number = fact.data["name"].rsplit("/", 1)[1].removeprefix("df-").rpartition("-a")
        found[run, int(number)] = fact.time
    return found


def _waits_in(history: History, run: str, number: int) -> bool:
    """Whether the execution of an attempt was made to wait by the cloud."""
    return any(fact.data.get("job", "").endswith(f"df-{run}-a{number}") for fact in history.of("quota"))


def _explains(record: dict[str, Any]) -> bool:
    attempts = record["attempts"]
    return record["queued"] is not None or any(attempt.get("wait_reason") or attempt["error"] for attempt in attempts)


RULES: tuple[Callable[[History], Found], ...] = (
    every_run_succeeds,
    nothing_is_left,
    reasons_are_true,
    waits_are_explained,
    starts_are_fair,
)
