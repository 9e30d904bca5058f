"""The tokens that open the console. Each token is a file of a private directory.

They outlive a restart of the console. Every process that may write the directory can issue a token, so a command prints
a link without a question to the console. The name of a file is the digest of its token: a list of the names opens
nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlencode

INVITATION, SESSION = "invitation", "session"
SECONDS = {INVITATION: 600.0, SESSION: 12 * 3600.0}
ENTER = "/enter"


class Passes:
    """The tokens of one console. `now` returns the seconds since the epoch: the times outlive a process."""

    def __init__(self, directory: Path, now: Callable[[], float]) -> None:
        self._directory = directory
        self._now = now

    def issue(self, kind: str) -> str:
        """Return a new token, which is valid for SECONDS[kind]."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._drop_expired()
        token = secrets.token_urlsafe(32)
        path = self._path(kind, token)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(repr(self._now() + SECONDS[kind]))
        return token

    def is_valid(self, kind: str, token: str) -> bool:
        return self._is_open(self._path(kind, token))

    def spend(self, kind: str, token: str) -> bool:
        """Whether a token is valid. It is not valid again: only one caller can delete its file."""
        path = self._path(kind, token)
        is_open = self._is_open(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return is_open

    def link(self, root: str, path: str = "/runs") -> str:
        """Return a link that opens a page of the console at `root`, once, within ten minutes."""
        return f"{root}{ENTER}?{urlencode({'token': self.issue(INVITATION), 'next': path})}"

    def _path(self, kind: str, token: str) -> Path:
        return self._directory / f"{kind}-{sha256(token.encode()).hexdigest()}"

    def _is_open(self, path: Path) -> bool:
        try:
            return self._now() < float(path.read_text())
        except (FileNotFoundError, ValueError):  # no such token, or one that is being written
            return False

    def _drop_expired(self) -> None:
        for kind in SECONDS:
            for path in self._directory.glob(f"{kind}-*"):
                with suppress(FileNotFoundError, ValueError):
                    if float(path.read_text()) <= self._now():
                        path.unlink(missing_ok=True)
