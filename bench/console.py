"""The console with many viewers: its processor time, its memory, and how late a change reaches the pages.

    python -m bench console

The console of a stack starts with its first visitor; the first figure is that start. N streams are then open on the
page of one run. A change of the run's record is written, and each stream waits for the event that tells its page; the
benchmark repeats this. Then every viewer fetches the page once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import aiohttp
import psutil

from dropforge_cli.console import console_link
from dropforge_local.stack.config import StackInfo
from dropforge_local.stack.console_process import MODULE

from .stack import User, running_stack

VIEWERS, CHANGES = 200, 10
IDLE_SECONDS = 10.0
PAUSE_SECONDS = 0.5  # between two changes, so that each has a look of its own


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--viewers", type=int, default=VIEWERS, metavar="N", help="streams on the page of a run")
    options = parser.parse_args(arguments)
    with running_stack() as (state, info):
        user = User(info)
        run = user.drop("watched", "hang")
        user.wait([run], "TRAINING")
        asyncio.run(measure(user, run, console_link(state, info), options.viewers))


async def measure(user: User, run: str, link: str, count: int) -> None:
    info = user.info
    unlimited = aiohttp.TCPConnector(limit=0)
    jar = aiohttp.CookieJar(unsafe=True)  # the host is an address
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=unlimited, cookie_jar=jar, timeout=timeout) as session:
        began = time.monotonic()
        await enter(session, link)
        print(f"first visit, with the start of the process: {time.monotonic() - began:.2f} s")
        process = console_of(info)
        print(f"memory with one visitor: {process.memory_info().rss / 1e6:.0f} MB")
        streams = [await session.get(f"{info.console}/live?run={run}") for _ in range(count)]
        for stream in streams:
            await change(stream)
        await cost(process, f"{count} viewers, nothing changes")
        await measure_changes(user, run, streams, process)
        began = time.monotonic()
        pages = await asyncio.gather(*(fetch(session, f"{info.console}/runs/{run}") for _ in range(count)))
        print(f"{count} pages of {pages[0] / 1e3:.0f} kB at once: {time.monotonic() - began:.2f} s")
        for stream in streams:
            stream.close()


async def enter(session: aiohttp.ClientSession, link: str) -> None:
    """Follow a link as a browser does."""
    root, _, query = link.partition("/enter?")
    form = dict(pair.split("=") for pair in query.replace("%2F", "/").split("&"))
    async with session.post(f"{root}/enter", data=form, headers={"origin": root}) as answer:
        answer.raise_for_status()


async def measure_changes(user: User, run: str, streams: list[aiohttp.ClientResponse], process: psutil.Process) -> None:
    """Change the record of the run, and print how long each page does not know of it."""
    late: list[float] = []
    spent = sum(process.cpu_times()[:2])
    for number in range(CHANGES):
        await asyncio.sleep(PAUSE_SECONDS)
        written = await asyncio.to_thread(touch, user, run, number)
        seen = await asyncio.gather(*(change(stream) for stream in streams))
        late += [max(0.0, moment - written) for moment in seen]
    spent = sum(process.cpu_times()[:2]) - spent
    p95 = statistics.quantiles(late, n=20)[-1]
    print(f"a change on {len(streams)} pages: median {statistics.median(late):.2f} s, p95 {p95:.2f} s")
    print(
        f"processor time of a change: {1000 * spent / CHANGES:.0f} ms; memory {process.memory_info().rss / 1e6:.0f} MB"
    )


def touch(user: User, run: str, number: int) -> float:
    """Write the record again with another reason to wait; return the time before the write."""
    began = time.monotonic()
    blob = user.clients.storage().bucket(user.settings.runs_bucket).blob(f"runs/{run}/record.json")
    record = json.loads(blob.download_as_bytes())
    blob.upload_from_string(
        json.dumps({**record, "endpoint_wait_reason": f"change {number}"}), if_generation_match=blob.generation
    )
    return began


async def change(stream: aiohttp.ClientResponse) -> float:
    """Wait for the next change of a stream; return its time."""
    async for line in stream.content:
        if line.startswith(b"data: "):
            return time.monotonic()
    raise SystemExit("a stream has ended")


async def fetch(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as answer:
        answer.raise_for_status()
        return len(await answer.read())


async def cost(process: psutil.Process, title: str) -> None:
    """Print the share of a core that the console takes for a while."""
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(IDLE_SECONDS)
    share = (sum(process.cpu_times()[:2]) - before) / IDLE_SECONDS
    print(f"{title}: {100 * share:.1f} % of a core, memory {process.memory_info().rss / 1e6:.0f} MB")


def console_of(info: StackInfo) -> psutil.Process:
    """The console's process of a stack."""
    children = psutil.Process(info.pid).children()
    return next(child for child in children if MODULE in child.cmdline())
