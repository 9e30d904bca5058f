"""`dropforge preflight` against small, strict copies of the APIs that it calls, in the shapes of Google's pages."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

from dropforge.base.errors import SpecProblem
from dropforge.cloud.google_apis import APIS
from dropforge.platforms import servers, targets
from dropforge.stages.preflight import RIGHTS
from dropforge_cli import mends, preflight
from dropforge_cli.accounts import ALWAYS
from dropforge_cli.deployment import connect
from dropforge_cli.main import COMMANDS
from dropforge_cli.policy import policy_in_use
from dropforge_cli.specs import read_spec
from dropforge_local.stack.config import StackInfo

from ..deployments import clients
from .conftest import ROOT, Deployed, toml, write_toml

DIGEST = f"@sha256:{'1' * 64}"
IMAGES = {name: f"us-central1-docker.pkg.dev/p/dropforge/{name}{DIGEST}" for name in ("train-trl", "serve-vllm")}


CLOUD_RUN_L4 = "NvidiaL4GpuAllocNoZonalRedundancyPerProjectRegion"
CLOUD_RUN_CPU, CLOUD_RUN_MEMORY = "CpuAllocPerProjectRegion", "MemAllocPerProjectRegion"
NEW_PROJECT: dict[str, list[tuple[dict[str, str], str | None]]] = {
    CLOUD_RUN_CPU: [({}, "20000")],
    CLOUD_RUN_MEMORY: [({}, str(40 * 2**30))],
}


class Project:
    """The answers of the project `p`; tests change them."""

    def __init__(self) -> None:
        self.off: set[str] = set()
        self.held = {*preflight.ON_PROJECT}
        self.images = set(IMAGES.values())
        self.levels: dict[str, str] = {}
        self.unlisted = ""
        self.access: dict[str, str] = {}
        self.troubled: list[tuple[str, str, str]] = []
        self.objects: list[str] = []
        self.gpu_zones = {"nvidia-l4": ["us-central1-a", "europe-west4-b"]}
        self.compute_quotas = [{"metric": "NVIDIA_L4_GPUS", "limit": 4.0, "usage": 2.0}]
        self.quotas: dict[str, list[tuple[dict[str, str], str | None]]] = {
            CLOUD_RUN_L4: [({"region": "us-central1"}, "3"), ({"region": "us-east4"}, "0")],
            **NEW_PROJECT,
        }

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """Answer 501 to an undocumented request. A test then fails, because it expects no `not asked`."""
        for pattern, answer in ROUTES.items():
            if match := re.fullmatch(pattern, f"{method} {path}"):
                return answer(self, match, query, body)  # type: ignore[no-any-return]
        return 501, {}

    def services(self, _: Any, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        assert 0 < len(query["names"]) <= 30
        states = [(name, "DISABLED" if name.rpartition("/")[2] in self.off else "ENABLED") for name in query["names"]]
        return 200, {"services": [{"name": name, "state": state} for name, state in states]}

    def permissions(self, _: Any, query: Any, body: Any) -> tuple[int, Any]:
        held = sorted({*body["permissions"]} & self.held)
        return 200, {"permissions": held} if held else {}

    def testable(self, _: Any, query: Any, body: Any) -> tuple[int, Any]:
        """Two pages; SUPPORTED is left out, as by Google."""
        assert body["fullResourceName"] == "//cloudresourcemanager.googleapis.com/projects/p"
        names = sorted({*granted(), *self.levels} - {self.unlisted})
        half = names[::2] if "pageToken" not in body else names[1::2]
        levels = [{"name": name, **self._level(name)} for name in half]
        return 200, {"permissions": levels, **({} if "pageToken" in body else {"nextPageToken": "2"})}

    def _level(self, name: str) -> dict[str, str]:
        return {"customRolesSupportLevel": self.levels[name]} if name in self.levels else {}

    def image(self, match: re.Match[str], query: Any, body: Any) -> tuple[int, Any]:
        uri = f"us-central1-docker.pkg.dev/p/dropforge/{match[1]}"
        if uri in self.images:
            return 200, {"name": match[0], "uri": uri}
        return 404, {"error": {"code": 404, "message": "not found", "status": "NOT_FOUND"}}

    def region(self, match: re.Match[str], query: Any, body: Any) -> tuple[int, Any]:
        return 200, {"name": match[1], "quotas": self.compute_quotas}

    def accelerators(self, _: Any, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        name = query["filter"][0].removeprefix("name=")
        items: dict[str, Any] = {"zones/asia-east1-a": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        items |= {f"zones/{zone}": {"acceleratorTypes": [{"name": name}]} for zone in self.gpu_zones.get(name, ())}
        return 200, {"items": items}

    def troubleshoot(self, _: Any, query: Any, body: Any) -> tuple[int, Any]:
        asked = body["accessTuple"]
        assert set(asked) - {"conditionContext"} == {"principal", "fullResourceName", "permission"}
        if "conditionContext" in asked:
            self.objects.append(asked["conditionContext"]["resource"]["name"])
        self.troubled.append((asked["principal"], asked["permission"], asked["fullResourceName"]))
        return 200, {"overallAccessState": self.access.get(asked["principal"], "CAN_ACCESS")}

    def quota(self, match: re.Match[str], query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """A value is text, a default has no dimensions, and a quota that was never granted has no value."""
        if match[0].rpartition("/")[2] not in self.quotas:
            return 404, {"error": {"code": 404, "message": "not found", "status": "NOT_FOUND"}}
        entries = [
            {
                "dimensions": dimensions,
                "details": {} if value is None else {"value": value},
                "applicableLocations": [dimensions.get("region") or dimensions.get("zone") or "us-central1"],
            }
            for dimensions, value in self.quotas[match[2]]
        ]
        return 200, {"name": match[0], "quotaId": match[2], "service": match[1], "dimensionsInfos": entries}


def granted() -> set[str]:
    """Every permission of terraform/permissions.yaml."""
    accounts = yaml.safe_load((ROOT / "terraform" / "permissions.yaml").read_text())["accounts"]
    return {name for account in accounts.values() for held in account["grants"].values() for name in held}


ROUTES: dict[str, Any] = {
    r"GET /v1/projects/p/services:batchGet": Project.services,
    r"POST /v1/projects/p:testIamPermissions": Project.permissions,
    r"POST /v3/iam:troubleshoot": Project.troubleshoot,
    r"POST /v1/permissions:queryTestablePermissions": Project.testable,
    r"GET /v1/projects/p/locations/us-central1/repositories/dropforge/dockerImages/(.+)": Project.image,
    r"GET /compute/v1/projects/p/regions/([a-z0-9-]+)": Project.region,
    r"GET /compute/v1/projects/p/aggregated/acceleratorTypes": Project.accelerators,
    r"GET /v1/projects/p/locations/global/services/([a-z.]+)/quotaInfos/([\w-]+)": Project.quota,
}


@pytest.fixture
def project(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A complete deployment, and a project that answers as `Project` says."""
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
    trainer = "dropforge-trainer@p.iam.gserviceaccount.com"
    write_toml({**toml(), **images, "gke_cluster": "dropforge", "trainer_service_account": trainer})
    data = clients.storage().create_bucket("p-data", location="us-central1")
    data.blob("rows.jsonl").upload_from_string('{"text": "a long row"}')
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


def answers_of(deployed: Deployed, *arguments: str, code: int = 0) -> list[dict[str, str]]:
    result = deployed.run("preflight", *arguments, "--json")
    assert result.exit_code == code, result.output
    answers: list[dict[str, str]] = json.loads(result.stdout)
    assert [answer for answer in answers if answer["status"] != "ok" and not is_advice(answer["mend"])] == []
    return answers


def is_advice(mend: str) -> bool:
    """Whether an advice is a command that exists, a section of a page that exists, or Google's page of quotas."""
    if mend.startswith("docs/"):
        page, _, anchor = mend.partition("#")
        heads = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.M)
        return not anchor or anchor in {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
    if mend.startswith("https://console.cloud.google.com/iam-admin/quotas?project="):
        return True
    program, argument = mend.split()[:2]
    if program == "make":
        return re.search(rf"^{argument}:", (ROOT / "Makefile").read_text(), re.M) is not None and "…" not in mend
    return program == "gcloud" or (program == "dropforge" and argument in COMMANDS)


def wrong(answers: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(answer["status"], answer["what"], answer["mend"]) for answer in answers if answer["status"] != "ok"]


GKE = {"type": "gke", "accelerator": "nvidia-l4", "placements": [{"region": "us-central1"}]}


@pytest.mark.parametrize("target", [None, GKE], ids=["cloud_run", "gke"])
def test_every_answer_about_a_ready_deployment_is_ok(deployed: Deployed, project: Project, target: Any) -> None:
    answers = answers_of(deployed, spec(target))
    assert wrong(answers) == []
    kinds = {answer["what"].split()[0] for answer in answers} - {"1"}
    assert kinds == {"APIs", "account", "project", "bucket", "custom", "image", "spec", "quota", "data"}
    shown = deployed.run("preflight", spec(target))
    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1] == f"{len(answers)} ok"


def test_each_missing_part_is_named_with_its_fix(deployed: Deployed, project: Project) -> None:
    project.off = {"run.googleapis.com"}
    project.held = {"resourcemanager.projects.get"}
    project.images = {IMAGES["train-trl"]}
    project.quotas[CLOUD_RUN_L4][0] = ({"region": "us-central1"}, "0")
    clients.storage().bucket("p-specs").delete()
    answers = wrong(answers_of(deployed, spec(dataset={"source": "gs://p-data/none"}), code=1))
    mends = {what: mend for status, what, mend in answers if status == "failed"}
    assert set(mends) == {
        "APIs", "project p", "bucket p-specs", "image serve_vllm_image", "spec job.json",
        "quota for 1 nvidia-l4 in us-central1",
    }  # fmt: skip
    assert mends["APIs"] == "gcloud services enable run.googleapis.com --project=p"
    makes = "make images PROJECT_ID=p REGION=us-central1 && make deploy PROJECT_ID=p REGION=us-central1"
    assert mends["image serve_vllm_image"] == makes
    assert mends["spec job.json"] == "dropforge put FILE gs://p-data/none"
    assert all(mends.values())


@pytest.mark.parametrize(("level", "status", "code"), [("NOT_SUPPORTED", "failed", 1), ("TESTING", "warning", 0)])
def test_permissions_that_custom_roles_cannot_have(
    deployed: Deployed, project: Project, level: str, status: str, code: int
) -> None:
    project.levels = {"workflows.callbacks.send": level, "pubsub.topics.publish": level, "x.y.z": "NOT_SUPPORTED"}
    answers = [answer for answer in answers_of(deployed, spec(), code=code) if answer["what"] == "custom roles"]
    assert [answer["status"] for answer in answers] == [status, "ok"]
    assert answers[0]["message"] == f"{level} in custom roles: pubsub.topics.publish, workflows.callbacks.send"
    assert "gcloud iam list-testable-permissions" in answers[0]["mend"]


def test_a_permission_that_google_does_not_list_is_not_called_ok(deployed: Deployed, project: Project) -> None:
    project.unlisted = "workflows.callbacks.send"
    answers = [answer for answer in answers_of(deployed, spec()) if answer["what"] == "custom roles"]
    assert [answer["status"] for answer in answers] == ["not asked", "ok"]
    assert "workflows.callbacks.send" in answers[0]["message"]


def test_gpus_that_a_region_lacks_or_that_are_used(deployed: Deployed, project: Project) -> None:
    project.gpu_zones = {"nvidia-l4": ["europe-west4-b"]}
    placements = [{"region": "us-central1"}, {"region": "europe-west4"}]
    target = {**GKE, "accelerator_count": 4, "placements": placements}
    answers = {answer["what"]: answer for answer in answers_of(deployed, spec(target), code=1)}
    assert answers["4 nvidia-l4 in us-central1"]["message"] == "us-central1 has no nvidia-l4"
    busy = answers["quota for 4 nvidia-l4 in europe-west4"]
    assert (busy["status"], busy["message"]) == (
        "warning",
        "NVIDIA-L4-GPUS-per-project-region allows 4, of which 2 are in use",
    )


def test_a_question_that_cannot_be_asked_is_never_ok(
    deployed: Deployed, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in set(APIS.values()):
        monkeypatch.delenv(variable)
    answers = answers_of(deployed, spec())
    silent = {answer["what"] for answer in answers if answer["status"] == "not asked"}
    assert {"APIs", "project", "quota for 1 nvidia-l4 in us-central1"} <= silent
    assert "spec job.json" not in silent


def test_data_in_another_region_are_a_warning(deployed: Deployed, project: Project) -> None:
    clients.storage().create_bucket("p-far", location="europe-west4").blob("rows.jsonl").upload_from_string(
        '{"text": "a long row"}'
    )
    answers = {
        answer["what"]: answer for answer in answers_of(deployed, spec(dataset={"source": "gs://p-far/rows.jsonl"}))
    }
    assert answers["bucket p-far"]["status"] == "warning"
    assert "prefer placements in europe-west4" in answers["bucket p-far"]["message"]


def test_specs_of_the_same_name_in_two_directories_are_each_answered(deployed: Deployed, project: Project) -> None:
    """The answer names the path, so that a command with it works from here. A missing bucket is told once."""
    text = Path(spec(dataset={"source": "gs://no-such-bucket/rows.jsonl"})).read_text()
    for directory in ("a", "b"):
        Path(directory).mkdir()
        (Path(directory) / "job.json").write_text(text)
    answers = answers_of(deployed, "a/job.json", "b/job.json", code=1)
    failed = [answer["what"] for answer in answers if answer["status"] == "failed"]
    assert failed == ["spec a/job.json", "spec b/job.json"]


def test_a_budget_that_may_end_the_endpoint_early_is_a_warning(deployed: Deployed, project: Project) -> None:
    job = spec(serve={"type": "cloud_run", "ttl": "24h"}, limits={"max_cost_usd": 10})
    [(status, what, mend)] = wrong(answers_of(deployed, job))
    assert (status, what) == ("warning", "spec job.json")
    assert mend == "docs/limits.md#the-cost-of-an-endpoint"


def test_a_bucket_that_does_not_exist_is_mended_by_a_command(deployed: Deployed, project: Project) -> None:
    answers = answers_of(deployed, spec(model={"source": "gs://p-none/m"}), code=1)
    [mend] = [answer["mend"] for answer in answers if answer["what"] == "spec job.json"]
    made = "gcloud storage buckets create gs://p-none --project=p --location=us-central1"
    assert mend == f"{made} && dropforge put DIRECTORY gs://p-none/m"


@pytest.mark.parametrize(
    ("pointer", "message", "stack", "mend"),
    [
        (
            "/secrets/HF_TOKEN",
            "the secret does not exist",
            False,
            "gcloud secrets create hf --data-file=FILE",
        ),
        ("/secrets/HF_TOKEN", "the secret does not exist", True, "dropforge submit 'my job.json'"),
        ("/notify/slack", "the secret does not exist", True, "dropforge submit 'my job.json'"),
        ("/serve", "the secret does not exist", True, "gcloud secrets versions add hf --data-file=FILE --project=p"),
        (
            "/secrets/A",
            "the secret's version is DISABLED",
            False,
            "gcloud secrets versions add hf --data-file",
        ),
        ("/secrets/A", "the secret may not be looked at", False, RIGHTS),
        ("/target/type", "above `x` of the deployment's policy", False, mends.POLICY),
        ("", "anything", False, mends.SPECS),
        ("/name", "anything", False, mends.SPECS),
        *((f"/{part}/x", "anything", False, page) for part, page in mends.PAGES.items()),
    ],
)
def test_every_problem_of_a_spec_has_an_advice(
    deployed: Deployed, project: Project, pointer: str, message: str, stack: bool, mend: str
) -> None:
    connected = connect(None)
    info = StackInfo(1, 0.0, "http://x", "x", "http://x", "p", {}, "")
    connected = replace(connected, stack=info if stack else None)
    job = read_spec(Path(spec()).read_bytes(), policy_in_use(connected))
    advice = mends.of_problem(SpecProblem(pointer, message, "'hf:2'"), "my job.json", job, connected)
    assert advice.startswith(mend)
    assert is_advice(advice)


def test_a_source_of_the_examples_is_made_by_submit(deployed: Deployed, project: Project) -> None:
    info = StackInfo(1, 0.0, "http://x", "x", "http://x", "p", {}, "")
    connected = replace(connect(None), stack=info)
    job = read_spec(
        Path(spec(dataset={"source": "gs://local-data/text-to-sql.jsonl"})).read_bytes(), policy_in_use(connected)
    )
    problem = SpecProblem("/dataset/source", "the bucket does not exist", "gs://local-data")
    assert mends.of_problem(problem, "job.json", job, connected) == "dropforge submit job.json"


H100 = {"type": "gke", "accelerator": "nvidia-h100-80gb", "accelerator_count": 8}
RAY = {"type": "ray", "accelerator": "tpu-v6e-slice", "topology": "4x4"}
PRETRAIN = {
    "model": {"source": "meta-llama/Llama-3.1-8B"},
    "dataset": {"type": "synthetic", "rows": 1600},
    "training": {"method": "pretrain", "adapter": {"type": "none"}, "max_steps": 100},
}
V6E_SPOT, H100_SPOT = "PREEMPTIBLE-TPU-V6E-per-project-region", "PREEMPTIBLE-NVIDIA-H100-GPUS-per-project-region"
FAMILIES, TPU_FAMILIES = "GPUS-PER-GPU-FAMILY-per-project-region", "TPUS-PER-TPU-FAMILY-per-project-region"
RTX = {"type": "cloud_run", "accelerator": "nvidia-rtx-pro-6000", "cpu": 20, "memory_gib": 80}


@pytest.mark.parametrize(
    ("target", "capacity", "quota", "entries", "status"),
    [
        (H100, "on_demand", FAMILIES, [({"gpu_family": "NVIDIA_H100"}, "8")], "ok"),
        (H100, "on_demand", FAMILIES, [({"gpu_family": "NVIDIA_H200"}, "8"), ({}, "4")], "failed"),
        (H100, "spot", H100_SPOT, [({}, "64"), ({"region": "us-central1"}, "0")], "failed"),
        (H100, "flex_start", H100_SPOT, [({}, "-1")], "ok"),
        (H100, "spot", H100_SPOT, [({"region": "us-east4"}, "64")], "not asked"),
        (H100, "spot", "ANOTHER", [], "not asked"),
        (RAY, "on_demand", TPU_FAMILIES, [({"region": "us-central1", "tpu_family": "CT6E"}, None)], "warning"),
        (RAY, "spot", V6E_SPOT, [({}, "16")], "ok"),
        (RTX, None, CLOUD_RUN_L4.replace("L4", "RtxPro6000"), [({"region": "us-central1"}, "1000")], "ok"),
        (RTX, None, CLOUD_RUN_L4.replace("L4", "RtxPro6000"), [({"region": "us-central1"}, "1")], "failed"),
    ],
)
def test_the_most_specific_entry_of_the_right_quota_counts(
    deployed: Deployed, project: Project, target: Any, capacity: str | None, quota: str, entries: Any, status: str
) -> None:
    project.quotas = {quota: entries}
    result = deployed.run("preflight", spec(_placed(target, capacity), **(PRETRAIN if target is RAY else {})), "--json")
    counted = re.compile(r"quota for \d+ (nvidia|tpu)")
    (answer,) = [answer for answer in json.loads(result.stdout) if counted.match(answer["what"])]
    assert answer["status"] == status, answer
    if quota == "ANOTHER":
        assert answer["message"] == f"no such quota is listed: {H100_SPOT}"


@pytest.mark.parametrize(
    ("target", "serve", "expected"),
    [
        (None, None, {"8 vCPU": "ok", "32 GiB of memory": "ok"}),
        (RTX, None, {"20 vCPU": "ok", "80 GiB of memory": "failed"}),
        # A rollout has the instances of two revisions.
        (
            None,
            {"endpoint": "words", "max_instances": 2, "cpu": 4, "memory_gib": 16},
            {"8 vCPU": "ok", "32 GiB of memory": "ok", "16 vCPU": "ok", "64 GiB of memory": "failed"},
        ),
    ],
)
def test_cpu_and_memory_of_cloud_run_are_quotas_too(
    deployed: Deployed, project: Project, target: Any, serve: Any, expected: dict[str, str]
) -> None:
    """A new project has 20 vCPUs and 40 GiB in a region."""
    project.quotas[CLOUD_RUN_L4.replace("L4", "RtxPro6000")] = [({}, "1000")]
    changes = {"serve": {"type": "cloud_run", "ttl": "1h", **serve}} if serve else {}
    job = spec(_placed(target, None) if target else None, **changes)
    answers = {answer["what"]: answer for answer in json.loads(deployed.run("preflight", job, "--json").stdout)}
    found = {what: each["status"] for what, each in answers.items() if "vCPU" in what or "memory" in what}
    assert found == {f"quota for {amount} in us-central1": status for amount, status in expected.items()}
    if target is RTX:
        memory = answers["quota for 80 GiB of memory in us-central1"]
        assert memory["message"] == "MemAllocPerProjectRegion allows 40"
        assert memory["mend"] == "https://console.cloud.google.com/iam-admin/quotas?project=p"


def _placed(target: dict[str, Any], capacity: str | None) -> dict[str, Any]:
    asked = {"capacity": capacity} if capacity else {}
    return {**target, "placements": [{"region": "us-central1", **asked}]}


def test_the_permissions_of_the_deployment_s_accounts_are_checked(deployed: Deployed, project: Project) -> None:
    project.access = {
        "dropforge-provision@p.iam.gserviceaccount.com": "CANNOT_ACCESS",
        "dropforge-teardown@p.iam.gserviceaccount.com": "UNKNOWN_INFO",
    }
    answers = wrong(answers_of(deployed, spec(), code=1))
    assert {(status, what) for status, what, _ in answers} == {
        ("failed", "account provision"),
        ("not asked", "account teardown"),
    }
    trainer = "//iam.googleapis.com/projects/p/serviceAccounts/dropforge-trainer@p.iam.gserviceaccount.com"
    assert ("dropforge-provision@p.iam.gserviceaccount.com", "iam.serviceAccounts.actAs", trainer) in project.troubled
    topic = "//pubsub.googleapis.com/projects/p/topics/dropforge-job-events"
    assert ("dropforge-trainer@p.iam.gserviceaccount.com", "pubsub.topics.publish", topic) in project.troubled
    assert project.objects == ["projects/_/buckets/p-runs/objects/models/preflight/MANIFEST.json"]


def test_terraform_grants_every_permission_that_preflight_checks() -> None:
    granted = yaml.safe_load((ROOT / "terraform" / "permissions.yaml").read_text())["accounts"]
    uses = [*ALWAYS]
    uses += [use for training in targets().values() for use in training.permissions]
    uses += [use for serving in servers().values() for use in serving.permissions]
    assert len(uses) > 10
    assert [use for use in uses if use.permission not in granted[use.account]["grants"].get(use.scope, {})] == []
