"""`submit` before it uploads: sources that do not exist, and a spec that a run had already; `put`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.cloud.storage import Blob

from dropforge.base import names
from dropforge.run.record import Endpoint, RunState
from dropforge.spec import JobSpec
from dropforge_cli import duplicates, sources
from dropforge_cli.deployment import connect
from dropforge_cli.main import cli
from dropforge_cli.problems import CliError
from dropforge_cli.sources import SOURCES, prepare
from dropforge_local.stack.config import StackInfo

from ..deployments import clients
from .conftest import CREATED, EXAMPLE, Deployed, attempt


def spec(source: str = "owner/rows", model: str = "owner/tiny-1m", name: str = "job.json") -> str:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": model},
        "dataset": {"source": source},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }
    Path(name).write_text(json.dumps(document))
    return name


def specs() -> list[str]:
    return [blob.name for blob in clients.storage().list_blobs("p-specs")]


def test_a_missing_source_is_refused_with_the_command_that_creates_it(deployed: Deployed) -> None:
    clients.storage().create_bucket("p-data")
    result = deployed.run("submit", spec("gs://p-data/rows.jsonl", "gs://p-none/model"))
    assert result.exit_code == 1
    assert "/model/source: gs://p-none/model does not exist: no such bucket" in result.stderr
    assert "hint: gcloud storage buckets create gs://p-none --project=p --location=us-central1" in result.stderr
    assert "&& dropforge put DIRECTORY gs://p-none/model" in result.stderr
    assert "/dataset/source: gs://p-data/rows.jsonl does not exist: no such object" in result.stderr
    assert "dropforge put FILE gs://p-data/rows.jsonl" in result.stderr
    assert specs() == []
    assert deployed.run("submit", "--unchecked", "job.json").exit_code == 0


def test_a_source_that_takes_minutes_says_so(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With short texts in place of the real sources, whose model trains for a minute."""
    model, rows = "gs://local-data/tiny-gemma3", "gs://local-data/text-to-sql.jsonl"
    Path("made").write_text("made")
    for uri in (model, rows):
        monkeypatch.setitem(SOURCES, uri, lambda cache: Path("made"))
    monkeypatch.setattr(sources, "make_secrets", lambda spec, deployment: [])  # this project has no Secret Manager
    stack = StackInfo(0, 0, "", "", "", "", {}, "")
    prepare(JobSpec.model_validate_json(Path(spec(rows, model)).read_text()), replace(connect(None), stack=stack))
    told = capsys.readouterr().err.splitlines()
    assert f"makes {model}: trained once, in a minute" in told
    assert f"makes {rows}" in told
    assert clients.storage().bucket("local-data").blob("tiny-gemma3").download_as_bytes() == b"made"


def test_no_example_is_made_for_a_spec_that_lacks_something_else(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "gs://local-data/tiny-gemma3", lambda cache: pytest.fail("this takes minutes"))
    stack = StackInfo(0, 0, "", "", "", "", {}, "")
    job = JobSpec.model_validate_json(
        Path(spec("gs://local-data/text-to-sq.jsonl", "gs://local-data/tiny-gemma3")).read_text()
    )
    with pytest.raises(CliError) as error:
        prepare(job, replace(connect(None), stack=stack))
    assert error.value.message == (
        "/dataset/source: gs://local-data/text-to-sq.jsonl does not exist: no such bucket; "
        "did you mean gs://local-data/text-to-sql.jsonl?"
    )
    assert error.value.hint == "dropforge put FILE gs://local-data/text-to-sq.jsonl"


@pytest.mark.parametrize("command", ["validate", "submit"])
@pytest.mark.parametrize("source", ["rows.csv", "data/rows", "none.jsonl"])
def test_a_file_of_this_machine_is_no_source(deployed: Deployed, command: str, source: str) -> None:
    Path("data").mkdir()
    for file in ("rows.csv", "data/rows"):
        Path(file).write_text("a,b\n1,2\n")
    result = deployed.run(command, spec(source))
    assert result.exit_code == 1
    assert f"/dataset/source: a file on this machine, which the training cannot read; found '{source}'" in result.output
    assert f"`dropforge put {source} gs://BUCKET/{Path(source).name}`" in result.output
    assert specs() == []


def test_what_put_copies_can_be_named(deployed: Deployed) -> None:
    clients.storage().create_bucket("p-data")
    Path("rows.csv").write_text("prompt,completion\n1,2\n")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert deployed.run("put", "rows.csv", "gs://p-data/in/rows.csv").stdout == "gs://p-data/in/rows.csv\n"
    assert deployed.run("put", "model", "gs://p-data/models/m").exit_code == 0
    assert deployed.run("submit", spec("gs://p-data/in/rows.csv", "gs://p-data/models/m")).exit_code == 0
    assert clients.storage().bucket("p-data").blob("in/rows.csv").download_as_bytes() == b"prompt,completion\n1,2\n"


@pytest.mark.parametrize("uri", ["rows.csv", "gs://p-data", "gs:///rows.csv", "s3://p-data/rows.csv"])
def test_put_takes_only_an_object_of_a_bucket(deployed: Deployed, uri: str) -> None:
    result = deployed.run("put", EXAMPLE, uri)
    assert result.exit_code == 1
    assert f"the URI is {uri!r}; expected gs://BUCKET/NAME" in result.stderr


@pytest.mark.parametrize("bucket", ["Local_Data", "local data", "-data", "d"])
def test_put_refuses_the_name_of_no_bucket(deployed: Deployed, bucket: str) -> None:
    result = deployed.run("put", EXAMPLE, f"gs://{bucket}/rows.csv")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: the bucket's name is {bucket!r}; expected lower-case letters")
    assert f"hint: such as gs://local-data/{EXAMPLE.name}" in result.stderr


def test_put_into_a_missing_bucket_is_an_error_of_one_line(deployed: Deployed) -> None:
    result = deployed.run("put", EXAMPLE, "gs://p-none/rows.csv")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: config: ")


def accepted(deployed: Deployed, run: str, state: RunState, **changes: Any) -> None:
    deployed.record(run, state, attempts=[attempt()], **changes)


def test_a_spec_that_a_run_had_is_refused_without_a_terminal(deployed: Deployed) -> None:
    run = deployed.run("submit", spec(), "--name", "team/first.json").stdout.strip()
    result = deployed.run("submit", "job.json")
    assert result.exit_code == 2
    assert f"the same spec is run {run}: dropped, and not accepted yet\nhint: `--again`" in result.stderr
    accepted(deployed, run, RunState.SUCCEEDED)
    result = deployed.run("submit", "job.json")
    assert f"the same spec is run {run}: SUCCEEDED, cost so far $1.00\n" in result.stderr
    assert specs() == ["specs/team/first.json"]
    assert deployed.run("submit", "job.json", "--again").exit_code == 0
    assert len(specs()) == 2


def test_the_endpoint_of_the_run_is_named(deployed: Deployed) -> None:
    run = deployed.run("submit", spec()).stdout.strip()
    endpoint = Endpoint(url="u", model="m", service="s", region="r", ready=CREATED, expires=CREATED)
    accepted(deployed, run, RunState.SUCCEEDED, endpoint=endpoint)
    assert "its endpoint serves until 2026-11-20 12:00 UTC" in deployed.run("submit", "job.json").stderr


def test_another_spec_under_the_same_name_is_no_duplicate(deployed: Deployed) -> None:
    first = deployed.run("submit", spec()).stdout
    second = deployed.run("submit", spec("owner/other-rows"))
    assert (second.exit_code, second.stdout != first) == (0, True)
    third = deployed.run("submit", spec())  # its object was replaced
    assert third.exit_code == 0


@pytest.mark.parametrize("state", [RunState.REJECTED, RunState.CANCELLED])
def test_a_spec_that_was_rejected_or_cancelled_may_be_dropped_again(deployed: Deployed, state: RunState) -> None:
    run = deployed.run("submit", spec()).stdout.strip()
    deployed.record(run, state)
    assert deployed.run("submit", "job.json").exit_code == 0


def test_a_cancelled_run_hides_no_earlier_run_of_the_same_spec(deployed: Deployed) -> None:
    worked = deployed.run("submit", spec(), "--name", "first.json").stdout.strip()
    deployed.record(worked, RunState.TRAINING)
    ended = deployed.run("submit", "job.json", "--again", "--name", "second.json").stdout.strip()
    deployed.record(ended, RunState.CANCELLED)
    result = deployed.run("submit", "job.json")
    assert (result.exit_code, f"the same spec is run {worked}" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", ["validate", "plan", "submit", "preflight"])
def test_a_dash_reads_the_spec_from_the_standard_input(deployed: Deployed, command: str) -> None:
    document = Path(spec()).read_text()
    bad = CliRunner().invoke(cli, [command, "-"], input=document.replace("owner/rows", "rows.csv"))
    assert (bad.exit_code, "/dataset/source: a file on this machine" in bad.output) == (1, True), bad.output
    if command != "preflight":  # this project has no APIs to ask
        good = CliRunner().invoke(cli, [command, "-"], input=document)
        assert good.exit_code == 0, good.output
    assert specs() == (["specs/n.json"] if command == "submit" else [])


def stack_of(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `put` take the buckets of this project for those of a local stack."""
    stack = StackInfo(0, 0, "", "", "", "", {}, "")
    monkeypatch.setattr(sources, "connect", lambda state: replace(connect(state), stack=stack))


def test_put_asks_before_it_makes_a_bucket(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    stack_of(deployed, monkeypatch)
    clients.storage().create_bucket("rows-of-mine")
    refused = deployed.run("put", EXAMPLE, "gs://row-of-mine/a.json")
    assert refused.exit_code == 1
    assert "gs://row-of-mine does not exist; did you mean gs://rows-of-mine?" in refused.stderr
    assert "hint: `--make-bucket` makes it" in refused.stderr
    for uri in ("gs://rows-of-mine/a.json", "gs://local-data/a.json"):
        assert deployed.run("put", EXAMPLE, uri).exit_code == 0
    assert deployed.run("put", "--make-bucket", EXAMPLE, "gs://row-of-mine/a.json").exit_code == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_in_a_terminal_the_user_decides_about_a_bucket(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    stack_of(deployed, monkeypatch)
    monkeypatch.setattr(sources, "is_terminal", lambda: True)
    result = CliRunner().invoke(cli, ["put", str(EXAMPLE), "gs://new-one/a.json"], input=answer)
    assert (result.exit_code, "Make gs://new-one? [y/N]" in result.stderr) == (code, True), result.output
    assert ("new-one" in [bucket.name for bucket in clients.storage().list_buckets()]) == (code == 0)


def test_the_cache_is_one_for_all_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPFORGE_CACHE", "/own")
    assert sources.cache_directory() == Path("/own")
    monkeypatch.delenv("DROPFORGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert sources.cache_directory() == Path("/caches/dropforge")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert sources.cache_directory() == Path("/home/me/.cache/dropforge")


@pytest.mark.parametrize(("answer", "code", "runs"), [("y\n", 0, 2), ("n\n", 1, 1), ("\n", 1, 1)])
def test_in_a_terminal_the_user_decides(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, runs: int
) -> None:
    run = deployed.run("submit", spec()).stdout.strip()
    monkeypatch.setattr(duplicates, "is_terminal", lambda: True)
    result = CliRunner().invoke(cli, ["submit", "job.json", "--name", "b.json"], input=answer)
    assert result.exit_code == code
    assert f"the same spec is run {run}" in result.stderr
    assert "Start another run of it? [y/N]" in result.stderr
    assert len(specs()) == runs


def test_the_same_object_dropped_again_by_another_client_is_another_run(deployed: Deployed) -> None:
    first = deployed.run("submit", spec()).stdout.strip()
    blob = clients.storage().bucket("p-specs").blob("specs/job.json")
    blob.upload_from_filename("job.json")
    assert names.run_id_of_object("p-specs", blob.name, blob.generation) != first


def test_an_upload_whose_reply_was_lost_is_the_same_run(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Blob.upload_from_string

    def repeated(*arguments: Any, **options: Any) -> None:
        for _ in range(2):  # as the client does if the first reply is lost
            upload(*arguments, **options)

    monkeypatch.setattr(Blob, "upload_from_string", repeated)
    for again in ([], ["--again"]):
        result = deployed.run("submit", spec(), *again)
        assert result.exit_code == 0, result.output
        [blob] = clients.storage().list_blobs("p-specs")
        assert result.stdout.strip() == names.run_id_of_object("p-specs", blob.name, blob.generation)


def test_a_spec_that_somebody_else_has_dropped_meanwhile_is_not_replaced(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, path = Blob.upload_from_string, spec()

    def overtaken(blob: Blob, data: bytes, **options: Any) -> None:
        upload(clients.storage().bucket("p-specs").blob(blob.name), b"{}")
        upload(blob, data, **options)

    monkeypatch.setattr(Blob, "upload_from_string", overtaken)
    result = deployed.run("submit", path)
    assert result.exit_code == 1
    assert "was written by somebody else meanwhile" in result.stderr
    assert [blob.download_as_bytes() for blob in clients.storage().list_blobs("p-specs")] == [b"{}"]


def test_again_writes_a_new_value_into_the_metadata(deployed: Deployed) -> None:
    written = []
    for _ in range(2):
        deployed.run("submit", spec(), "--again")
        [blob] = clients.storage().list_blobs("p-specs")
        written.append(blob.metadata["again"])
    assert written[0] != written[1]
