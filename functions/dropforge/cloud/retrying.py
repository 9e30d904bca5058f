"""How a container repeats its requests: as long as the failure may pass, until its attempt must end.

The functions do not wait so: the workflow calls them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dropforge.base.log import log
from dropforge.base.redact import cut

from .classify import may_pass

T = TypeVar("T")

DEADLINE_VARIABLE = "DROPFORGE_DEADLINE"  # of a training container, in Unix seconds
SERVER_SECONDS = 600.0  # of each request of a container that has no deadline
FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0  # bounds of the mean wait between two tries, which doubles
_LONGEST_MESSAGE = 500


class Retrying:
    """Repeats a call while its error may pass, until the deadline in `environment`.

    A request to stop interrupts a wait of the main thread, because its signal handler raises (containers/common/stop).
    No container waits at its end for other threads.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        first_seconds: float = FIRST_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._environment, self._first, self._clock = environment, first_seconds, clock

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of the call. Raises its error if it cannot pass, and RetryError when the time is over."""
        result: T = self.policy()(call)()
        return result

    def policy(self) -> Any:
        """The google.api_core.retry.Retry of a call that begins now."""
        from google.api_core.retry import Retry

        return Retry(
            predicate=may_pass,
            initial=self._first,
            maximum=max(self._first, MOST_SECONDS),
            multiplier=2.0,
            timeout=self._seconds_left(),
            on_error=_teller(),
        )

    def _seconds_left(self) -> float:
        deadline = self._environment.get(DEADLINE_VARIABLE)
        return max(0.0, float(deadline) - self._clock()) if deadline else SERVER_SECONDS


def _teller() -> Callable[[Exception], None]:
    """A function that logs the 1st, 2nd, 4th, 8th … error of a call: one that waits for hours writes some ten lines."""
    errors = 0

    def tell(error: Exception) -> None:
        nonlocal errors
        errors += 1
        if errors & (errors - 1) == 0:
            message = cut(f"{type(error).__name__}: {error}", _LONGEST_MESSAGE)
            log(f"a request failed, and its failure may pass: {message}", stage="access", severity="WARNING")

    return tell
