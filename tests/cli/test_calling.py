"""`chat`, `token` and `snippet`, against a server of the OpenAI API."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.run.artifacts import Manifest, Source, model_prefix, upload_directory, write_manifest
from dropforge.run.record import Endpoint, RunState
from dropforge.spec import registry
from dropforge_cli.endpoints import _TOKENS, call_lines, token_command
from dropforge_cli.main import cli
from dropforge_cli.options import state_option

from ..deployments import clients
from .commands import COMMAND
from .conftest import CREATED, Deployed, write_toml
from .openai_server import MODEL, OpenAiServer, openai_server

RUN, OTHER = "job-0123456789ab", "job-ba9876543210"
COLUMNS = {"prompt": "Question: {question}\nContext: {context}", "completion": "{answer}", "system": "Write SQL."}
ONE_FIELD = {"prompt": "Q: {question}", "completion": "{answer}"}
TPU = {"type": "tpu_vm", "accelerator_type": "v5litepod-4", "data_disk_gib": 50, "placements": [{"zone": "us-west4-a"}]}
FULL = {"adapter": {"type": "none"}}


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with openai_server() as server:
        yield server


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gcloud that prints an identity token; tests replace it."""
    tool = tmp_path / "bin" / "gcloud"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$*" = "auth print-identity-token" ] && echo identity-token\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tool


def served(deployed: Deployed, url: str, run: str = RUN, columns: Any = COLUMNS, **spec: Any) -> None:
    """Put a run with an endpoint into the bucket."""
    dataset = {"source": "owner/rows", **({"columns": columns} if columns else {})}
    document = {
        "api_version": "dropforge/v1",
        "name": MODEL,
        "model": {"source": "owner/tiny-1m"},
        "dataset": dataset,
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": {"type": "cloud_run", "ttl": "1h"},
        **spec,
    }
    endpoint = Endpoint(
        url=url,
        model=MODEL,
        service="s",
        region="us-central1",
        ready=CREATED,
        expires=CREATED + timedelta(hours=1),
    )
    deployed.store.put_new(names.spec_object(run), json.dumps(document).encode())
    deployed.record(run, RunState.SUCCEEDED, endpoint=endpoint)


def test_every_command_prints_what_a_client_takes(deployed: Deployed, server: OpenAiServer) -> None:
    served(deployed, server.url)
    shown = deployed.run("status", RUN).output
    assert f"endpoint {server.url}/v1\n" in shown
    assert f"model {MODEL}, " in shown
    assert f"`dropforge chat {RUN}`" in shown
    assert f"`dropforge token {RUN}`" in shown
    [listed] = json.loads(deployed.run("runs", "--json").stdout)
    assert listed["endpoint"]["base_url"] == f"{server.url}/v1"
    assert listed["endpoint"]["token_command"] == f"dropforge token {RUN}"


@pytest.mark.parametrize(("options", "words"), [([], ""), (["--state", "my dir"], " --state 'my dir'")])
def test_advised_commands_reach_the_stack_of_the_command(deployed: Deployed, options: list[str], words: str) -> None:
    served(deployed, "https://e")
    record = deployed.store.record(RUN)

    @click.command()
    @state_option
    def show(state: str | None) -> None:
        click.echo("\n".join([*call_lines(record), token_command("named")]))

    output = CliRunner().invoke(show, options).output
    assert re.findall(r"dropforge (?:chat|snippet|token) [^`\n]+", output) == [
        f"dropforge chat {RUN}{words}",
        f"dropforge snippet {RUN}{words}",
        f"dropforge token {RUN}{words}",
        f"dropforge token named{words}",
    ]


def test_every_credential_that_a_platform_declares_has_a_token() -> None:
    declared = {serve.credential for serve in registry.classes("serve")}
    assert declared == set(_TOKENS)


def test_the_token_of_cloud_run_is_gclouds(deployed: Deployed, gcloud: Path) -> None:
    served(deployed, "https://e")
    result = deployed.run("token", "job-01")
    assert (result.exit_code, result.stdout) == (0, "identity-token\n")
    gcloud.write_text("#!/bin/sh\necho 'no account is active' >&2; exit 1\n")
    result = deployed.run("token", RUN)
    assert result.exit_code == 1
    assert "no account is active\nhint: gcloud auth login" in result.stderr


def test_without_gcloud_the_token_of_cloud_run_is_explained(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(deployed, "https://e")
    monkeypatch.setenv("PATH", "")
    result = deployed.run("token", RUN)
    assert result.exit_code == 1
    assert "install gcloud" in result.stderr


def test_an_endpoint_without_a_token_says_so(deployed: Deployed) -> None:
    serve = {"type": "training_vm", "ttl": "1h"}
    served(deployed, "http://10.0.0.1:8000", target=TPU, training=FULL, serve=serve)
    result = deployed.run("token", RUN)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "demands no token" in result.stderr


def test_chat_fills_the_template_of_the_training(deployed: Deployed, server: OpenAiServer, gcloud: Path) -> None:
    served(deployed, server.url)
    result = deployed.run("chat", RUN, "how many?", "--field", "context=CREATE TABLE t (a INT)", "--temperature", 0)
    assert (result.exit_code, result.stdout) == (0, "select 1\n")
    prompt = [("system", "Write SQL."), ("user", "Question: how many?\nContext: CREATE TABLE t (a INT)")]
    assert server.prompts == [prompt]
    assert server.tokens == ["Bearer identity-token"]
    assert server.requests[0]["stream"] is True
    assert server.requests[0]["temperature"] == 0


def test_chat_reads_a_row_or_a_text_from_a_pipe(deployed: Deployed, server: OpenAiServer, gcloud: Path) -> None:
    served(deployed, server.url)
    row = json.dumps({"question": "how many?", "context": "t", "answer": "unused"})
    result = CliRunner().invoke(cli, ["chat", RUN], input=row)
    assert (result.exception, result.output) == (None, "select 1\n")
    assert CliRunner().invoke(cli, ["chat", RUN, "--raw"], input="a {brace}\n").stdout == "select 1\n"
    assert [prompt[-1][1] for prompt in server.prompts] == ["Question: how many?\nContext: t", "a {brace}"]
    assert len(server.prompts[1]) == 1


def test_a_message_that_cannot_fill_the_template_is_explained(deployed: Deployed, gcloud: Path) -> None:
    served(deployed, "http://127.0.0.1:1")
    result = deployed.run("chat", RUN, "how many?")
    assert result.exit_code == 1
    assert "the prompt of the training has the fields question, context; a message fills one" in result.stderr
    assert "--raw" in result.stderr
    result = deployed.run("chat", RUN, "how many?", "--field", "contxt=t")
    assert "the prompt has no field 'contxt'\nhint: its fields are question, context" in result.stderr


def test_a_system_prompt_replaces_that_of_the_training(deployed: Deployed, server: OpenAiServer, gcloud: Path) -> None:
    served(deployed, server.url, columns=ONE_FIELD)
    assert deployed.run("chat", RUN, "x?", "--system", "Be {short}.").exit_code == 0
    assert server.prompts == [[("system", "Be {short}."), ("user", "Q: x?")]]


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ((403, {"error": {"message": "denied"}}), "answered HTTP 403: denied\nhint: your account needs roles/run.in"),
        ((404, {"error": {"message": "no model 'x'"}}), "answered HTTP 404: no model 'x'\nhint: its log: `dropforge"),
        ((500, "boom"), "answered HTTP 500: boom"),
    ],
)
def test_a_refusal_of_the_endpoint_is_an_answer(
    deployed: Deployed, server: OpenAiServer, gcloud: Path, refusal: Any, expected: str
) -> None:
    served(deployed, server.url, columns=None)
    server.refusal = refusal
    result = deployed.run("chat", RUN, "x?")
    assert result.exit_code == 1
    assert expected in result.stderr


@pytest.mark.parametrize(("finish", "text"), [("length", "was cut"), ("abort", "broke off"), (None, "broke off")])
def test_an_answer_without_its_end_is_not_silent(
    deployed: Deployed, server: OpenAiServer, gcloud: Path, finish: str | None, text: str
) -> None:
    served(deployed, server.url, columns=None)
    server.finish = finish
    result = deployed.run("chat", RUN, "x?")
    assert result.exit_code == (0 if finish == "length" else 1)
    assert text in result.stderr


def test_missing_ended_and_private_endpoints_get_an_answer(deployed: Deployed) -> None:
    deployed.record(OTHER, RunState.TRAINING)
    assert "is TRAINING and has no endpoint yet" in deployed.run("chat", OTHER, "x").stderr
    serve = {"type": "training_vm", "ttl": "1h"}
    served(deployed, "http://127.0.0.1:1", target=TPU, training=FULL, serve=serve, columns=None)
    result = deployed.run("chat", RUN, "x")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "docs/calling.md#endpoints-inside-the-vpc" in result.stderr
    record = deployed.store.record(RUN)
    assert record.endpoint is not None
    ended = record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"ended": CREATED})})
    deployed.store.update(RUN, lambda _: ended)
    for command in ("chat", "token", "snippet"):
        result = deployed.run(command, RUN, *(["x"] if command == "chat" else []))
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"the endpoint of {RUN} ended at 2026-11-20 12:00 UTC" in result.stderr


def test_two_runs_answer_side_by_side(deployed: Deployed, server: OpenAiServer, gcloud: Path) -> None:
    with openai_server() as second:
        second.refusal = (503, {"error": {"message": "loading"}})
        served(deployed, server.url, columns=ONE_FIELD)
        served(deployed, second.url, run=OTHER, columns=ONE_FIELD)
        result = deployed.run("chat", RUN, "x?", "--compare", OTHER)
        assert result.exit_code == 1
        head, answers = result.stdout.splitlines()
        assert RUN in head
        assert OTHER in head
        assert re.fullmatch(r"select 1 +error: the endpoint of \S+ answered HTTP 503: loading *", answers)
        second.refusal, second.parts = None, ["two"]
        assert deployed.run("chat", RUN, "x?", "--compare", OTHER).stdout.splitlines()[1].split() == [
            "select", "1", "two",
        ]  # fmt: skip
        assert server.prompts[0] == second.prompts[0] == [("user", "Q: x?")]


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.popen = subprocess.Popen([*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text, self.seen = "", 0

    def wait_for(self, text: str) -> None:
        """Wait for a text after the text that was last waited for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.text.find(text, self.seen)) < 0:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, self.text
            try:
                self.text += os.read(self.master, 4096).decode()
            except OSError as error:  # the command has ended
                raise AssertionError(self.text) from error
        self.seen = found + len(text)

    def type(self, text: str) -> None:
        os.write(self.master, f"{text}\n".encode())

    def code(self) -> int:
        code = self.popen.wait(PATIENCE_SECONDS)
        os.close(self.master)
        return code


def test_a_terminal_shows_that_down_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal("down", "--state", str(tmp_path))
    terminal.wait_for("ending the local stack")
    terminal.wait_for("nothing was running")
    assert terminal.code() == 0


def test_a_conversation_keeps_its_history(deployed: Deployed, server: OpenAiServer, gcloud: Path) -> None:
    write_toml(deployed.configuration)
    served(deployed, server.url, columns=None)
    terminal = Terminal("chat", RUN, "--system", "Be short.")
    terminal.wait_for("> ")
    terminal.type("one")
    terminal.wait_for("select 1")
    terminal.wait_for("> ")
    server.refusal = (400, {"error": {"message": "too long"}})
    terminal.type("two")
    terminal.wait_for("too long")
    server.refusal = None
    terminal.type("three")
    terminal.wait_for("select 1")
    terminal.type("")
    assert terminal.code() == 0
    begin = [("system", "Be short."), ("user", "one"), ("assistant", "select 1")]
    assert server.prompts == [begin[:2], [*begin, ("user", "two")], [*begin, ("user", "three")]]


def test_a_conversation_asks_for_the_fields_of_the_training(
    deployed: Deployed, server: OpenAiServer, gcloud: Path
) -> None:
    write_toml(deployed.configuration)
    served(deployed, server.url)
    terminal = Terminal("chat", RUN, "--field", "context=t")
    for question in ("one", "two"):
        terminal.wait_for("question> ")
        terminal.type(question)
        terminal.wait_for("select 1")
    terminal.wait_for("question> ")
    os.write(terminal.master, b"\x04")
    assert terminal.code() == 0
    users = [("user", f"Question: {question}\nContext: t") for question in ("one", "two")]
    assert server.prompts == [[("system", "Write SQL."), user] for user in users]


RUNNERS = {"python": [sys.executable, "-P"], "curl": ["bash", "-eu"], "js": ["node"]}


@pytest.mark.parametrize("lang", RUNNERS)
@pytest.mark.parametrize("has_token", [True, False])
def test_a_snippet_runs(
    deployed: Deployed, server: OpenAiServer, gcloud: Path, tmp_path: Path, lang: str, has_token: bool
) -> None:
    if shutil.which(RUNNERS[lang][0]) is None:
        pytest.skip(f"this machine has no {RUNNERS[lang][0]}")
    columns = {"prompt": "Frage „{question}“ 🚗 'a' \"b\" $HOME `id`\n{context}", "completion": "{answer}"}
    kept: dict[str, Any] = {"target": TPU, "training": FULL, "serve": {"type": "training_vm", "ttl": "1h"}}
    served(deployed, server.url, columns=columns, **({} if has_token else kept))
    server.busy = 3 if has_token else 0  # OpenAI's client repeats a request twice by itself
    printed = deployed.run("snippet", RUN, "--lang", lang)
    assert printed.exit_code == 0, printed.output
    text = printed.stdout
    assert (f'export DROPFORGE_TOKEN="$(dropforge token {RUN})"' in text) is has_token
    if lang == "curl":  # the export calls dropforge itself
        (gcloud.parent / "dropforge").symlink_to(COMMAND[0])
    write_toml(deployed.configuration)
    program = tmp_path / {"python": "ask.py", "curl": "ask.sh", "js": "ask.mjs"}[lang]
    program.write_text(text)
    environment = {**os.environ, "DROPFORGE_TOKEN": "identity-token"}
    done = subprocess.run(
        [*RUNNERS[lang], str(program)], capture_output=True, text=True, env=environment, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "select 1" in done.stdout
    assert server.prompts[0] == [("user", "Frage „{question}“ 🚗 'a' \"b\" $HOME `id`\n{context}")]
    if has_token:
        assert server.tokens == ["Bearer identity-token"] * 4


def test_a_snippet_asks_a_held_out_question(deployed: Deployed, server: OpenAiServer) -> None:
    served(deployed, server.url)
    prompt = [{"role": "user", "content": "held out?"}]
    files = Path("files")
    (files / "attempt-1").mkdir(parents=True)
    (files / "attempt-1" / "samples.json").write_text(json.dumps([{"prompt": prompt, "expected": "e", "before": "b"}]))
    client = clients.storage()
    uri = f"gs://p-runs/{model_prefix(RUN)}"
    written = upload_directory(client, files, uri)
    source = Source(uri="u", revision="r")
    manifest = Manifest(
        run=RUN,
        attempt=1,
        created=CREATED,
        spec_sha256="s",
        base=source,
        dataset=source,
        serve_path="attempt-1",
        files=written,
    )
    write_manifest(client, "p-runs", manifest)
    assert '"content": "held out?"' in deployed.run("snippet", RUN, "--lang", "js").stdout
