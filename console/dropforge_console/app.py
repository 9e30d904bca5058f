"""The console as an ASGI application: its pages, its stream, and what guards them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dropforge.context import Context

from .access import Access, Guard
from .live import Live
from .pages import LogReader, Pages
from .passes import ENTER
from .reader import Reader

STATIC = Path(__file__).parent / "static"
SMALL = 1000  # bytes that are not worth compressing


def create_app(context: Context, access: Access, read_log: LogReader | None = None) -> Starlette:
    """Return the console of a deployment. It looks at the runs bucket only while a page is open.

    `read_log` returns the last lines that a resource's containers wrote, where that is possible.
    """
    reader = Reader(context.store, context.endpoints)
    live = Live(reader, time.monotonic)
    pages = Pages(context, access, reader, live, read_log)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(live.watch())
        yield
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking

    return Starlette(
        routes=[
            Route("/", pages.home),
            Route(ENTER, pages.enter, methods=["GET", "POST"]),
            Route("/runs", pages.runs),
            Route("/runs/{run}", pages.run),
            Route("/runs/{run}/cancel", pages.cancel, methods=["POST"]),
            Route("/compare", pages.compare),
            Route("/models", pages.models),
            Route("/endpoints", pages.endpoints),
            Route("/endpoints/{name}/rollback", pages.rollback, methods=["POST"]),
            Route("/cost", pages.cost),
            Route("/health", pages.health),
            Route("/new", pages.new, methods=["GET", "POST"]),
            Route("/live", pages.stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, access=access), Middleware(GZipMiddleware, SMALL, 1)],
        exception_handlers={HTTPException: pages.problem},
        lifespan=lifespan,
    )
