"""Redacts all that a training container prints: stdout and stderr pass through a process of their own.

A library, or the code of a model, may print a secret. The process also redacts the output of ranks and other children,
and it still passes on the trainer's last lines when the trainer is killed. It imports no package, so that it starts in
about 20 ms.

    python -S redacted_output.py STDOUT_FD STDERR_FD < {"values": ["secret", …], "pattern": "a regular expression"}
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from urllib.parse import quote

CHUNK = 1 << 16
LINE = 1 << 16  # bytes; a longer line is passed on in pieces
PATIENCE_SECONDS = 1.0  # so is a line whose end does not arrive in this time
END_SECONDS = 5.0
SHORTEST = 4  # a shorter value would remove words from every log
SHORTEST_LINE = 8  # of a secret with several lines


def start(values: Sequence[str], pattern: str) -> None:
    """Redact all that this process and its children print from now on; at exit, wait for the rest of the output."""
    sources, sinks = zip(os.pipe(), os.pipe(), strict=True)
    command = [sys.executable, "-S", __file__, *map(str, sources)]
    # The child inherits the blocked signals: it ends only when every printing process has ended.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=sources)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps({"values": list(values), "pattern": pattern}).encode())
    outputs = [os.dup(1), os.dup(2)]
    _redirect(sinks)
    for descriptor in (*sources, *sinks):
        os.close(descriptor)
    atexit.register(_stop, process, outputs)


def _stop(process: subprocess.Popen[bytes], outputs: list[int]) -> None:
    _redirect(outputs)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a remaining child may still hold the output open
        process.wait(END_SECONDS)


def _redirect(descriptors: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)


def forms(value: str) -> list[str]:
    """The texts that a secret may appear as: plain, JSON, Python, URL, base64, single lines; the longest first."""
    encoded = base64.b64encode(value.encode()).decode()
    written = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    written |= {quote(value), quote(value, safe=""), encoded, encoded.rstrip("=")}
    written |= {base64.urlsafe_b64encode(value.encode()).decode().rstrip("=")}
    lines = {line for line in value.splitlines() if len(line) >= SHORTEST_LINE}
    return sorted((form for form in written | lines if len(form) >= SHORTEST), key=len, reverse=True)


class Stream:
    """One of the two outputs, passed on line by line."""

    def __init__(self, source: int, sink: int, secrets: list[bytes], pattern: re.Pattern[bytes]) -> None:
        self.source = source
        self._sink = sink
        self._secrets = secrets
        self._pattern = pattern
        self._kept = b""

    def read(self) -> bool:
        """Pass on the available lines; returns False at the end of the output."""
        data = os.read(self.source, CHUNK)
        self._kept += data
        lines = min(max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1, self._open_block())
        if not data:
            self.flush(at_end=True)
        elif lines:
            self._write(lines)
        elif len(self._kept) > LINE:
            self.flush()
        return bool(data)

    def flush(self, *, at_end: bool = False) -> None:
        """Pass on an unfinished line, but keep bytes that may begin a secret, and a private key that has no end yet."""
        length = len(self._kept)
        if not at_end:
            length -= self._partial_secret()
        if not at_end and len(self._kept) <= LINE:
            length = min(length, self._open_block())
        self._write(length)

    def _open_block(self) -> int:
        """Where the last block of PEM begins, if its end has not arrived; else the number of kept bytes."""
        begin = self._kept.rfind(b"-----BEGIN ")
        return len(self._kept) if begin < 0 or self._kept.find(b"-----END ", begin) >= 0 else begin

    def _partial_secret(self) -> int:
        """The number of bytes at the end that may begin a secret."""
        lengths = [
            length
            for secret in self._secrets
            for length in range(1, min(len(secret), len(self._kept) + 1))
            if self._kept.endswith(secret[:length])
        ]
        return max(lengths, default=0)

    def _write(self, length: int) -> None:
        data, self._kept = self._kept[:length], self._kept[length:]
        for secret in self._secrets:
            data = data.replace(secret, b"[redacted]")
        data = self._pattern.sub(b"[redacted]", data)
        while data:
            data = data[os.write(self._sink, data) :]


def main(*descriptors: str) -> None:
    rules = json.load(sys.stdin)
    secrets = sorted({form.encode() for value in rules["values"] for form in forms(value)}, key=len, reverse=True)
    pattern = re.compile(rules["pattern"].encode())
    streams = [Stream(int(fd), sink, secrets, pattern) for fd, sink in zip(descriptors, (1, 2), strict=True)]
    while streams:
        ready, _, _ = select.select([stream.source for stream in streams], [], [], PATIENCE_SECONDS)
        if not ready:
            for stream in streams:
                stream.flush()
        streams = [stream for stream in streams if stream.source not in ready or stream.read()]


if __name__ == "__main__":
    main(*sys.argv[1:])
