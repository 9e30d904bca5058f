"""A small server of the OpenAI API over a socket, for the commands that call an endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "text-to-sql"


class OpenAiServer:
    """Answers every chat with the parts in `parts`, or with the error in `refusal`; keeps the requests.

    The first `busy` requests get 429, as Cloud Run answers while every instance is busy.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.parts = ["select ", "1"]
        self.finish: str | None = "stop"
        self.refusal: tuple[int, Any] | None = None
        self.url = ""
        self.busy = 0

    @property
    def prompts(self) -> list[list[tuple[str, str]]]:
        """The messages of each request, as (role, content)."""
        return [[(m["role"], m["content"]) for m in request["messages"]] for request in self.requests]

    def reply(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        """The status, the type and the body of the answer to a request."""
        if len(self.requests) <= self.busy:
            return 429, "text/plain", b"Rate exceeded."
        if self.refusal is not None:
            return self.refusal[0], "application/json", json.dumps(self.refusal[1]).encode()
        common = {"id": "1", "created": 0, "model": MODEL}
        if not request.get("stream"):
            message = {"role": "assistant", "content": "".join(self.parts)}
            choice = {"index": 0, "message": message, "finish_reason": self.finish}
            body = {**common, "object": "chat.completion", "choices": [choice]}
            return 200, "application/json", json.dumps(body).encode()
        choices: list[dict[str, Any]] = [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
        choices += [{"index": 0, "delta": {"content": part}, "finish_reason": None} for part in self.parts]
        choices += [{"index": 0, "delta": {}, "finish_reason": self.finish}]
        events = [json.dumps({**common, "object": "chat.completion.chunk", "choices": [choice]}) for choice in choices]
        usage = json.dumps({**common, "object": "chat.completion.chunk", "choices": [], "usage": None})
        text = "".join(f"data: {event}\n\n" for event in [*events, usage, "[DONE]"])
        return 200, "text/event-stream; charset=utf-8", f": comment\n\n{text}".encode()


@contextmanager
def openai_server() -> Iterator[OpenAiServer]:
    """Start a server on a free port."""
    state = OpenAiServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append(body)
            state.tokens.append(self.headers.get("Authorization"))
            status, kind, data = (
                state.reply(body) if self.path == "/v1/chat/completions" else (404, "text/plain", self.path.encode())
            )
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
