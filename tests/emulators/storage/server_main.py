"""A storage emulator in its own process, for tests that kill it: python server_main.py DIRECTORY."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import Server
from dropforge_local.emulators.storage import StorageEmulator


async def main(root: Path) -> None:
    emulator = StorageEmulator(Database(root / "state.sqlite"), root / "blobs", SystemClock())
    server = Server([emulator])
    await server.start()
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
