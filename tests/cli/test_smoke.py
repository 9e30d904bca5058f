"""`dropforge smoke` on a local stack whose containers train nothing, and the runs that it refuses to start."""

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
from dropforge.money.plan import make_plan
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
from ..stack.zygote import Zygote
from .conftest import ROOT, Deployed, Run, toml, write_toml

PRICES = [f"--price={target}=1" for target in ("gke", "ray", "tpu_vm")]
document, observe_training = smoke_plan.document, smoke.Smoke._observe_training


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("smoke") / "stack"
    NOOP_CONFIG.save(state)
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("DROPFORGE_") or name.endswith("_EMULATOR_HOST")]:
            del os.environ[name]
        with patch.object(local, "_spawn", zygote.spawn):
            local.up(state)
        forget_clients()
        yield state
    local.down(state)
    remains = local.leftovers(state)
    assert (remains.processes, remains.ports) == ([], [])
    forget_clients()


def forget_clients() -> None:
    """Clear cached clients. Earlier tests in this process may have left clients of another stack."""
    forget()


@pytest.fixture
def tested(stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, str]]:
    """Run the smoke test with the given container behaviour; return its result and its report.

    A container that hangs causes a Ctrl-C.
    """

    def tested(behave: str, *options: str) -> tuple[Result, str]:
        def with_behaviour(target: str, cancels: bool, *rest: Any) -> dict[str, Any]:
            given = document(target, cancels, *rest)
            given["labels"]["behave"] = "hang" if cancels else behave
            return given

        def observe_and_release(test: smoke.Smoke, seen: smoke_checks.Seen) -> None:
            observe_training(test, seen)
            if seen.training and seen.record and seen.record.state is RunState.TRAINING:
                if seen.spec.labels["behave"] == "hang":
                    os.kill(os.getpid(), signal.SIGINT)
                bucket = clients.storage().bucket(test.deployment.settings.runs_bucket)
                bucket.blob(f"checkpoints/{seen.run}/go").upload_from_string("")

        monkeypatch.setattr(smoke.Smoke, "_observe_training", observe_and_release)
        monkeypatch.setattr(smoke_plan, "document", with_behaviour)
        report = tmp_path / "report.md"
        words = ["smoke", "--state", str(stack), "--yes", "--output", str(report), *options]
        with patch.dict(os.environ):
            result = CliRunner().invoke(cli, words)
        return result, report.read_text() if report.exists() else ""

    return tested


def rows(report: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return status and message by promise and run."""
    lines = re.findall(r"^\| ([a-z ]+) \| `([a-z-]+)` .*? \| ([^|]*?) \| (.*) \|$", report, re.M)
    return {(promise, target): (status, message) for status, promise, target, message in lines}


@pytest.mark.slow
def test_every_promise_is_kept_on_every_target(tested: Callable[..., tuple[Result, str]], stack: Path) -> None:
    result, report = tested("whole", "--max-cost-usd=7", *PRICES)
    assert result.exit_code == 0, result.output
    results = rows(report)
    unseen = {promise for (promise, _), (status, _) in results.items() if status != "passed"}
    assert unseen == set(smoke_checks.implied_promises()), result.output
    assert {promise for promise, _ in results} == {*smoke_checks.PROMISES, *smoke_checks.implied_promises()}
    assert {target for promise, target in results if promise == "manifest"} == {"cloud_run", "gke", "ray", "tpu_vm"}
    assert left(stack) == []


def test_a_broken_promise_is_named(tested: Callable[..., tuple[Result, str]], stack: Path) -> None:
    result, report = tested("succeed", "--max-cost-usd=4", "--target=cloud_run")
    assert result.exit_code == 1
    assert report.startswith("# dropforge smoke: failed")
    results = rows(report)
    assert results["checkpoint", "cloud_run"] == ("failed", "there is no checkpoint")
    assert results["manifest", "cloud_run"][0] == "failed"
    assert results["cancel-ends", "cloud_run (cancelled)"][0] == "passed"
    status, message = results["gpu-long-task", "cloud_run (cancelled)"]
    assert status == "passed"
    assert float(message.removeprefix("the task may take ").removesuffix(" s")) >= 61 * 60
    assert left(stack) == []


def test_ctrl_c_ends_every_run(tested: Callable[..., tuple[Result, str]], stack: Path) -> None:
    result, report = tested("hang", "--max-cost-usd=4", "--target=cloud_run")
    assert result.exit_code == 130, result.output
    assert rows(report)["audit-clean", ""][0] == "passed"
    assert left(stack) == []


@pytest.mark.slow
def test_every_run_is_ended_whatever_fails(
    tested: Callable[..., tuple[Result, str]], stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload gets no answer, and the first request to end an endpoint is refused."""
    uploads: list[str] = []
    cancels: list[Any] = []

    def upload_unanswered(*arguments: Any) -> str:
        uploads.append(upload_spec(*arguments))
        if len(uploads) == 2:
            raise ConnectionError("no answer")
        return uploads[-1]

    def cancel_refused(*arguments: Any) -> None:
        cancels.append(arguments[1])
        if len(cancels) == 1:
            raise ConnectionError("refused")
        request_cancel(*arguments)

    monkeypatch.setattr(smoke, "request_cancel", cancel_refused)
    result, report = tested("succeed", "--max-cost-usd=4", "--target=cloud_run")
    assert (result.exit_code, len(cancels) > 2) == (1, True), result.output
    assert rows(report)["ledger-gone", "cloud_run"][0] == "passed"

    monkeypatch.setattr(smoke, "upload_spec", upload_unanswered)
    result, report = tested("hang", "--max-cost-usd=4", "--target=cloud_run")
    assert result.exit_code == 1
    assert "- ConnectionError: no answer" in report
    assert set(uploads) <= set(cancels)
    assert rows(report)["audit-clean", ""] == ("passed", "2 ledgers agree with the cloud")
    assert left(stack) == []


def left(stack: Path) -> list[str]:
    """Return the resources of the emulated cloud, except the standing cluster."""
    return [name for name in local.leftovers(stack).resources if "/clusters/dropforge" not in name]


def test_the_sum_of_all_limits_is_within_the_maximum_cost(dropforge: Run) -> None:
    write_toml({**toml(), "gke_cluster": "dropforge", "train_ray_image": "r", "train_maxtext_image": "m"})
    known = connect(None).settings
    runs = smoke_plan.plan_runs(known, smoke_plan.Options(prices={"gke": 1.2, "ray": 2.4, "tpu_vm": 1.2}), 7)
    assert [run.target for run in runs] == ["cloud_run", "gke", "ray", "tpu_vm", "cloud_run"]
    assert [run.cancels for run in runs] == [False] * 4 + [True]
    assert [run.target for run in runs if run.spec.serve] == ["cloud_run"]
    assert [run.spec.limits.max_cost_usd for run in runs] == [run.limit_usd for run in runs]
    assert 2 < sum(run.limit_usd for run in runs) <= 7


def test_the_runs_on_cloud_run_ask_for_what_only_long_runs_have(dropforge: Run) -> None:
    """A task above an hour and the longest startup probe are accepted or refused when they are created."""
    write_toml(toml())
    runs = smoke_plan.plan_runs(connect(None).settings, smoke_plan.Options(targets=("cloud_run",)), 4)
    trained, cancelled = (make_plan(run.spec, connect(None).settings, run.object_name) for run in runs)
    job = cancelled.placements[0].resources[0].request["job"]
    assert int(job["template"]["template"]["timeout"].removesuffix("s")) > 61 * 60
    assert job["launchStage"] == "BETA"
    assert trained.endpoint is not None
    container = trained.endpoint.resources[0].request["service"]["template"]["containers"][0]
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 1800
    assert runs[0].spec.training.adapter.type == "qlora"  # the kernels of the README's example


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-cost-usd=0.5", "--target=cloud_run"], "$0.5000 is too little: cloud_run $"),
        (["--max-cost-usd=100"], "the price of gke is unknown: no price for GKE nvidia-l4"),
        (["--max-cost-usd=100", "--target=ray"], "the deployment does not have target ray"),
    ],
)
def test_a_test_that_cannot_be_paid_or_run_is_refused(deployed: Deployed, options: list[str], message: str) -> None:
    write_toml({**deployed.configuration, "gke_cluster": "dropforge"})
    result = deployed.run("smoke", "--yes", *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert dropped(deployed) == []


def test_no_spec_is_dropped_without_confirmation(deployed: Deployed) -> None:
    result = CliRunner().invoke(cli, ["smoke", "--max-cost-usd=4"], input="n\n")
    assert result.exit_code == 1
    assert "at most $2.48 of $4.00" in result.output
    assert dropped(deployed) == []


@pytest.mark.parametrize("price", ["gke", "gke=", "gke=much", "gke=-1", "gke=nan", "moon=1"])
def test_a_price_is_a_number_for_a_target(dropforge: Run, price: str) -> None:
    result = dropforge("smoke", "--max-cost-usd=4", "--price", price)
    assert (result.exit_code, "expected" in result.output) == (2, True)


def dropped(deployed: Deployed) -> list[str]:
    return [blob.name for blob in clients.storage().list_blobs(deployed.configuration["specs_bucket"])]


@pytest.mark.parametrize(
    ("change", "status"), [({}, "passed"), ({"sha256": "0" * 64}, "failed"), ({"size": 1}, "failed")]
)
def test_a_model_that_differs_from_its_manifest_fails(
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
    (seen, _) = smoke_plan.plan_runs(connected.settings, smoke_plan.Options(), 4)
    seen.run = run
    assert smoke_checks.manifest(seen, connected).status == status


@pytest.mark.parametrize(("status", "shown"), [("passed", "passed"), ("failed", "not checked"), (None, "not checked")])
def test_a_check_implies_other_promises(deployed: Deployed, status: str | None, shown: str) -> None:
    known = [] if status is None else [smoke_checks.Result(status, "endpoint-answers", "cloud_run", "")]
    known.append(smoke_checks.Result("passed", "run-states", "gke", ""))
    results = {result.promise: result.status for result in smoke_checks.implied(known, connect(None))}
    assert results["startup-probe"] == shown
    assert results["functions-token"] == "passed"
    assert results["tpu-rights"] == "not checked"  # no run was on a TPU VM


def test_the_checklist_names_every_promise_and_no_other() -> None:
    text = (ROOT / "docs" / "cloud-checklist.md").read_text()
    lines = re.findall(r"^\| `([a-z0-9-]+)` \| (.*)$", text, re.M)
    by_hand = [name for name, rest in lines if rest.startswith("by hand |")]
    assert sorted(by_hand) == sorted(smoke_checks.BY_HAND)
    assert {name for name, _ in lines} - {*by_hand} == {*smoke_checks.PROMISES, *smoke_checks.implied_promises()}
    assert len(lines) == len({name for name, _ in lines})
    assert len(lines) == len(re.findall(r"^\| (?!id|---)", text, re.M)), "a line without an id"
