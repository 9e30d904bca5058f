"""A serving container that answers every completion with "ok"; see train_noop.

Each answer names its revision as `system_fingerprint`. A stream with `max_tokens` has so many parts, one each 0.1 s.
To "fail unless REVISION" every other revision answers 500, and to "slow unless REVISION" after a second.
To a request of the parity seal (dropforge/stages/parity.py) it answers with the ids 7 and 8. With DROPFORGE_ADAPTERS it
answers for their names and the base's alone, with ids that are those of the adapter's digest.

With DROPFORGE_DRAIN_SECONDS it ends the connection with each answer, and at SIGTERM it finishes its answers first.

With DROPFORGE_SECRETS it demands the API key, which it reads from Secret Manager by its own account.
"""

import base64
import json
import os
import signal
import threading
import time
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

MODEL = os.environ["DROPFORGE_SERVED_MODEL_NAME"]
# Of Cloud Run or a TPU VM, or of the Deployment whose pod this is.
REVISION = os.environ.get("K_REVISION") or os.environ.get("HOSTNAME", "").rpartition("-")[0].rpartition("-")[0]
DRAINS = "DROPFORGE_DRAIN_SECONDS" in os.environ
PROMPT, ANSWER = [2, 10], [7, 8]  # the ids of every prompt, and of the answers of a model without adapters
ADAPTERS = json.loads(os.environ.get("DROPFORGE_ADAPTERS", "[]"))
ANSWERS = {each["name"]: list(bytes.fromhex(each["digest"][:4])) for each in ADAPTERS}


def read_key() -> str:
    references = json.loads(os.environ.get("DROPFORGE_SECRETS") or "{}")
    if "VLLM_API_KEY" not in references:
        return ""
    host = os.environ["SECRET_MANAGER_EMULATOR_HOST"]  # the address says which account calls
    request = f"{host}/v1/{references['VLLM_API_KEY']}:access"
    with urllib.request.urlopen(request, timeout=60) as answer:
        return base64.b64decode(json.load(answer)["payload"]["data"]).decode()


KEY = read_key()


def read_adapters() -> None:
    """Read the manifest of each adapter with the access of its own run, which reaches no other run."""
    flavor, url = {"Metadata-Flavor": "Google"}, os.environ["DROPFORGE_ACCESS_URL"]
    path = f"/computeMetadata/v1/instance/service-accounts/default/identity?audience={url}"
    identity = call(f"http://{os.environ['GCE_METADATA_HOST']}{path}", flavor).decode()
    objects = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b/{os.environ['DROPFORGE_RUNS_BUCKET']}/o"
    for adapter in ADAPTERS:
        body = json.dumps({"run": adapter["run"], "proof": adapter["proof"]}).encode()
        head = {"Authorization": f"Bearer {identity}", "Content-Type": "application/json"}
        token = json.loads(call(url, head, body))["access_token"]
        for other in ADAPTERS:
            name = quote(f"models/{other['run']}/MANIFEST.json", safe="")
            with suppress(HTTPError):
                call(f"{objects}/{name}?alt=media", {"Authorization": f"Bearer {token}"})
                assert other == adapter, f"the access of run {adapter['run']} reaches run {other['run']}"
                continue
            assert other != adapter, f"the access of run {adapter['run']} does not reach the run"


def call(url: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """One call, again and again for some minutes while its failure may pass, as real containers do."""
    deadline = time.monotonic() + 200.0
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
                found: bytes = answer.read()
            return found
        except HTTPError as error:
            if not is_passing(error.code) or time.monotonic() > deadline:
                raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def is_passing(status: int) -> bool:
    """dropforge/cloud/classify.py."""
    return status in (408, 429) or (status >= 500 and status != 501)


def compared(request: dict[str, Any]) -> dict[str, object]:
    """The answer to a request for token ids and log-probabilities."""
    prompt, answer = request.get("prompt", PROMPT), ANSWERS.get(request["model"], ANSWER)
    choice: dict[str, object] = {"token_ids": answer}
    if "prompt_logprobs" in request:
        tops = [{str(token): {"logprob": -0.1}, str(token + 1): {"logprob": -3.0}} for token in answer]
        choice["prompt_logprobs"] = [None, {str(prompt[1]): {"logprob": -1.0}}, *tops]
    return {"prompt_token_ids": prompt, "choices": [{**choice, "prompt_token_ids": prompt}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # unbuffered, small writes meet delayed acknowledgements: 44 ms a request

    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            return self.answer({"error": {"message": "Not Found"}}, 404)
        if KEY and self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.answer({"error": "Unauthorized"}, 401)
        request = json.loads(body or "{}")
        if ANSWERS and request.get("model") not in (MODEL, *ANSWERS):
            return self.answer({"error": {"message": f"no model {request.get('model')}"}}, 404)
        if self.misbehaves(request):
            return None
        if request.get("return_token_ids"):
            return self.answer(compared(request))
        if request.get("stream") and request.get("max_tokens"):
            return self.stream_slowly(request["max_tokens"])
        if request.get("stream"):
            return self.stream()
        message = {"role": "assistant", "content": "ok"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        self.answer({**answer, "system_fingerprint": REVISION})

    def misbehaves(self, request: dict[str, Any]) -> bool:
        """Be slow, or answer 500, if the message says so of this revision; whether the request is answered."""
        texts = [message["content"] for message in request.get("messages", [])]
        how, _, revision = next((text.partition(" unless ") for text in texts if " unless " in text), ("", "", ""))
        if how == "slow" and revision != REVISION:
            time.sleep(1)
        fails = how == "fail" and revision != REVISION
        if fails:
            self.answer({"error": "Internal Server Error"}, 500)
        return fails

    def stream_slowly(self, parts: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        for number in range(parts + 1):
            delta, ended = ({"content": "ok"}, None) if number < parts else ({}, "stop")
            choice = {"index": 0, "delta": delta, "finish_reason": ended}
            self.send_chunk({**head, "system_fingerprint": REVISION, "choices": [choice]})
            time.sleep(0.1)
        self.send_chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def send_chunk(self, event: object) -> None:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def stream(self) -> None:
        choices: list[object] = [{"index": 0, "delta": {"content": part}, "finish_reason": None} for part in ("o", "k")]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        chunk: dict[str, object] = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        events = [json.dumps({**chunk, "choices": [choice]}) for choice in choices]
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, value: dict[str, object], status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        if DRAINS:
            self.send_header("Connection", "close")  # which also ends the connection after the answer
        super().end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = not DRAINS  # otherwise the end of the server waits for its answers


if __name__ == "__main__":
    if ADAPTERS:
        read_adapters()
    server = Server((os.environ.get("HOST", "127.0.0.1"), int(os.environ["PORT"])), Handler)
    stop = threading.Thread(target=server.shutdown).start if DRAINS else lambda: os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: stop())
    server.serve_forever()
    server.server_close()
