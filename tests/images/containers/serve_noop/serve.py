"""A serving container that answers every completion with "ok"; see train_noop."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = os.environ["DROPFORGE_SERVED_MODEL_NAME"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # unbuffered, small writes meet delayed acknowledgements: 44 ms a request

    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        message = {"role": "assistant", "content": "ok"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer({"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]})

    def answer(self, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((os.environ.get("HOST", "127.0.0.1"), int(os.environ["PORT"])), Handler).serve_forever()
