"""`dropforge smoke` on a local stack whose containers train nothing, and what it refuses to start."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from dropforge.base.clock import utc_now
from dropforge.run.artifacts import Manifest, Source, model_prefix, upload_directory, write_manifest
from dropforge.run.record import RunState
from dropforge_cli import smoke, smoke_checks, smoke_plan
from dropforge_cli.deployment import connect
from dropforge_cli.main import cli
from dropforge_cli.runs import request_cancel
from dropforge_cli.specs import upload_spec
from dropforge_local.stack import control as local

from ..deployments import clients, forget
from ..stack.conftest import NOOP_CONFIG
from .conftest import ROOT, Deployed, Run, toml, write_toml

PRICES = [f"--price={target}=1" for target in ("gke", "ray", "tpu_vm")]
document, look_at_training = smoke_plan.document, smoke.Smoke._observe_training


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("smoke") / "stack"
    NOOP_CONFIG.save(state)
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("DROPFORGE_") or name.endswith("_EMULATOR_HOST")]:
            del os.environ[name]
        local.up(state)
        forget_clients()
        yield state
    local.down(state)
    remains = local.leftovers(state)
    assert (remains.processes, remains.ports) == ([], [])
    forget_clients()


def forget_clients() -> None:
    """Those of another stack, too: whatever was tested before in this process has left some."""
    forget()


@pytest.fixture
def tested(stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, str]]:
    """Run the smoke test with containers that behave so; its result and its report. Who sees one hang hits Ctrl-C."""

    def tested(behave: str, *options: str) -> tuple[Result, str]:
        def with_behaviour(target: str, cancels: bool, *rest: Any) -> dict[str, Any]:
            given = document(target, cancels, *rest)
            given["labels"]["behave"] = "hang" if cancels else behave
            return given

        def look_and_let_go(test: smoke.Smoke, one: smoke_checks.Seen) -> None:
            look_at_training(test, one)
            if one.training and one.record and one.record.state is RunState.TRAINING:
                if one.spec.labels["behave"] == "hang":
                    os.kill(os.getpid(), signal.SIGINT)
                bucket = clients.storage().bucket(test.deployment.settings.runs_bucket)
                bucket.blob(f"checkpoints/{one.run}/go").upload_from_string("")

        monkeypatch.setattr(smoke.Smoke, "_observe_training", look_and_let_go)
        monkeypatch.setattr(smoke_plan, "document", with_behaviour)
        report = tmp_path / "report.md"
        words = ["smoke", "--state", str(stack), "--yes", "--output", str(report), *options]
        with patch.dict(os.environ):
            result = CliRunner().invoke(cli, words)
        return result, report.read_text() if report.exists() else ""

    return tested


def rows(report: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Status and message by promise and run."""
    found = re.findall(r"^\| ([a-z ]+) \| `([a-z-]+)` .*? \| ([^|]*?) \| (.*) \|$", report, re.M)
    return {(promise, target): (status, message) for status, promise, target, message in found}


@pytest.mark.slow
def test_every_promise_is_kept_on_every_target(tested: Callable[..., tuple[Result, str]], stack: Path) -> None:
    result, report = tested("whole", "--max-cost-usd=5", *PRICES)
    assert result.exit_code == 0, result.output
    found = rows(report)
    unseen = {promise for (promise, _), (status, _) in found.items() if status != "passed"}
    assert unseen == set(smoke_checks.IMPLIED), result.output
    assert {promise for promise, _ in found} == {*smoke_checks.PROMISES, *smoke_checks.IMPLIED}
    assert {target for promise, target in found if promise == "manifest"} == {"cloud_run", "gke", "ray", "tpu_vm"}
    assert left(stack) == []


def test_a_broken_promise_is_named(tested: Callable[..., tuple[Result, str]], stack: Path) -> None:
    result, report = tested("succeed", "--max-cost-usd=2", "--target=cloud_run")
    assert result.exit_code == 1
    assert report.startswith("# dropforge smoke: failed")
    found = rows(report)
    assert found["checkpoint", "cloud_run"] == ("failed", "there is no checkpoint")
    assert found["manifest", "cloud_run"][0] == "failed"
    assert found["cancel-ends", "cloud_run (cancelled)"][0] == "passed"
    assert left(stack) == []


def test_ctrl_c_ends_what_was_started(tested: Callable[..., tuple[Result, str]], stack: Path) -> None:
    result, report = tested("hang", "--max-cost-usd=2", "--target=cloud_run")
    assert result.exit_code == 130, result.output
    assert rows(report)["audit-clean", ""][0] == "passed"
    assert left(stack) == []


@pytest.mark.slow
def test_whatever_fails_all_is_ended(
    tested: Callable[..., tuple[Result, str]], stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that was not answered, and an endpoint whose end was refused at first."""
    uploads: list[str] = []
    cancels: list[str] = []
    upload, cancel = upload_spec, request_cancel

    def upload_unanswered(*arguments: Any) -> str:
        uploads.append(upload(*arguments))
        if len(uploads) == 2:
            raise ConnectionError("no answer")
        return uploads[-1]

    def cancel_refused(*arguments: Any) -> None:
        cancels.append(arguments[1])
        if len(cancels) == 1:
            raise ConnectionError("refused")
        cancel(*arguments)

    monkeypatch.setattr(smoke, "request_cancel", cancel_refused)
    result, report = tested("succeed", "--max-cost-usd=2", "--target=cloud_run")
    assert (result.exit_code, len(cancels) > 2) == (1, True), result.output
    assert rows(report)["ledger-gone", "cloud_run"][0] == "passed"

    monkeypatch.setattr(smoke, "upload_spec", upload_unanswered)
    result, report = tested("hang", "--max-cost-usd=2", "--target=cloud_run")
    assert result.exit_code == 1
    assert "- ConnectionError: no answer" in report
    assert set(uploads) <= set(cancels)
    assert rows(report)["audit-clean", ""] == ("passed", "2 ledgers agree with the cloud")
    assert left(stack) == []


def left(stack: Path) -> list[str]:
    """What the emulated cloud has, but for the cluster that always stands."""
    return [name for name in local.leftovers(stack).resources if "/clusters/dropforge" not in name]


def test_the_limits_of_all_runs_together_are_within_the_limit(dropforge: Run) -> None:
    write_toml({**toml(), "gke_cluster": "dropforge", "train_ray_image": "r", "train_maxtext_image": "m"})
    known = connect(None).settings
    runs = smoke_plan.plan_runs(known, smoke_plan.Options(prices={"gke": 1.2, "ray": 2.4, "tpu_vm": 1.2}), 5)
    assert [one.target for one in runs] == ["cloud_run", "gke", "ray", "tpu_vm", "cloud_run"]
    assert [one.cancels for one in runs] == [False] * 4 + [True]
    assert [one.target for one in runs if one.spec.serve] == ["cloud_run"]
    assert [one.spec.limits.max_cost_usd for one in runs] == [one.limit_usd for one in runs]
    assert 2 < sum(one.limit_usd for one in runs) <= 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-cost-usd=0.5", "--target=cloud_run"], "$0.5000 is too little: cloud_run $"),
        (["--max-cost-usd=100"], "what gke costs is unknown: no price for GKE nvidia-l4"),
        (["--max-cost-usd=100", "--target=ray"], "the deployment does not have target ray"),
    ],
)
def test_what_is_refused_before_anything_starts(deployed: Deployed, options: list[str], said: str) -> None:
    write_toml({**deployed.configuration, "gke_cluster": "dropforge"})
    result = deployed.run("smoke", "--yes", *options)
    assert result.exit_code == 1
    assert said in result.stderr
    assert dropped(deployed) == []


def test_nothing_is_dropped_unless_it_is_wanted(deployed: Deployed) -> None:
    result = CliRunner().invoke(cli, ["smoke", "--max-cost-usd=2"], input="n\n")
    assert result.exit_code == 1
    assert "at most $1.34 of $2.00" in result.output
    assert dropped(deployed) == []


@pytest.mark.parametrize("price", ["gke", "gke=", "gke=much", "gke=-1", "gke=nan", "moon=1"])
def test_a_price_is_a_number_for_a_target(dropforge: Run, price: str) -> None:
    result = dropforge("smoke", "--max-cost-usd=2", "--price", price)
    assert (result.exit_code, "expected" in result.output) == (2, True)


def dropped(deployed: Deployed) -> list[str]:
    return [blob.name for blob in clients.storage().list_blobs(deployed.configuration["specs_bucket"])]


@pytest.mark.parametrize(
    ("change", "status"), [({}, "passed"), ({"sha256": "0" * 64}, "failed"), ({"size": 1}, "failed")]
)
def test_a_model_is_what_its_manifest_says(
    deployed: Deployed, tmp_path: Path, change: dict[str, Any], status: str
) -> None:
    run, bucket = "smoke-cloud-run-0123456789ab", deployed.configuration["runs_bucket"]
    (tmp_path / "m" / "attempt-1").mkdir(parents=True)
    (tmp_path / "m" / "attempt-1" / "weights").write_text("weights")
    (file,) = upload_directory(clients.storage(), tmp_path / "m", f"gs://{bucket}/{model_prefix(run)}")
    source = Source(uri="u", revision="r")
    files = [file.model_copy(update=change)]
    made = {"run": run, "attempt": 1, "created": utc_now(), "spec_sha256": "", "base": source, "dataset": source}
    write_manifest(clients.storage(), bucket, Manifest(**made, serve_path="attempt-1", files=files))
    connected = connect(None)
    (one, _) = smoke_plan.plan_runs(connected.settings, smoke_plan.Options(), 2)
    one.run = run
    assert smoke_checks.manifest(one, connected).status == status


@pytest.mark.parametrize(("status", "shown"), [("passed", "passed"), ("failed", "not checked"), (None, "not checked")])
def test_what_a_check_shows_by_the_way(deployed: Deployed, status: str | None, shown: str) -> None:
    known = [] if status is None else [smoke_checks.Result(status, "endpoint-answers", "cloud_run", "")]
    known.append(smoke_checks.Result("passed", "run-states", "gke", ""))
    found = {one.promise: one.status for one in smoke_checks.implied(known, connect(None))}
    assert found["startup-probe"] == shown
    assert found["functions-token"] == "passed"
    assert found["tpu-rights"] == "not checked"  # no run was on a TPU VM


def test_the_checklist_names_every_promise_and_no_other() -> None:
    text = (ROOT / "docs" / "cloud-checklist.md").read_text()
    lines = re.findall(r"^\| `([a-z0-9-]+)` \| (.*)$", text, re.M)
    by_hand = tuple(name for name, rest in lines if rest.startswith("by hand |"))
    assert by_hand == smoke_checks.BY_HAND
    assert {name for name, _ in lines} - {*by_hand} == {*smoke_checks.PROMISES, *smoke_checks.IMPLIED}
    assert len(lines) == len({name for name, _ in lines})
    assert len(lines) == len(re.findall(r"^\| (?!id|---)", text, re.M)), "a line without an id"
