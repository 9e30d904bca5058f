"""Programs that clients start in a running container (`kubectl exec`, `kubectl cp`), with streams over a WebSocket.

A message is a channel's number and the channel's bytes. Since v5, the number 255 and a channel close that channel.
https://github.com/kubernetes/enhancements/tree/master/keps/sig-api-machinery/4006-transition-spdy-to-websockets
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import struct
import sys
import termios
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from multidict import MultiMapping

from ....containers import terminal
from ...kit.background import first
from ..paths import flag
from ..refusals import bad_request
from .probes import Command, kill_group

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
PIECE_BYTES = 32 * 1024


@dataclass(frozen=True)
class ExecRequest:
    """The query of a request: the command, and which of its streams the client connects."""

    container: str
    words: tuple[str, ...]
    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool

    @classmethod
    def parse(cls, query: MultiMapping[str]) -> ExecRequest:
        """Refuses a query without a command or without a stream with 400."""
        words = tuple(query.getall("command", ()))
        stdin, stdout, stderr, tty = (flag(query, name) for name in ("stdin", "stdout", "stderr", "tty"))
        if not words:
            raise bad_request("you must specify at least 1 command for the container")
        if not (stdin or stdout or stderr):
            raise bad_request("you must specify at least 1 of stdin, stdout, stderr")
        return cls(query.get("container", ""), words, stdin, stdout, stderr and not tty, tty)


async def execute(socket: web.WebSocketResponse, request: ExecRequest, command: Command) -> None:
    """Run a command until it ends, and send its exit code. If the client leaves before, the command is killed."""
    if shutil.which(_from(command.workdir, command.argv[0]), path=command.env["PATH"]) is None:
        await _send_end(socket, _not_started(request, "executable file not found in $PATH"))
        return
    try:
        running = await (_start_terminal if request.tty else _start_pipes)(command, request)
    except OSError as error:
        await _send_end(socket, _not_started(request, str(error.strerror)))
        return
    try:
        ending = asyncio.ensure_future(_send_output(socket, running))
        await first(_receive(socket, running), ending)
        if not ending.cancelled():
            await _send_end(socket, _exit_status(ending.result()))
    finally:
        if running.process.returncode is None:
            await kill_group(running.process)
        running.close()


@dataclass(frozen=True)
class _Running:
    """A started program. Its functions hide whether its streams are pipes or a terminal."""

    process: Process
    outputs: Mapping[int, Callable[[], Awaitable[bytes]]]  # by channel; b"" is the end
    write: Callable[[bytes], Awaitable[None]]
    end_input: Callable[[], None]
    resize: Callable[[int, int], None]
    close: Callable[[], None]


async def _start_pipes(command: Command, request: ExecRequest) -> _Running:
    process = await asyncio.create_subprocess_exec(
        *command.argv,
        env=command.env,
        cwd=command.workdir,
        stdin=PIPE if request.stdin else DEVNULL,
        stdout=PIPE if request.stdout else DEVNULL,
        stderr=PIPE if request.stderr else DEVNULL,
        start_new_session=True,
    )
    given = {STDOUT: process.stdout, STDERR: process.stderr}
    outputs = {channel: _reader(stream) for channel, stream in given.items() if stream is not None}

    async def write(data: bytes) -> None:
        if process.stdin is not None:
            process.stdin.write(data)
            with contextlib.suppress(ConnectionError):  # the program reads no more
                await process.stdin.drain()

    def end_input() -> None:
        if process.stdin is not None:
            process.stdin.close()

    return _Running(process, outputs, write, end_input, lambda width, height: None, end_input)


async def _start_terminal(command: Command, request: ExecRequest) -> _Running:
    master, slave = os.openpty()
    os.set_blocking(master, False)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", terminal.__file__, *command.argv),
            env={"TERM": "xterm", **command.env},
            cwd=command.workdir,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
    except OSError:
        os.close(master)
        raise
    finally:
        os.close(slave)

    async def read() -> bytes:
        await _until_ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader, master)
        try:
            return os.read(master, PIECE_BYTES)
        except OSError:  # EIO: no process has the terminal any more
            return b""

    async def write(data: bytes) -> None:
        while data:
            loop = asyncio.get_running_loop()
            await _until_ready(loop.add_writer, loop.remove_writer, master)
            data = data[os.write(master, data) :]

    def resize(width: int, height: int) -> None:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    return _Running(process, {STDOUT: read}, write, lambda: None, resize, lambda: os.close(master))


async def _receive(socket: web.WebSocketResponse, running: _Running) -> None:
    """Give the client's messages to the program. Returns when the client has left."""
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STDIN:
            await running.write(data)
        elif channel == RESIZE:
            with contextlib.suppress(
                ValueError, KeyError, TypeError, struct.error
            ):  # a client's mistake changes nothing
                size = json.loads(data)
                running.resize(size["Width"], size["Height"])
        elif channel == CLOSE and data[:1] == bytes([STDIN]):
            running.end_input()


async def _send_output(socket: web.WebSocketResponse, running: _Running) -> int:
    """Send all output; return the exit code. As in Kubernetes, a child that keeps the output open delays the end."""

    async def copy(channel: int, read: Callable[[], Awaitable[bytes]]) -> None:
        while data := await read():
            await socket.send_bytes(bytes([channel]) + data)

    await asyncio.gather(*(copy(channel, read) for channel, read in running.outputs.items()))
    return await running.process.wait()


async def _send_end(socket: web.WebSocketResponse, status: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):
        await socket.send_bytes(bytes([ERROR]) + json.dumps(status).encode())


def _exit_status(code: int) -> dict[str, Any]:
    """The Status of an exit code; a signal N gives 128 + N, as a shell says it."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    number = code if code > 0 else 128 - code
    text = f"command terminated with non-zero exit code: exit status {number}"
    causes = [{"reason": "ExitCode", "message": str(number)}]
    return {**_failure("NonZeroExitCode", text, 500), "details": {"causes": causes}}


def _not_started(request: ExecRequest, why: str) -> dict[str, Any]:
    text = f'error executing command in container: exec: "{request.words[0]}": {why}'
    return _failure("InternalError", text, 500)


def _failure(reason: str, message: str, code: int) -> dict[str, Any]:
    return {"metadata": {}, "status": "Failure", "reason": reason, "message": message, "code": code}


def _reader(stream: asyncio.StreamReader) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return await stream.read(PIECE_BYTES)

    return read


async def _until_ready(add: Callable[..., Any], remove: Callable[[int], Any], descriptor: int) -> None:
    """Return when a descriptor can be read or written, by the loop's functions for it."""
    ready = asyncio.Event()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


def _from(workdir: Path, program: str) -> str:
    """A program's path as its process sees it: a relative path begins at its working directory."""
    return str(workdir / program) if "/" in program else program
