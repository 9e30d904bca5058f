"""What Google Cloud bills for the control plane of a run: steps, calls, requests and messages, with their prices.

tests/stack/test_counts.py compares RUN with the calls of real runs on the local stack. A long training adds looks
(LOOK) and points of its series (PROGRESS).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import date

# US dollars in us-central1, without free tiers: https://cloud.google.com/workflows/pricing,
# https://cloud.google.com/storage/pricing (single region, Standard), https://cloud.google.com/run/pricing
# (request-based), https://cloud.google.com/pubsub/pricing (40 USD a TiB)
AS_OF = date(2026, 9, 20)
INTERNAL_STEP, EXTERNAL_STEP = 0.01 / 1000, 0.025 / 1000
WRITE, READ = 0.005 / 1000, 0.0004 / 1000  # operations of class A and B; deletions are free
CALL = 0.40 / 1_000_000
CPU_SECOND, GIB_SECOND = 0.000024, 0.0000025
MESSAGE = 2 * 1000 * 40 / 2**40  # published and delivered; each time at least 1 kB
# A function of 512 MiB has a third of a CPU: https://docs.cloud.google.com/run/docs/configuring/memory-limits
FUNCTION_CPUS, FUNCTION_GIB = 1 / 3, 0.5
CALL_SECONDS = 0.5  # an estimate: five requests of 50 ms, and 20 ms of a whole CPU; not measured in the cloud


@dataclass(frozen=True)
class Usage:
    """The billed operations of a run. `writes` and `reads` are requests to Cloud Storage by every caller."""

    internal_steps: float = 0
    external_steps: float = 0
    calls: float = 0
    writes: float = 0
    reads: float = 0
    messages: float = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __mul__(self, times: float) -> Usage:
        return Usage(**{field.name: getattr(self, field.name) * times for field in fields(self)})

    @property
    def usd(self) -> float:
        second = FUNCTION_CPUS * CPU_SECOND + FUNCTION_GIB * GIB_SECOND
        return (
            self.internal_steps * INTERNAL_STEP
            + self.external_steps * EXTERNAL_STEP
            + self.calls * (CALL + CALL_SECONDS * second)
            + self.writes * WRITE
            + self.reads * READ
            + self.messages * MESSAGE
        )


# The most that a run of one short attempt without an endpoint uses, from the upload to its end. Two messages, those of
# the teardown and of the end, are in one request.
RUN = Usage(internal_steps=34, external_steps=2, calls=8, writes=16, reads=11, messages=9)
# One look at a training attempt whose wait has timed out, and one point of its series.
LOOK = Usage(internal_steps=6, external_steps=1, calls=1, writes=1, reads=5)
PROGRESS = Usage(writes=1)


def usage_of_training(seconds: float, check_interval_seconds: float) -> Usage:
    """The operations of the control plane for a run whose only attempt trains for so many seconds."""
    return RUN + LOOK * (seconds / check_interval_seconds) + PROGRESS * progress_points(seconds)


def progress_points(seconds: float) -> float:
    """The largest number of points in the series: one in 1 s, later in 2 s, in 1 % of the training time, and in 30 s.

    Each costs at most one write.
    These are the limits of containers/common/report.py, for a training with 20 steps a second or more.
    """
    first, early, middle = min(seconds, 60), min(seconds, 200), min(seconds, 3000)
    return first + max(0, early - 60) / 2 + 100 * math.log(max(1, middle / 200)) + max(0, seconds - 3000) / 30
