"""`dropforge preflight` against small copies of the APIs that it asks: strict ones, in the shapes of Google's pages."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from dropforge import clients
from dropforge_cli import preflight
from dropforge_cli.google_apis import APIS

from .conftest import Deployed, toml, write_toml

DIGEST = f"@sha256:{'1' * 64}"
IMAGES = {name: f"us-central1-docker.pkg.dev/p/dropforge/{name}{DIGEST}" for name in ("train-trl", "serve-vllm")}


class Project:
    """What the project `p` answers; tests change it."""

    def __init__(self) -> None:
        self.off: set[str] = set()
        self.held = {*preflight.ON_PROJECT}
        self.images = set(IMAGES.values())
        self.gpu_zones = {"nvidia-l4": ["us-central1-a", "europe-west4-b"]}
        self.compute_quotas = [{"metric": "NVIDIA_L4_GPUS", "limit": 4.0, "usage": 2.0}]
        self.run_quota = {"us-central1": "3"}

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """501 for what no page of Google's has; then a test fails, because nothing here is to be `not asked`."""
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return answer(self, found, query, body)  # type: ignore[no-any-return]
        return 501, {}

    def services(self, _: Any, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        assert 0 < len(query["names"]) <= 30
        states = [(name, "DISABLED" if name.rpartition("/")[2] in self.off else "ENABLED") for name in query["names"]]
        return 200, {"services": [{"name": name, "state": state} for name, state in states]}

    def permissions(self, _: Any, query: Any, body: Any) -> tuple[int, Any]:
        held = sorted({*body["permissions"]} & self.held)
        return 200, {"permissions": held} if held else {}

    def image(self, found: re.Match[str], query: Any, body: Any) -> tuple[int, Any]:
        uri = f"us-central1-docker.pkg.dev/p/dropforge/{found[1]}"
        if uri in self.images:
            return 200, {"name": found[0], "uri": uri}
        return 404, {"error": {"code": 404, "message": "not found", "status": "NOT_FOUND"}}

    def region(self, found: re.Match[str], query: Any, body: Any) -> tuple[int, Any]:
        return 200, {"name": found[1], "quotas": self.compute_quotas}

    def accelerators(self, _: Any, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        name = query["filter"][0].removeprefix("name=")
        items: dict[str, Any] = {"zones/asia-east1-a": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        items |= {f"zones/{zone}": {"acceleratorTypes": [{"name": name}]} for zone in self.gpu_zones.get(name, ())}
        return 200, {"items": items}

    def quotas(self, _: Any, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if "pageToken" not in query:
            return 200, {"quotaInfos": [{"metric": "run.googleapis.com/cpu_allocation"}], "nextPageToken": "2"}
        dimensions = [
            {"dimensions": {"region": region}, "details": {"value": value}, "applicableLocations": [region]}
            for region, value in self.run_quota.items()
        ]
        metric = "run.googleapis.com/nvidia_l4_gpu_allocation_no_zonal_redundancy"
        return 200, {"quotaInfos": [{"metric": metric, "dimensionsInfos": dimensions}]}


ROUTES: dict[str, Any] = {
    r"GET /v1/projects/p/services:batchGet": Project.services,
    r"POST /v1/projects/p:testIamPermissions": Project.permissions,
    r"GET /v1/projects/p/locations/us-central1/repositories/dropforge/dockerImages/(.+)": Project.image,
    r"GET /compute/v1/projects/p/regions/([a-z0-9-]+)": Project.region,
    r"GET /compute/v1/projects/p/aggregated/acceleratorTypes": Project.accelerators,
    r"GET /v1/projects/p/locations/global/services/run.googleapis.com/quotaInfos": Project.quotas,
}


@pytest.fixture
def project(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A deployment whose every part is there, and a project that answers as `Project` says."""
    project = Project()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            target, size = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            code, answer = project.answer(self.command, unquote(target.path), parse_qs(target.query), body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for variable in set(APIS.values()) - {"STORAGE_EMULATOR_HOST"}:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{server.server_port}")
    images = {"train_trl_image": IMAGES["train-trl"], "serve_vllm_image": IMAGES["serve-vllm"]}
    write_toml({**toml(), **images, "gke_cluster": "dropforge"})
    data = clients.storage().create_bucket("p-data", location="us-central1")
    data.blob("rows.jsonl").upload_from_string("{}")
    yield project
    server.shutdown()
    server.server_close()


def spec(target: dict[str, Any] | None = None, **changes: Any) -> str:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "gs://p-data/rows.jsonl"},
        "target": target or {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
        **changes,
    }
    Path("job.json").write_text(json.dumps(document))
    return "job.json"


def found(deployed: Deployed, *arguments: str, code: int = 0) -> list[dict[str, str]]:
    result = deployed.run("preflight", *arguments, "--json")
    assert result.exit_code == code, result.output
    answers: list[dict[str, str]] = json.loads(result.stdout)
    return answers


def wrong(answers: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(one["status"], one["what"], one["mend"]) for one in answers if one["status"] != "ok"]


GKE = {"type": "gke", "accelerator": "nvidia-l4", "placements": [{"region": "us-central1"}]}


@pytest.mark.parametrize("target", [None, GKE], ids=["cloud_run", "gke"])
def test_a_deployment_that_is_ready_is_all_ok(deployed: Deployed, project: Project, target: Any) -> None:
    answers = found(deployed, spec(target))
    assert wrong(answers) == []
    assert {one["what"].split()[0] for one in answers} == {"APIs", "project", "bucket", "image", "spec", "quota"}
    shown = deployed.run("preflight", spec(target))
    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1] == f"{len(answers)} ok"


def test_each_lack_is_named_with_what_mends_it(deployed: Deployed, project: Project) -> None:
    project.off = {"run.googleapis.com"}
    project.held = {"resourcemanager.projects.get"}
    project.images = {IMAGES["train-trl"]}
    project.run_quota = {"us-central1": "0"}
    clients.storage().bucket("p-specs").delete()
    answers = wrong(found(deployed, spec(dataset={"source": "gs://p-data/none"}), code=1))
    mends = {what: mend for status, what, mend in answers if status == "failed"}
    assert set(mends) == {
        "APIs", "project p", "bucket p-specs", "image serve_vllm_image", "spec job.json",
        "quota for 1 nvidia-l4 in us-central1",
    }  # fmt: skip
    assert mends["APIs"] == "gcloud services enable run.googleapis.com --project=p"
    assert mends["image serve_vllm_image"] == "make images, then make deploy"
    assert all(mends.values())


def test_gpus_that_a_region_lacks_or_that_are_in_use(deployed: Deployed, project: Project) -> None:
    project.gpu_zones = {"nvidia-l4": ["europe-west4-b"]}
    placements = [{"region": "us-central1"}, {"region": "europe-west4"}]
    target = {**GKE, "accelerator_count": 4, "placements": placements}
    answers = {one["what"]: one for one in found(deployed, spec(target), code=1)}
    assert answers["quota for 4 nvidia-l4 in us-central1"]["message"] == "us-central1 has no nvidia-l4"
    busy = answers["quota for 4 nvidia-l4 in europe-west4"]
    assert (busy["status"], busy["message"]) == ("warning", "NVIDIA_L4_GPUS is 4, of which 2 are in use")


def test_what_cannot_be_asked_is_never_ok(
    deployed: Deployed, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in set(APIS.values()):
        monkeypatch.delenv(variable)
    answers = found(deployed, spec())
    silent = {one["what"] for one in answers if one["status"] == "not asked"}
    assert {"APIs", "project", "quota for 1 nvidia-l4 in us-central1"} <= silent
    assert "spec job.json" not in silent


def test_data_in_another_region_are_warned_of(deployed: Deployed, project: Project) -> None:
    clients.storage().create_bucket("p-far", location="europe-west4").blob("rows.jsonl").upload_from_string("{}")
    answers = {one["what"]: one for one in found(deployed, spec(dataset={"source": "gs://p-far/rows.jsonl"}))}
    assert answers["bucket p-far"]["status"] == "warning"
    assert "prefer placements in europe-west4" in answers["bucket p-far"]["mend"]
