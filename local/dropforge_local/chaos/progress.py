"""The rules about attempts without progress. They read when job events were published and when they were received.

They know the limits of run/standstill.py in their own way: from what the trainers have told, not from the series.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from .limits import training_uses
from .lives import CHECK_SECONDS, POINT, SLACK_SECONDS, Life, duration_of, seconds_of

PROGRESS = frozenset({"progress", "checkpoint", POINT})
LEAST_SECONDS, LEAST_SHARE, TIMES = 600.0, 1 / 6, 4  # at least, also as a share of stuck_after; times the longest gap
_POD = "k8s.io/Pod"


def stuck_is_told(life: Life) -> Iterator[tuple[float, str]]:
    """An attempt without progress is reported once, and ended if the spec says so. No other attempt is.

    It may last stuck_after, or less between two points of its series. Progress is a step beyond all known steps, or any
    other report of the attempt. The end says why, so it does not wait for a warning that the channels refused.
    """
    if not life.valid:
        return
    policy = life.spec["limits"].get("on_stuck", "restart")
    for attempt in life.last.get("attempts", []):
        number, error_class = attempt["number"], (attempt["error"] or {}).get("error_class")
        sent = _first_sent(life, f"stuck-a{number}")
        signs = _signs(life, number)
        if sent is not None:
            yield from _sent_too_early(life, signs, sent, number)
        if error_class == "stuck" and (policy == "notify" or (sent is None and not _was_struck(life, attempt))):
            yield seconds_of(attempt["ended"]), f"attempt {number} was ended as stuck: on_stuck is {policy}"
        yield from _sent_too_late(life, signs, sent, number)
        if (
            sent is not None
            and policy != "notify"
            and error_class != "stuck"
            and not any(sign > sent for sign in signs[:-1])
        ):
            until = sent + CHECK_SECONDS + SLACK_SECONDS
            until += life.delay(sent, until)
            if _trains(life, number, until):
                yield until, f"attempt {number} is stuck, but still trains: on_stuck is {policy}"


def one_host_ends_all(life: Life) -> Iterator[tuple[float, str]]:
    """An attempt of several hosts ends within two check intervals after one of them has failed, and others wait."""
    for failed in life.failed_hosts:
        number, limit = failed.value["attempt"], failed.time + 2 * CHECK_SECONDS + SLACK_SECONDS
        limit += life.delay(failed.time, limit)
        attempt = next(each for each in life.last["attempts"] if each["number"] == number)
        ended = seconds_of(attempt["ended"]) if attempt["ended"] else float("inf")
        if ended > limit:
            yield limit, f"a host of attempt {number} failed at {failed.time:.0f}, but the attempt goes on"


def _was_struck(life: Life, attempt: dict[str, Any]) -> bool:
    """Whether a fault struck the call that ended an attempt."""
    ended = seconds_of(attempt["ended"])
    return any(ended - SLACK_SECONDS <= time <= ended + 1 for time, _ in life.delays)


def _first_sent(life: Life, key: str) -> float | None:
    """The first time a notice was sent, by run event or in Slack. A failure of one channel does not delay the other."""
    times = [message.time for message in life.published if message.value["event"].get("notice") == key]
    times += [message.time for message in life.slack if message.value["event"].endswith(f"/notice/{key}")]
    return min(times, default=None)


def _signs(life: Life, number: int) -> list[float]:
    """The times at which an attempt was known to make progress, from the time all its machines ran, and its end."""
    uses = [use for use in training_uses(life) if use.machine.attempt == number]
    if not uses:
        return []
    steps = {
        (event.value["attempt"], event.value.get("sequence")): event.value.get("step") for event in life.job_events
    }
    signs, best = [max(use.since for use in uses)], -1
    for event in life.received:
        of, sequence, kind = event.value
        step = steps.get((of, sequence))
        if of == number and (kind not in PROGRESS or (step is not None and step > best)):
            signs.append(event.time)
            best = max(best, step or 0) if kind in PROGRESS else best
    return [*sorted(signs), min(use.until for use in uses)]


def _least(life: Life, number: int, until: float) -> float:
    """The shortest time after which the attempt may be stuck, by what it has told until then."""
    is_measured = len(_points(life, number, 0.0, until)) > 1
    return _shortest(life) if is_measured else _stuck_after(life)


def _shortest(life: Life) -> float:
    """The shortest time after which any attempt may be stuck."""
    after = _stuck_after(life)
    return min(after, max(LEAST_SECONDS, LEAST_SHARE * after))


def _stuck_after(life: Life) -> float:
    return duration_of(life.spec["limits"].get("stuck_after", "1h"))


def _most(life: Life, number: int, since: float) -> float:
    """The longest time for which the attempt may make no progress from its sign at `since`, before it is stuck.

    It is stuck_after until its series has two points after its start, or after it has started again.
    """
    starts = [e.time for e in life.received if e.value[0] == number and e.value[2] not in PROGRESS and e.time <= since]
    if len(_points(life, number, max(starts, default=0.0), since)) < 2:
        return _stuck_after(life)
    longest = max(later - earlier for earlier, later in pairwise(_points(life, number, 0.0, since)))
    return max(_shortest(life), min(_stuck_after(life), TIMES * longest))


def _points(life: Life, number: int, since: float, until: float) -> list[float]:
    """When the bucket received a point of the series of an attempt whose step is another than before."""
    steps = {(e.value["attempt"], e.value.get("sequence")): e.value.get("step") for e in life.job_events}
    times, before = [], None
    for event in life.received:
        of, sequence, kind = event.value
        if of == number and kind == POINT and since < event.time <= until and steps.get((of, sequence)) != before:
            before = steps.get((of, sequence))
            times.append(event.time)
    return times


def _sent_too_early(life: Life, signs: list[float], sent: float, number: int) -> Iterator[tuple[float, str]]:
    """Reports that come too early. An inspect takes time, and need not know the events that arrive meanwhile."""
    after = _least(life, number, sent)
    inspected = sent - SLACK_SECONDS - life.delay(sent - after, sent)
    last = max((sign for sign in signs[:-1] if sign <= inspected), default=signs[0] if signs else sent)
    if last > sent - after + SLACK_SECONDS:
        yield sent, f"attempt {number} was reported as stuck after {sent - last:.0f} s"


def _sent_too_late(life: Life, signs: list[float], sent: float | None, number: int) -> Iterator[tuple[float, str]]:
    """Reports that come too late. The control plane may learn a check interval later when a machine began to run."""
    shortest = _shortest(life)
    for since, until in pairwise(signs):
        if until - since <= shortest:  # of the thousands of a long training, all but a few
            continue
        late = since + _most(life, number, since) + 2 * CHECK_SECONDS + SLACK_SECONDS
        late += life.delay(since, late)
        if late < until and (sent is None or sent > late) and _trains(life, number, late) and _runs(life, number, late):
            yield late, f"attempt {number} made no progress for {late - since:.0f} s, but no notice was sent"


def _trains(life: Life, number: int, time: float) -> bool:
    """Whether the record has the attempt unfinished and the run not cancelled."""
    record = life.record_when(time)
    if record is None or record["state"] not in ("PROVISIONING", "TRAINING") or record["cancel_requested"]:
        return False
    return bool(record["attempts"][-1]["number"] == number and record["attempts"][-1]["ended"] is None)


def _runs(life: Life, number: int, time: float) -> bool:
    """Whether all of an attempt's pods had a node then. Otherwise the cloud reports the attempt as pending."""
    pods = [machine for machine in life.training if machine.kind == _POD and machine.attempt == number]
    present = [pod for pod in pods if pod.created.time <= time and (pod.gone is None or pod.gone.time > time)]
    return all(pod.running is not None and pod.running <= time for pod in present)
