"""Judges a canary: a revision that answers a share of the requests, beside the revision before.

A canary with too few requests is neither promoted nor found bad, until its patience ends. Flagger halts such a canary
(https://github.com/fluxcd/flagger/issues/1633), and Argo Rollouts calls it inconclusive.
"""

from __future__ import annotations

from datetime import timedelta

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.endpoints.record import Canary, Seen
from dropforge.spec import parts, seconds

LEAST_REQUESTS = 20  # of each revision: one failure in fewer would be more than 5 %
LEAST_PATIENCE = timedelta(minutes=10)  # after the canary's time: counts of Cloud Monitoring are minutes late
HINT = (
    "the revision before serves. `dropforge serve RUN --as NAME --canary none` puts the model behind the name at once"
)


def canary_of(spec: parts.Canary | None) -> Canary | None:
    """The canary of a rollout, as the record has it, for `serve.canary` of a spec."""
    if spec is None:
        return None
    return Canary(
        percent=spec.percent,
        seconds=seconds(spec.lasts),
        max_error_rate=spec.max_error_rate,
        max_latency_ratio=spec.max_latency_ratio,
    )


def patience(canary: Canary) -> timedelta:
    """How long a canary may wait for enough requests, after its time."""
    return max(timedelta(seconds=canary.seconds), LEAST_PATIENCE)


def has_passed(canary: Canary, seen: Seen, lasted: timedelta) -> bool:
    """Whether a canary is good, after `lasted` with its share; False: more requests must decide.

    Raises CloudError for a bad canary, and for a canary that too few requests have reached in all its time.
    """
    time = timedelta(seconds=canary.seconds)
    missing, is_due = missing_requests(seen), lasted >= time
    problem = _failures(canary, seen) or (_slowness(canary, seen) if is_due and not missing else "")
    if problem:
        raise CloudError(ErrorClass.CODE, f"as a canary with {canary.percent} % of the requests, {problem}", HINT)
    if missing and lasted >= time + patience(canary):
        message = f"the canary showed nothing in {lasted.total_seconds():.0f} s: {missing}"
        raise CloudError(ErrorClass.DEADLINE, message, HINT)
    return is_due and not missing


def missing_requests(seen: Seen) -> str:
    """Which revision has got too few requests for a judgement; "" if both have got enough."""
    counts = {"it": seen.canary.requests, "the revision before": seen.before.requests}
    few = [f"{who} got {count}" for who, count in counts.items() if count < LEAST_REQUESTS]
    return f"{' and '.join(few)} of at least {LEAST_REQUESTS} requests" if few else ""


def _failures(canary: Canary, seen: Seen) -> str:
    """Why a canary fails too often; "" if it does not, or that is not known."""
    own, before = seen.canary, seen.before
    if own.requests < LEAST_REQUESTS or own.error_rate <= max(canary.max_error_rate, before.error_rate):
        return ""
    return (
        f"{own.errors} of its {own.requests} requests failed; expected at most {canary.max_error_rate:.2%}, or as "
        f"many as of the revision before ({before.errors} of {before.requests})"
    )


def _slowness(canary: Canary, seen: Seen) -> str:
    """Why a canary is too slow; "" if it is not. Its first requests may be slow, so the caller judges all its time."""
    own, before = seen.canary.latency_ms, seen.before.latency_ms
    if own is None or not before or own <= canary.max_latency_ratio * before:
        return ""
    return (
        f"its 95th percentile of latencies was {own:.0f} ms; expected at most {canary.max_latency_ratio:g} times that "
        f"of the revision before ({before:.0f} ms)"
    )
