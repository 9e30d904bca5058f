"""The console as an ASGI application: its pages, its stream, and what guards them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dropforge.context import Context

from .access import Access, Gate, Guard
from .live import Live
from .pages import LogReader, Pages
from .passes import ENTER
from .playground import Playground, TokenOf
from .preflight import Ask, here
from .reader import Reader

STATIC = Path(__file__).parent / "static"
SMALL = 1000  # bytes that are not worth compressing


def create_app(
    context: Context,
    gate: Gate,
    read_log: LogReader | None = None,
    token_of: TokenOf | None = None,
    preflight: Ask | None = None,
) -> Starlette:
    """Return the console of a deployment. It looks at the runs bucket only while a page is open.

    `read_log` returns the last lines that a resource's containers wrote, where that is possible. `token_of` is asked
    for the tokens of endpoints, instead of Google. Behind IAP, nobody can ask a model without it: the account of the
    console may call no endpoint. `preflight` answers whether a spec could run. Without it, the console asks itself, but
    not behind IAP: its account may not.
    """
    reader = Reader(context.store, context.endpoints)
    live = Live(reader, time.monotonic)
    playground = Playground(context, reader, token_of) if token_of or isinstance(gate, Access) else None
    if preflight is None and isinstance(gate, Access):
        preflight = here(context)
    pages = Pages(context, reader, live, read_log, playground, preflight)
    entrance = [Route(ENTER, partial(pages.enter, gate), methods=["GET", "POST"])] if isinstance(gate, Access) else []
    asking = [Route("/ask", partial(pages.ask, playground), methods=["GET", "POST"])] if playground else []

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
            *entrance,
            Route("/runs", pages.runs),
            Route("/runs/{run}", pages.run),
            Route("/runs/{run}/cancel", pages.cancel, methods=["POST"]),
            Route("/compare", pages.compare),
            Route("/models", pages.models),
            Route("/endpoints", pages.endpoints),
            Route("/endpoints/{name}/rollback", pages.rollback, methods=["POST"]),
            Route("/endpoints/{name}/retire", pages.retire, methods=["POST"]),
            *asking,
            Route("/cost", pages.cost),
            Route("/health", pages.health),
            Route("/new", pages.new, methods=["GET", "POST"]),
            Route("/new/schema", pages.schema),
            Route("/live", pages.stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, gate=gate), Middleware(GZipMiddleware, SMALL, 1)],
        exception_handlers={HTTPException: pages.problem},
        lifespan=lifespan,
    )
