"""The quotas of Google Cloud and Slack that a large deployment meets (docs/scale.md), and how they are counted.

A simulation has fewer runs than a large deployment, so `Quotas.scaled` makes what all runs share smaller in the same
proportion. Times stay as they are, and so does what one run has alone, such as the writes to its record.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

# What Google answers to one more running execution of Cloud Run jobs than allowed is not documented: the request is
# refused, or the job is made and its execution does not start, or its execution waits.
Answer = Literal["refused", "failed", "waits"]
DOUBLING_SECONDS = 1200.0  # in which a bucket's rate doubles: https://cloud.google.com/storage/docs/request-rate


@dataclass(frozen=True)
class Quotas:
    """The values of a project, as docs/scale.md has them, for 10,000 runs at once."""

    jobs: float = 1000  # of Cloud Run in a region; deleted jobs do not count
    running_jobs: float = 1000  # executions of jobs in a region that have not ended
    services: float = 1000  # of Cloud Run in a region
    accelerators: float = 1000  # of one type in a region: each project has its own quota
    run_writes: float = 30  # requests a minute and region to Cloud Run that change something, in a new project
    run_reads: float = 600  # requests a minute and region to Cloud Run that read, in a new project
    executions: float = 10_000  # of Cloud Workflows at once; more wait
    backlog: float = 100_000  # executions of Cloud Workflows that wait
    bucket_writes: float = 1000  # a second to one bucket at first
    shared_writes: float = 1  # a second to one object that all runs share
    object_writes: float = 1  # a second to one object of a run
    calls: float = 20  # at once of one function: max_function_instances
    messages: float = 1  # a second to one Slack channel
    points: float = 0.053  # writes a second of a training to its series: not simulated, but they count for the bucket
    deliveries: int = 20  # of an event before it is a dead letter: max_delivery_attempts
    answer: Answer = "refused"

    def scaled(self, part: float) -> Quotas:
        """The quotas for `part` of 10,000 runs at once."""
        return replace(
            self,
            jobs=_count(self.jobs * part),
            running_jobs=_count(self.running_jobs * part),
            services=_count(self.services * part),
            accelerators=_count(self.accelerators * part),
            executions=_count(self.executions * part),
            backlog=_count(self.backlog * part),
            calls=_count(self.calls * part),
            run_writes=self.run_writes * part,
            run_reads=self.run_reads * part,
            bucket_writes=self.bucket_writes * part,
            shared_writes=self.shared_writes * part,
            messages=self.messages * part,
        )


def _count(value: float) -> float:
    return max(1, round(value))


class Rate:
    """At most `most` things a second on average, and at most `burst` at once."""

    def __init__(self, most: float, burst: float = 1.0) -> None:
        self.most = most
        self.burst = max(1.0, burst)
        self._left = self.burst
        self._since = 0.0

    def take(self, now: float, load: float = 0.0) -> bool:
        """Whether there is room for one more now. `load` is what others take each second."""
        self._left = min(self.burst, self._left + (now - self._since) * max(0.0, self.most - load))
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Growing(Rate):
    """The rate of a bucket, which doubles while at least half of it is used."""

    def __init__(self, most: float) -> None:
        super().__init__(most, most)
        self._taken = 0
        self._began: float | None = None

    def take(self, now: float, load: float = 0.0) -> bool:
        self._began = now if self._began is None else self._began
        if (passed := now - self._began) >= DOUBLING_SECONDS:
            if self._taken / passed + load >= self.most / 2:
                self.most = self.burst = 2 * self.most
            self._began, self._taken = now, 0
        self._taken += 1
        return super().take(now, load)


class Count:
    """How many of something exist, by place."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.present: Counter[str] = Counter()

    def is_full(self, place: str) -> bool:
        return self.present[place] >= self.most
