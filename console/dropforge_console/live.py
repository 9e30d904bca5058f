"""Server-sent events: a page learns that it has changed, and fetches itself again.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .reader import Reader

LOOK_SECONDS = 0.4
LOOK_SHARE = 10  # a look that takes a second is followed by ten seconds' rest
BURN_SECONDS = 15.0  # the cost of a run that works grows, although nothing is written
PING_SECONDS = 15.0  # proxies close a connection that is silent for longer
STREAM_SECONDS = 900.0  # Cloud Run cuts a request in the end; the browser connects again

log = logging.getLogger(__name__)


class Viewer(NamedTuple):
    """An open page: its run, or "" for a page about every run, and the events that it has not received yet."""

    run: str
    inbox: asyncio.Queue[int]


class Live:
    """Looks at the bucket while a page is open, and tells each page that its content has changed.

    `version` is the number of changes so far. `trouble` says why the last look failed, or is "".
    """

    def __init__(self, reader: Reader, now: Callable[[], float]) -> None:
        self.version = 0
        self.trouble = ""
        self._reader = reader
        self._now = now
        self._viewers: set[Viewer] = set()
        self._has_viewer = asyncio.Event()
        self._looked = -BURN_SECONDS
        self._burnt = 0.0
        self._lock = asyncio.Lock()

    async def watch(self) -> None:
        """Look until cancelled, as long as somebody watches."""
        while True:
            await self._has_viewer.wait()
            began = self._now()
            await self.look()
            await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * (self._now() - began)))

    async def look(self, at_most_seconds_old: float = 0.0) -> None:
        """Read what changed, unless the last look is recent enough. A failure is kept in `trouble`."""
        async with self._lock:
            if self._now() - self._looked < at_most_seconds_old:
                return
            watched = {viewer.run for viewer in self._viewers if viewer.run}
            try:
                changed = await asyncio.to_thread(self._reader.refresh, watched)
                trouble = ""
            except Exception as error:  # noqa: BLE001  # the viewers keep the last content and read why
                changed, trouble = set(), f"{type(error).__name__}: {error}"[:300]
                log.warning("the runs bucket cannot be read: %s", trouble)
            self._looked = self._now()
            self._tell(changed, trouble)

    def _tell(self, changed: set[str], trouble: str) -> None:
        burns = self._looked - self._burnt >= BURN_SECONDS
        if not (changed or burns or trouble != self.trouble):
            return
        everybody = burns or trouble != self.trouble
        self.trouble, self.version = trouble, self.version + 1
        self._burnt = self._looked if burns else self._burnt
        self._send(viewer for viewer in self._viewers if everybody or not viewer.run or viewer.run in changed)

    def announce(self) -> None:
        """Tell every page that it has changed, by something that is not in the bucket."""
        self.version += 1
        self._send(self._viewers)

    def _send(self, viewers: Iterable[Viewer]) -> None:
        for viewer in viewers:
            if not viewer.inbox.full():
                viewer.inbox.put_nowait(self.version)

    async def stream(self, run: str) -> AsyncIterator[str]:
        """Yield one event for each change of a run, or of any run, and a comment while nothing changes."""
        with self._viewer(run) as viewer:
            yield f"retry: 1000\nid: {self.version}\nevent: change\ndata: {self.version}\n\n"
            ends = self._now() + STREAM_SECONDS
            while self._now() < ends:
                try:
                    version = await asyncio.wait_for(viewer.inbox.get(), PING_SECONDS)
                except TimeoutError:
                    yield ": nothing new\n\n"
                else:
                    yield f"id: {version}\nevent: change\ndata: {version}\n\n"

    @contextmanager
    def _viewer(self, run: str) -> Iterator[Viewer]:
        # One waiting event is enough: the page fetches its present content.
        viewer = Viewer(run, asyncio.Queue(1))
        self._viewers.add(viewer)
        self._has_viewer.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._has_viewer.clear()
