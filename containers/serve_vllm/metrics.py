"""vLLM's metrics of requests, for an engine that has none (vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class Metrics:
    """Counts requests and tokens; `text` has Prometheus's format."""

    def __init__(self, model: str) -> None:
        self._labels = f'engine="0",model_name="{model}"'
        self._waiting = self._running = 0
        self._tokens: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._buckets: Counter[int] = Counter()
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def running(self) -> Iterator[None]:
        began, self._running = time.monotonic(), self._running + 1
        try:
            yield
        finally:
            self._running -= 1
            took = time.monotonic() - began
            self._seconds += took
            self._buckets[bisect_left(SECONDS, took)] += 1

    def count(self, answer: dict[str, Any]) -> None:
        """Count an answer, or a chunk of one."""
        usage = answer.get("usage") or {}
        self._tokens.update(prompt=usage.get("prompt_tokens", 0), generation=usage.get("completion_tokens", 0))
        reasons = (choice.get("finish_reason") for choice in answer["choices"])
        self._finished.update(reason for reason in reasons if reason)

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for state, value in (("running", self._running), ("waiting", self._waiting)):
            yield from self._metric("gauge", f"num_requests_{state}", [("", value)])
        for kind in ("prompt", "generation"):
            yield from self._metric("counter", f"{kind}_tokens_total", [("", self._tokens[kind])])
        reasons = {"stop": 0, "length": 0, "abort": 0, **self._finished}
        finished = [(f',finished_reason="{reason}"', count) for reason, count in reasons.items()]
        yield from self._metric("counter", "request_success_total", finished)
        total = 0
        latency = "vllm:e2e_request_latency_seconds"
        yield f"# TYPE {latency} histogram"
        for at, bound in enumerate((*SECONDS, "+Inf")):
            total += self._buckets[at]
            yield f'{latency}_bucket{{{self._labels},le="{bound}"}} {total}'
        yield f"{latency}_count{{{self._labels}}} {total}"
        yield f"{latency}_sum{{{self._labels}}} {self._seconds}"

    def _metric(self, kind: str, name: str, values: list[tuple[str, int]]) -> Iterator[str]:
        yield f"# TYPE vllm:{name} {kind}"
        yield from (f"vllm:{name}{{{self._labels}{labels}}} {value}" for labels, value in values)
