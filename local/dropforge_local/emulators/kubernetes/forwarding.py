"""`kubectl port-forward`: a client's connections to the ports of a pod, over a WebSocket.

kubectl tunnels SPDY through the WebSocket: for each connection, a stream for bytes and a stream for an error. The
Python client of Kubernetes has two channels for each port, whose first message is the port's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from aiohttp import WSCloseCode, WSMsgType, web

from dropforge_local.base.ports import HOST

from ..kit.background import Background, first
from .refusals import bad_request
from .spdy import QUEUED_PIECES, Session, SpdyError, Stream

TUNNEL = "SPDY/3.1+portforward.k8s.io"
CHANNELS = "v4.channel.k8s.io"
PROTOCOLS = (TUNNEL, CHANNELS)
PIECE_BYTES = 32 * 1024

Resolve = Callable[[int], int | None]
"""The port of this machine for a port of the pod; None if the pod does not declare the port."""


def ports_of(given: Sequence[str]) -> list[int]:
    """The ports of a query. Refuses with 400 what is no port."""
    ports = [_number(text) for value in given for text in value.split(",")]
    if not ports or not all(ports):
        raise bad_request(f"ports is {','.join(given)!r}; expected numbers from 1 to 65535")
    return ports


async def tunnel(socket: web.WebSocketResponse, resolve: Resolve) -> None:
    """Forward the connections of a client that speaks SPDY, until it leaves."""
    forwards, errors = Background("port-forward"), dict[str, Stream]()

    def opened(stream: Stream) -> None:
        request = stream.headers.get("requestid", "")
        if stream.headers.get("streamtype") == "error":
            errors[request] = stream
        elif error := errors.pop(request, None):
            forwards.spawn(_forward_streams(stream, error, resolve))

    session = Session(socket.send_bytes, opened)
    try:
        async for message in _messages(socket):
            await session.feed(message)
    except SpdyError as error:
        await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=str(error).encode())
    finally:
        await forwards.stop()


async def channels(socket: web.WebSocketResponse, ports: Sequence[int], resolve: Resolve) -> None:
    """Forward one connection to each port, until all have ended or the client leaves."""
    inputs: list[asyncio.Queue[bytes]] = [asyncio.Queue(QUEUED_PIECES) for _ in ports]
    for index, port in enumerate(ports):
        for channel in (2 * index, 2 * index + 1):
            await socket.send_bytes(bytes([channel]) + struct.pack("<H", port))

    async def receive() -> None:
        async for message in _messages(socket):
            index, is_error = divmod(message[0], 2)
            if index < len(ports) and not is_error:
                await inputs[index].put(message[1:])

    forwards = (_forward_channel(socket, i, port, inputs[i], resolve) for i, port in enumerate(ports))
    await first(receive(), asyncio.gather(*forwards))


async def _forward_streams(stream: Stream, error: Stream, resolve: Resolve) -> None:
    port = _number(stream.headers.get("port", ""))
    with contextlib.suppress(ConnectionError):
        if problem := await _connect(port, resolve, stream.read, stream.write):
            await error.write(problem.encode())
        await stream.close()
        await error.close()


async def _forward_channel(
    socket: web.WebSocketResponse, index: int, port: int, inputs: asyncio.Queue[bytes], resolve: Resolve
) -> None:
    async def write(data: bytes) -> None:
        await socket.send_bytes(bytes([2 * index]) + data)

    with contextlib.suppress(ConnectionError):
        if problem := await _connect(port, resolve, inputs.get, write):
            await socket.send_bytes(bytes([2 * index + 1]) + problem.encode())


async def _connect(
    port: int, resolve: Resolve, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]
) -> str:
    """Copy bytes between a client and a port of the pod until the pod's side ends; return the problem, or ""."""
    local = resolve(port)
    if local is None:
        return f"the pod declares no such port: {port}. The local stack forwards the ports that a pod declares"
    try:
        reader, writer = await asyncio.open_connection(HOST, local)
    except OSError as error:
        return f"failed to connect to port {port} of the pod: {error.strerror or error}"
    sending = asyncio.ensure_future(_send(read, writer))
    try:
        while data := await reader.read(PIECE_BYTES):
            await write(data)
    except ConnectionResetError:
        pass  # either side left
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return ""


async def _send(read: Callable[[], Awaitable[bytes]], writer: asyncio.StreamWriter) -> None:
    """Copy a client's bytes to the pod, and then its end."""
    while data := await read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _number(text: str) -> int:
    """A port; 0 for a text that is none."""
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and int(text) < 65536 else 0


async def _messages(socket: web.WebSocketResponse) -> AsyncIterator[bytes]:
    async for message in socket:
        if message.type is WSMsgType.BINARY and message.data:
            yield message.data
