"""A training container that trains nothing and keeps the real one's contract; the standard library only, so that it
starts in milliseconds. The spec's label `behave` says what becomes of it (see BEHAVIOURS).

The suite and the benchmarks start thousands of these containers, and imports take most of their processor time. So they
use the modules below `hmac`, `json`, `signal` and `socket`, and import no `typing`.
"""

from __future__ import annotations

import binascii
import os
import sys
import time
from _hashlib import hmac_digest
from _json import encode_basestring_ascii, make_encoder, make_scanner
from _socket import socket
from datetime import UTC, datetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any
else:
    import _signal as signal

RUN, ATTEMPT = os.environ["DROPFORGE_RUN"], int(os.environ["DROPFORGE_ATTEMPT"])
KEY = os.environ.get("DROPFORGE_RUN_KEY", "").encode()
BUCKET, TOPIC = os.environ["DROPFORGE_RUNS_BUCKET"], os.environ["DROPFORGE_JOB_EVENTS_TOPIC"]
HOST, PORT = os.environ["STORAGE_EMULATOR_HOST"].removeprefix("http://").split(":")
FUNCTIONS, METADATA = os.environ["DROPFORGE_ACCESS_URL"], os.environ["GCE_METADATA_HOST"]
connections: dict[str, socket] = {}
granted: Any = None
sequence = 0
held: dict[str, object] | None = None  # the event of the start, which the event of the end will tell


class Reader:
    """How `json` reads, in the terms of its scanner."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant = float, int, float


def loads(text: str | bytes) -> Any:
    scan = make_scanner(Reader())  # type: ignore[arg-type]
    return scan(text.decode() if isinstance(text, bytes) else text, 0)[0]


def dumps(value: object, comma: str = ", ", colon: str = ": ", sort_keys: bool = False) -> str:
    encode = make_encoder({}, repr, encode_basestring_ascii, None, colon, comma, sort_keys, False, True)
    return "".join(encode(value, 0))


def request(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One call of a Google API: with the run's token for its bucket, without a token as the container's account."""
    headers = f"Authorization: Bearer {access()['access_token']}\r\n" if "/storage/" in path else ""
    return send(f"{HOST}:{PORT}", method, path, body, headers)


def access() -> Any:
    """The run's token and spec (dropforge/stages/access.py), asked for once."""
    global granted
    if granted is None:
        flavor = "Metadata-Flavor: Google\r\n"
        path = f"/computeMetadata/v1/instance/service-accounts/default/identity?audience={FUNCTIONS}"
        status, identity = send(METADATA, "GET", path, b"", flavor)
        assert status == 200, identity
        address, _, name = FUNCTIONS.removeprefix("http://").partition("/")
        headers, body = f"Authorization: Bearer {identity.decode()}\r\n", os.environ["DROPFORGE_ACCESS_REQUEST"]
        status, answer = send(address, "POST", f"/{name}", body.encode(), headers)
        assert status == 200, answer
        granted = loads(answer)
    return granted


def send(address: str, method: str, path: str, body: bytes, headers: str) -> tuple[int, bytes]:
    """One call, again and again for some minutes while its failure may pass, as real containers do."""
    deadline = time.monotonic() + 200.0
    while True:
        try:
            status, answer = exchange(address, method, path, body, headers)
            if not is_passing(status) or time.monotonic() > deadline:
                return status, answer
        except (OSError, EOFError):
            disconnect(address)
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def is_passing(status: int) -> bool:
    """dropforge/cloud/classify.py."""
    return status in (408, 429) or (status >= 500 and status != 501)


def exchange(address: str, method: str, path: str, body: bytes, headers: str) -> tuple[int, bytes]:
    """A request and its response by hand: http.client takes longer to import than this container to run."""
    if address not in connections:
        connections[address] = connect(address)
    connection = connections[address]
    asked = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n{headers}"
    asked += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(asked.encode() + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += receive(connection)
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    answered = dict(line.lower().split(b":", 1) for line in lines)
    while len(content) < int(answered[b"content-length"]):
        content += receive(connection)
    return int(status.split()[1]), content


def connect(address: str) -> socket:
    host, port = address.split(":")
    connection = socket()
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def receive(connection: socket) -> bytes:
    if not (received := connection.recv(1 << 16)):
        raise EOFError("the connection was closed")
    return received


def disconnect(address: str) -> None:
    if address in connections:
        connections.pop(address).close()


def quoted(name: str) -> str:
    return name.replace("/", "%2F")


def spec() -> Any:
    return access()["spec"]


def proof(name: str, content: bytes) -> str:
    """dropforge/run/proof.py."""
    return hmac_digest(KEY, f"{name}\n".encode() + content, "sha256").hex()


def proved(name: str, document: dict[str, Any]) -> bytes:
    canonical = dumps(document, ",", ":", sort_keys=True).encode()
    return dumps({**document, "proof": proof(name, canonical)} if KEY else document).encode()


def log(text: str, **fields: object) -> None:
    """Write a line of the log; `fields` may have a message, which replaces the text."""
    now = datetime.now(UTC).isoformat()
    print(dumps({"time": now, "message": text, **fields}), file=sys.stderr, flush=True)


def stamp() -> dict[str, object]:
    global sequence
    sequence = max(sequence + 1, int(time.time() * 1000))
    return {"sequence": sequence, "time": datetime.now(UTC).isoformat()}


def begin() -> None:
    """Hold the event of the start (containers/common/report.py): the next event is that of the end, and comes at once.

    Behaviours that last longer publish the event.
    """
    global held
    held = {**stamp(), "resumed_step": 0, "device": ""}
    log("started")


def publish(kind: str, copies: int = 1, **fields: object) -> None:
    global held
    if held is not None:
        fields["started"], held = held, None
    content = dumps({"type": kind, "run": RUN, "attempt": ATTEMPT, **stamp(), **fields}).encode()
    log(kind, **fields)
    data = binascii.b2a_base64(content, newline=False).decode()
    attributes = {"ce-type": f"dev.dropforge.job.{kind}", "ce-id": f"{RUN}/{ATTEMPT}/{sequence}"}
    if KEY:
        attributes["proof"] = proof("job-event", content)
    body = dumps({"messages": [{"data": data, "attributes": attributes}] * copies}).encode()
    status, answer = request("POST", f"/v1/{TOPIC}:publish", body)
    assert status == 200, answer


def progress(*losses: float) -> None:
    """The series of the attempt, with a point for each loss of two steps (dropforge/run/series.py)."""
    import zlib

    now = datetime.now(UTC).isoformat()
    series = {"run": RUN, "attempt": ATTEMPT, "began": now, "written": now, "total_steps": 2, "loss": losses}
    series |= {"step": list(range(1, len(losses) + 1)), "seconds": [float(second) for second in range(len(losses))]}
    series |= {name: [None] * len(losses) for name in ("epoch", "learning_rate", "tokens_per_second")}
    series |= {"accelerator_mib": [20_480] * len(losses), "accelerator_busy": [0.9] * len(losses)}
    series |= {"host_mib": [2_048] * len(losses)}
    series |= {"tokens": [800 * step for step in range(1, len(losses) + 1)], "held_out_loss": list(losses)}
    for step, loss in enumerate(losses, 1):
        log("progress", step=step, total_steps=2, loss=loss)
    name = f"models/{RUN}/series/attempt-{ATTEMPT}.json.gz"
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    put(name, packer.compress(proved(name, series)) + packer.flush())


def commit(exact_match: float, files: tuple[dict[str, Any], ...] = (), **more: object) -> None:
    """The manifest, written once."""
    manifest = {
        "run": RUN,
        "attempt": ATTEMPT,
        "created": datetime.now(UTC).isoformat(),
        "base": {"uri": "noop", "revision": "main"},
        "dataset": {"uri": "noop", "revision": "main"},
        "spec_sha256": "0" * 64,
        "serve_path": f"attempt-{ATTEMPT}/model",
        "metrics": {"exact_match": exact_match, "exact_match_before": 0.0, "loss": 0.1},
        "files": list(files),
        **more,
    }
    name = f"models/{RUN}/MANIFEST.json"
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quoted(name)}&ifGenerationMatch=0"
    status, answer = request("POST", path, proved(name, manifest))
    assert status in (200, 412), answer


def uri() -> str:
    return f"gs://{BUCKET}/models/{RUN}/MANIFEST.json"


def succeed(exact_match: float = 0.9) -> int:
    begin()
    return finish(exact_match)


def finish(exact_match: float = 0.9, copies: int = 1) -> int:
    progress(2.0, 1.0)
    commit(exact_match)
    publish("succeeded", copies, manifest_uri=uri(), metrics={"exact_match": exact_match})
    return 0


def repeat() -> int:
    """Every event thrice, and that of the start by itself."""
    publish("started", copies=3)
    return finish(copies=3)


def backwards() -> int:
    """The last event first."""
    commit(0.9)
    publish("succeeded", manifest_uri=uri())
    publish("checkpoint", step=2, uri="gs://noop/2")
    publish("checkpoint", step=1, uri="gs://noop/1")
    progress(2.0, 1.0)
    publish("started")
    return 0


def put(name: str, body: bytes) -> Any:
    """Write an object; what the bucket says of it."""
    status, answer = request("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quoted(name)}", body)
    assert status == 200, answer
    return loads(answer)


def whole() -> int:
    """Leaves a checkpoint and a model, once checkpoints/<run>/go is there."""
    import hashlib

    weights = b"weights"
    publish("started", device="Nooptron")
    progress(2.0)
    while request("GET", f"/storage/v1/b/{BUCKET}/o/{quoted(f'checkpoints/{RUN}/go')}")[0] == 404:
        time.sleep(0.05)
    name, marker = f"checkpoints/{RUN}/step-00000001/_COMPLETE", {"step": 1, "files": [], "extra": {}}
    put(name, proved(name, marker))
    path = f"attempt-{ATTEMPT}/model/model.safetensors"
    found = put(f"models/{RUN}/{path}", weights)
    sha256 = hashlib.sha256(weights).hexdigest()
    commit(0.9, ({"path": path, "size": len(weights), "sha256": sha256, "crc32c": found["crc32c"]},))
    publish("succeeded", manifest_uri=uri())
    return 0


def sealed(answer: list[int]) -> int:
    """Leaves a parity seal by which the model answers with these two token ids. serve_noop answers with 7 and 8."""
    begin()
    commit(0.9, (seal(answer),))
    publish("succeeded", manifest_uri=uri())
    return 0


def shared(base: str = "base", answer: list[int] | None = None) -> int:
    """Leaves an adapter beside its base, and a seal by which it answers as serve_noop answers for an adapter.

    `answer`: the token ids of another answer.
    """
    import hashlib

    begin()
    weights = file("base/model.safetensors", base.encode())
    adapter = file("adapter/adapter_model.safetensors", RUN.encode())
    digest = hashlib.sha256(f"adapter_model.safetensors {adapter['sha256']}".encode()).hexdigest()
    files = (weights, adapter, seal(answer or list(bytes.fromhex(digest[:4]))))
    source = {"uri": spec()["model"]["source"], "revision": "main"}
    paths = {"serve_path": f"attempt-{ATTEMPT}/base", "adapter_path": f"attempt-{ATTEMPT}/adapter"}
    commit(0.9, files, base=source, **paths)
    publish("succeeded", manifest_uri=uri())
    return 0


def seal(answer: list[int]) -> dict[str, Any]:
    """The file of a parity seal (dropforge/run/seal.py) of two token ids."""
    top = [([token, token + 1], [-0.1, -3.0]) for token in answer]
    messages = [{"role": "user", "content": "question"}]
    row = {"row": 1, "messages": messages, "prompt": [2, 10], "answer": answer, "top": top}
    document = {"greedy": True, "dtype": "bfloat16", "rows": [row], "noise": {"divergence": 1e-5, "gap": 1e-3}}
    return file("seal.json", dumps(document).encode())


def file(name: str, content: bytes) -> dict[str, Any]:
    """Write a file of the attempt's model; its entry in the manifest."""
    import hashlib

    path = f"attempt-{ATTEMPT}/{name}"
    crc32c = put(f"models/{RUN}/{path}", content)["crc32c"]
    return {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "crc32c": crc32c}


def silent() -> int:
    commit(0.9)
    return 0


def fail(error_class: str, code: int) -> int:
    begin()
    publish("failed", error_class=error_class, message=f"behaves as {error_class}")
    return code


def preempted() -> int:
    begin()
    publish("preempted", step=1)
    return 75


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def lost() -> int:
    publish("started")
    return killed()


def preempted_once() -> int:
    return succeed() if ATTEMPT > 1 else preempted()


def hang() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    publish("started")
    while True:
        time.sleep(3600)


def hang_at_first_boot() -> int:
    """Hangs where the disk is new."""
    trace = os.path.join(os.environ["DROPFORGE_WORK_DIRECTORY"], "trace")
    if os.path.exists(trace):
        return succeed()
    open(trace, "w").close()
    return hang()


def hang_at_first_start() -> int:
    """Hangs where no container of the run has been before, this attempt's included."""
    name = quoted(f"checkpoints/{RUN}/trace")
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}&ifGenerationMatch=0"
    return succeed() if request("POST", path)[0] == 412 else hang()


def hog() -> int:
    """Takes more than a gibibyte."""
    publish("started")
    memory = b"x" * (1100 << 20)
    time.sleep(3600)
    return len(memory)


def slow() -> int:
    publish("started")
    time.sleep(3)
    return finish()


def killed_later() -> int:
    publish("started")
    time.sleep(2)
    return 65


def orphan() -> int:
    """Leaves a process in a session of its own."""
    command = [sys.executable, "-P", "-c", "import time; time.sleep(3600)"]
    os.posix_spawn(sys.executable, command, dict(os.environ), setsid=True)
    return succeed()


def lie() -> int:
    publish("started")
    publish("succeeded", manifest_uri=uri())
    return 0


BEHAVIOURS: dict[str, Callable[[], int]] = {
    "succeed": succeed,
    "repeat": repeat,
    "backwards": backwards,
    "poor": lambda: succeed(exact_match=0.1),  # does not pass a gate
    "sealed": lambda: sealed([7, 8]),  # leaves a seal by which serve_noop serves the model
    "sealed-otherwise": lambda: sealed([17, 18]),  # leaves a seal of which serve_noop differs
    "shared": shared,
    "shared-otherwise": lambda: shared(answer=[17, 18]),  # leaves a seal of which serve_noop differs
    "shared-on-another-base": lambda: shared("another base"),
    "silent": silent,  # succeeds without a single event
    "fail-data": lambda: fail("data", 65),
    "fail-code": lambda: fail("code", 70),
    "exit-64": lambda: 64,  # fails without a single event
    "exit-65": lambda: 65,
    "exit-76": lambda: 76,
    "exit-3": lambda: 3,
    "preempted-once": preempted_once,
    "preempted": preempted,
    "killed": killed,
    "killed-once": lambda: succeed() if ATTEMPT > 1 else killed(),
    "lost-once": lambda: succeed() if ATTEMPT > 1 else lost(),  # killed after its report of the start
    "hang": hang,
    "hang-once": lambda: succeed() if ATTEMPT > 1 else hang(),
    "hang-at-first-boot": hang_at_first_boot,
    "hang-at-first-start": hang_at_first_start,
    "hog": hog,
    "whole": whole,  # leaves all that the real one leaves
    "killed-later": killed_later,  # fails two seconds later, without telling anybody
    "slow": slow,  # three seconds
    "orphan": orphan,
    "lie": lie,  # reports success, leaves nothing
}

if __name__ == "__main__":
    sys.exit(BEHAVIOURS[spec().get("labels", {}).get("behave", "succeed")]())
