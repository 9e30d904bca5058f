"""`dropforge demo` and the commands that need a whole local stack, as separate processes.

Two tests and the first Ctrl-C start their commands and stacks as users do. Those of all other tests are forked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .commands import COMMAND, NOOP, NOOP_COMMAND, ROOT, Process, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def noop_spec(behave: str = "succeed", **changes: Any) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": "noop",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "gs://local-data/text-to-sql.jsonl", "ignore": ["context"]},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": {"type": "cloud_run", "ttl": "1h"},
        "notify": {"slack": {"webhook_secret": "slack-webhook"}},
        "secrets": {"HF_TOKEN": "hf-token"},
        "labels": {"behave": behave},
        **changes,
    }


def listening(state: Path) -> list[int]:
    """Return the stack's ports that still accept connections."""
    path = state / "ports.json"
    ports = json.loads(path.read_text()) if path.exists() else []
    return [port for port in ports if _accepts(port)]


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def write_spec(directory: Path, spec: dict[str, Any]) -> str:
    path = directory / "spec.json"
    path.write_text(json.dumps(spec))
    return str(path)


def test_a_demo_shows_every_step_and_leaves_nothing(start: Callable[..., Process], tmp_path: Path) -> None:
    demo = start("demo", write_spec(tmp_path, noop_spec()))
    assert demo.code() == 0, demo.text()
    output = demo.text()
    expected = [
        "started the local stack", "created the secrets", "uploaded gs://local-data/text-to-sql.jsonl", "accepted",
        "training", "succeeded", "exact match       0    0.9", "seconds per stage", "endpoint in us-central1",
        "cloud.google.com/run/pricing", "as of 20", "3 messages as sent", "noop accepted", "noop training started",
        "noop succeeded", "what is left  0 resources, 0 processes, 0 ports", "done after",
    ]  # fmt: skip
    places = [output.find(text) for text in expected]
    assert -1 not in places, f"{expected[places.index(-1)]!r} is not in\n{output}"
    assert places == sorted(places)
    assert listening(tmp_path / "build" / "demo") == []


def test_a_demo_puts_two_models_behind_one_url_and_goes_back(fork: Callable[..., Process], tmp_path: Path) -> None:
    unnamed = fork("demo", "--again", write_spec(tmp_path, noop_spec(serve=None)))
    assert unnamed.code() == 1
    assert "the spec has no `serve`" in unnamed.text()
    demo = fork("demo", "--again", write_spec(tmp_path, noop_spec()))
    assert demo.code() == 0, demo.text()
    output = demo.text()
    expected = [
        "dropped the first spec", "dropped the second spec", "exact match       0    0.9", "one URL  http://",
        "first spec    ok", "second spec   ok", "answers with revision 1, as model noop", "rolled back   ok",
        "the rollback took", "endpoint noop is retired", "noop serves again behind endpoint noop",
        "what is left  0 resources, 0 processes, 0 ports",
    ]  # fmt: skip
    places = [output.find(text) for text in expected]
    assert -1 not in places, f"{expected[places.index(-1)]!r} is not in\n{output}"
    assert places == sorted(places)
    assert listening(tmp_path / "build" / "demo") == []


def test_a_demo_shows_why_its_run_failed(fork: Callable[..., Process], tmp_path: Path) -> None:
    demo = fork("demo", write_spec(tmp_path, noop_spec("fail-data")))
    assert demo.code() == 1
    assert "the run is FAILED\ndata: behaves as data" in demo.text()
    assert "0 resources, 0 processes, 0 ports" in demo.text()


def test_a_crash_shows_the_end_of_the_container_s_log(fork: Callable[..., Process], tmp_path: Path) -> None:
    demo = fork("demo", write_spec(tmp_path, noop_spec("no-such-behaviour")))
    assert demo.code() == 1
    assert "the end of the log of  projects/local-project/locations/us-central1/jobs/df-spec-" in demo.text()
    assert "KeyError: 'no-such-behaviour'" in demo.text()


def test_a_rejected_spec_shows_its_problems(fork: Callable[..., Process], tmp_path: Path) -> None:
    demo = fork("demo", write_spec(tmp_path, noop_spec(model={"source": "gs://no-such-bucket/model"})))
    assert demo.code() == 1
    assert "the run is REJECTED\n/model/source: the bucket does not exist" in demo.text()


@pytest.mark.parametrize("moment", ["", "started the local stack", "the container has started", "what is left"])
def test_ctrl_c_at_any_moment_leaves_nothing(
    start: Callable[..., Process], fork: Callable[..., Process], tmp_path: Path, moment: str
) -> None:
    spec = noop_spec("succeed" if moment == "what is left" else "hang")
    demo = (fork if moment else start)("demo", write_spec(tmp_path, spec))
    state = tmp_path / "build" / "demo"
    if moment:
        demo.wait_for(moment)
    else:
        while not (state / "state.db").exists():  # the stack is starting
            time.sleep(0.005)
    ports = json.loads((state / "ports.json").read_text()) if moment else []
    demo.popen.send_signal(signal.SIGINT)
    time.sleep(0.2)
    demo.popen.send_signal(signal.SIGTERM)  # a second signal changes nothing
    assert demo.code() == (0 if moment == "what is left" else 130), demo.text()
    assert "Traceback" not in demo.text()
    assert processes_of(state) == []
    assert not any(_accepts(port) for port in ports)


def test_two_demos_do_not_share_a_directory_and_a_killed_one_is_cleaned_up(
    fork: Callable[..., Process], tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, noop_spec("hang"))
    first = fork("demo", spec)
    first.wait_for("the container has started")
    second = fork("demo", spec)
    assert second.code() == 1
    assert "error: another demo runs in" in second.text()
    first.popen.kill()
    first.code()
    third = fork("demo", write_spec(tmp_path, noop_spec(serve=None)))
    assert third.code() == 0, third.text()
    assert re.search(r"ended stack \(pid \d+\), left by an earlier demo", third.text())


@pytest.mark.parametrize(
    ("purpose", "engine"), [("training on cloud_run", "transformers"), ("serving by vllm", "vllm")]
)
def test_the_demo_ends_before_it_starts_a_stack_if_an_environment_cannot_be_created(
    fork: Callable[..., Process], tmp_path: Path, purpose: str, engine: str
) -> None:
    code = NOOP.replace(
        "cli(prog", "from dropforge_cli import demo; demo.ENVIRONMENTS = {PURPOSE: 'none.py'}; cli(prog"
    ).replace("PURPOSE", repr(purpose))
    options = ("--serve", engine, write_spec(tmp_path, noop_spec()))
    demo = fork("demo", *options, command=[sys.executable, "-P", "-c", code, NOOP_COMMAND[-1]])
    assert demo.code() == 1
    assert "error: the environment could not be created: tools/none.py exited with 2" in demo.text()
    assert "started the local stack" not in demo.text()


def open_to_others(directory: Path) -> Iterator[Path]:
    """The files and directories that users other than their owner may use."""
    return (
        path for path in [directory, *directory.rglob("*")] if not path.is_symlink() and path.stat().st_mode & 0o077
    )


def test_up_starts_and_down_ends_the_stack(start: Callable[..., Process], tmp_path: Path) -> None:
    up = start("up")
    assert up.code() == 0, up.text()
    assert up.text().startswith("the local stack is ready"), "a pipe shows no progress"
    http = re.search(r"http://127.0.0.1:(\d+)", up.text())
    assert http is not None
    assert start("runs", command=COMMAND).code() == 0
    again = start("up")
    assert again.code() == 0
    assert "runs already" in again.text()
    assert list(open_to_others(tmp_path / "build" / "local")) == [], "the state holds secrets"
    taken = start("up", "--state", "other", "--http-port", http[1])
    assert taken.code() == 1
    assert re.match(r"error: .*choose other ports with --http-port", taken.text(), re.S), taken.text()
    assert len(taken.text().splitlines()) <= 2
    down = start("down", command=COMMAND)
    assert down.code() == 0, down.text()
    assert re.fullmatch(r"ended stack \(pid \d+\)\n", down.text())
    assert start("down", command=COMMAND).code() == 0


def test_every_command_on_a_local_stack(fork: Callable[..., Process], tmp_path: Path) -> None:
    def output(*arguments: str, code: int = 0) -> str:
        process = fork(*arguments, command=COMMAND)
        assert process.code() == code, process.text()
        return process.text()

    assert fork("up").code() == 0
    spec = noop_spec(serve=None, dataset={"source": "owner/rows"}, secrets={})
    watched = output("submit", write_spec(tmp_path, spec), "--watch")
    run = watched.splitlines()[0]
    assert "succeeded" in watched
    assert run in output("runs")
    assert json.loads(output("status", run, "--json"))["state"] == "SUCCEEDED"
    assert re.search(rf"^gone      projects/.*/jobs/df-{run}-a1$", output("status"), re.M)

    hanging = output("submit", write_spec(tmp_path, {**spec, "labels": {"behave": "hang"}})).splitlines()[0]
    follower = fork("logs", hanging, "--follow", command=COMMAND)
    watcher = fork("status", hanging, "--watch", command=COMMAND)
    watcher.wait_for("the container has started")
    patient = fork("status", hanging, "--watch", command=COMMAND)
    patient.wait_for("the container has started")
    patient.popen.send_signal(signal.SIGINT)
    assert patient.code() == 130
    assert "the run continues" in patient.text()
    assert "requested the end of" in output("cancel", hanging)
    assert watcher.code() == 1
    assert "cancelled" in watcher.text()
    assert follower.code() == 0, follower.text()
    assert "Traceback" not in follower.text()
    assert re.search(r"^\d\d-\d\d \d\d:\d\d:\d\d progress, step 2 of 2, loss 1$", output("logs", run), re.M)
    assert '"message": "succeeded"' in output("logs", run, "--tail", "1", "--json")
    output("down", "--delete")


def test_a_newcomer_submits_an_example_and_calls_the_model(fork: Callable[..., Process], tmp_path: Path) -> None:
    def output(*arguments: str, code: int = 0) -> str:
        process = fork(*arguments, command=COMMAND)
        assert process.code() == code, process.text()
        return process.text()

    assert fork("up").code() == 0
    columns = {"prompt": "Question: {question}", "completion": "{answer}"}
    spec = write_spec(tmp_path, noop_spec(dataset={"source": "gs://local-data/text-to-sql.jsonl", "columns": columns}))
    watched = output("submit", spec, "--watch")
    assert "created gs://local-data/text-to-sql.jsonl in" in watched
    assert "created the secret hf-token for this stack" in watched
    endpoint = re.search(r"^endpoint (http://127\.0\.0\.1:\d+/v1)\n +model noop, until", watched, re.M)
    assert endpoint is not None, watched
    run = next(line for line in watched.splitlines() if re.fullmatch(r"spec-[0-9a-f]{12}", line))
    again = output("submit", spec, code=2)
    assert f"error: the same spec is run {run}: SUCCEEDED, cost so far $0." in again
    assert "its endpoint serves until" in again
    assert output("chat", run, "how many?") == "ok\n"
    words = {"_DROPFORGE_COMPLETE": "bash_complete", "COMP_WORDS": f"dropforge status {run[:6]}", "COMP_CWORD": "2"}
    completed = subprocess.run(COMMAND, cwd=tmp_path, env={**os.environ, **words}, capture_output=True, timeout=60)
    assert completed.stdout.decode() == f"plain,{run}\n"
    token = output("token", run)
    assert token.startswith("dropforge-local.")
    assert output("runs", "--json").count(endpoint[1]) == 1
    (tmp_path / "ask.sh").write_text(output("snippet", run, "--lang", "curl").partition("\n")[2])
    environment = {**os.environ, "DROPFORGE_TOKEN": token.strip()}
    asked = subprocess.run(["bash", "ask.sh"], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"] == "ok", asked.stderr
    output("down", "--delete")


def test_the_page_about_your_own_data_works_as_written(fork: Callable[..., Process], tmp_path: Path) -> None:
    """Every command of docs/your-data.md, in its order. Only `up` differs: its containers train nothing."""
    page = (ROOT / "docs" / "your-data.md").read_text()
    head = re.search(r"```csv\n(.*?)```", page, re.S)
    assert head is not None
    rows = "".join(f'"ticket number {number}",billing\n' for number in range(40))
    (tmp_path / "tickets.csv").write_text(head[1] + rows)
    run = "RUN"
    commands = re.findall(r"^\$ dropforge (.*)$", page, re.M)
    assert [command.split()[0] for command in commands] == [
        "up", "init", "put", "validate", "submit", "chat", "cancel", "down",
    ]  # fmt: skip
    for command in commands:
        words = [run if word == "RUN" else word for word in shlex.split(command)]
        if words[0] == "submit":  # a stand-in for the tiny model, whose training takes minutes
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "README.md").write_text("no model")
            assert fork("put", "model", "gs://local-data/tiny-gemma3", command=COMMAND).code() == 0
        process = fork(*words, command=NOOP_COMMAND if words[0] == "up" else COMMAND)
        assert process.code() == 0, process.text()
        if words[0] == "init":
            shown = re.search(r"```json\n(.*?)```", page, re.S)
            assert shown is not None
            written = json.loads((tmp_path / "my-job.json").read_text())
            assert json.loads(f"{{{shown[1]}}}")["dataset"] == written["dataset"]
        if words[0] == "submit":
            run = next(line for line in process.text().splitlines() if re.fullmatch(r"my-job-[0-9a-f]{12}", line))
        if words[0] == "chat":
            assert process.text() == "ok\n"
