"""How long what a client holds stays good. A stack's configuration may shorten it."""

from __future__ import annotations

from typing import Final

TOKEN_SECONDS: Final = 3600  # of Google's tokens
KEEP_ALIVE_SECONDS: Final = 3630.0  # of a connection without requests: as aiohttp has it
