"""What a training container prints, without its secrets: stdout and stderr pass through a process of their own.

A library, or the code of a model, may print what it was given. The process sees what ranks and other children print,
too, and whatever the trainer wrote last is passed on when the trainer is killed. It imports no package: it starts in
some 20 ms.

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
LINE = 1 << 16  # bytes; of what is longer, and of what has waited for its end for so long, a piece is passed on
PATIENCE_SECONDS = 1.0
END_SECONDS = 5.0
SHORTEST = 4  # what is shorter would take words out of every log
SHORTEST_LINE = 8  # of a secret that has several


def start(values: Sequence[str], pattern: str) -> None:
    """Have what this process and its children print from here on redacted; what is left is waited for at its end."""
    sources, sinks = zip(os.pipe(), os.pipe(), strict=True)
    command = [sys.executable, "-S", __file__, *map(str, sources)]
    # It inherits that they are blocked: it ends when everybody who prints has.
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
    with contextlib.suppress(subprocess.TimeoutExpired):  # a child that stays behind may still hold it open
        process.wait(END_SECONDS)


def _redirect(descriptors: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)


def forms(value: str) -> list[str]:
    """How a secret may be written: as it is, in JSON, in Python, in a URL, in base64, by lines; the longest first."""
    encoded = base64.b64encode(value.encode()).decode()
    written = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    written |= {quote(value), quote(value, safe=""), encoded, encoded.rstrip("=")}
    written |= {base64.urlsafe_b64encode(value.encode()).decode().rstrip("=")}
    lines = {line for line in value.splitlines() if len(line) >= SHORTEST_LINE}
    return sorted((form for form in written | lines if len(form) >= SHORTEST), key=len, reverse=True)


class Stream:
    """One of the two outputs, passed on by lines."""

    def __init__(self, source: int, sink: int, secrets: list[bytes], pattern: re.Pattern[bytes]) -> None:
        self.source = source
        self._sink = sink
        self._secrets = secrets
        self._pattern = pattern
        self._kept = b""

    def read(self) -> bool:
        """Pass on what has come; False at its end."""
        data = os.read(self.source, CHUNK)
        self._kept += data
        if not data:
            self.flush(at_end=True)
        elif cut := max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1:
            self._write(cut)
        elif len(self._kept) > LINE:
            self.flush()
        return bool(data)

    def flush(self, *, at_end: bool = False) -> None:
        """Pass on what has no end of line, but for what may be the beginning of a secret."""
        self._write(len(self._kept) - (0 if at_end else self._begun()))

    def _begun(self) -> int:
        """How many bytes at the end may be the beginning of a secret."""
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
