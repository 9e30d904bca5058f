"""The output of a trainer and its children reaches the log complete, without secrets, and also after a kill."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from containers.common import redacted_output
from dropforge.base.redact import TOKEN as FORMATS

SECRET = 'p@ss"w\\ord/&?=% é{n}\nsecond-line-of-it'
TOKEN = "hf_" + "Canary" * 5
BEGIN = "import os, sys, redacted_output; redacted_output.start([os.environ['SECRET']], 'hf_[A-Za-z0-9]{16,}')\n"


def run(code: str, secret: str = SECRET) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SECRET": secret, "PYTHONPATH": str(Path(redacted_output.__file__).parent)}
    command = [sys.executable, "-P", "-S", "-c", BEGIN + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, start_new_session=True)


def written(value: str) -> list[str]:
    encoded = base64.b64encode(value.encode()).decode()
    return [value, json.dumps(value), repr(value), quote(value), quote(value, safe=""), encoded, value.splitlines()[1]]


def test_every_form_of_a_secret_is_taken_out() -> None:
    for text in written(SECRET):
        for form in redacted_output.forms(SECRET):
            text = text.replace(form, "")
        assert "second-line" not in text
        assert "p@ss" not in text
        assert len(text) <= 2


def test_what_processes_print_is_redacted_and_complete() -> None:
    code = f"""
import subprocess
for text in {written(SECRET)!r}:
    print("<", text, ">")
print("before {TOKEN} after", file=sys.stderr)
subprocess.run([sys.executable, "-P", "-S", "-c", "import os; print('child', os.environ['SECRET'])"])
for _ in range(20_000):
    print("a line that says nothing")
sys.stdout.write("no end of line")
"""
    ended = run(code)
    assert ended.returncode == 0
    assert not any(form in ended.stdout + ended.stderr for form in [*redacted_output.forms(SECRET), TOKEN])
    assert "before [redacted] after" in ended.stderr
    assert "child [redacted]" in ended.stdout
    assert ended.stdout.count("a line that says nothing\n") == 20_000
    assert ended.stdout.endswith("no end of line")


def test_a_secret_that_is_written_in_pieces_is_found() -> None:
    code = """
import time
for letter in os.environ["SECRET"][:-1]:
    os.write(1, letter.encode())
time.sleep(1.5)
os.write(1, os.environ["SECRET"][-1:].encode() + b"|" + b"x" * 200_000 + os.environ["SECRET"].encode())
"""
    assert run(code, "a-secret-without-a-line").stdout == f"[redacted]|{'x' * 200_000}[redacted]"


def test_a_private_key_that_arrives_line_by_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key has no line of its own format: the stream keeps a block until its end, or until it is no key any more."""
    source, into = os.pipe()
    out_of, sink = os.pipe()
    stream = redacted_output.Stream(source, sink, [], re.compile(FORMATS.pattern.encode()))
    key = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBg", "Canary7f3a", "-----END PRIVATE KEY-----"]
    for line in ["before", *key, "after"]:
        os.write(into, f"{line}\n".encode())
        assert stream.read()
        stream.flush()  # as if nothing more had arrived for a second
    assert os.read(out_of, 1 << 16) == b"before\n[redacted]\nafter\n"
    monkeypatch.setattr(redacted_output, "LINE", 100)
    endless = b"-----BEGIN CERTIFICATE-----\n" + b"public\n" * 20
    os.write(into, endless)
    assert stream.read()
    assert os.read(out_of, 1 << 16) == endless
    for descriptor in (source, into, out_of, sink):
        os.close(descriptor)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_last_words_of_a_killed_trainer_are_passed_on(number: int) -> None:
    kill = "os.getpid()" if number == signal.SIGKILL else "0"  # the whole process group, as a platform ends a container
    ended = run(f"print('last words', flush=True); os.kill({kill}, {int(number)})")
    assert ended.returncode == -number
    assert ended.stdout == "last words\n"
