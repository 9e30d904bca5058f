"""`dropforge plan`: names, places, requests and cost, before any resource exists."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from containers.common.report import ProgressMeter
from dropforge.fit.known import KNOWN_MODELS
from dropforge.fit.shape import shape_of
from dropforge.money.control_plane import RUN, progress_points
from dropforge.money.plan import Plan, make_plan
from dropforge.platforms.cloud_run import catalog
from dropforge.platforms.prices import Price
from dropforge.spec import parse_spec
from dropforge.spec.machine import GIB
from dropforge_cli.deployment import placeholders
from dropforge_cli.plan import show, show_phases

from ..deployments import clients
from .conftest import EXAMPLE, ROOT, Deployed, Run

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def plan_of(**changes: Any) -> Plan:
    document = {**json.loads(EXAMPLE.read_text()), **changes}
    return make_plan(parse_spec(json.dumps(document).encode()), placeholders(), "spec.json", NOW)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.json")), ids=lambda path: path.stem)
def test_every_example_plans(dropforge: Run, path: Path) -> None:
    result = dropforge("plan", path)
    assert result.exit_code == 0, result.output
    spec = json.loads(path.read_text())
    assert spec["name"] in result.output
    assert "unknown" not in result.output
    for placement in spec["target"]["placements"]:
        assert placement.get("zone", placement.get("region")) in result.output


def test_placements_are_in_order_with_the_resource_names(dropforge: Run) -> None:
    output = dropforge("plan", EXAMPLE).output
    job = "projects/YOUR-PROJECT/locations/{}/jobs/df-cloud-run-gemma-2b-q-000000000000-a1"
    assert 0 < output.index(job.format("us-central1")) < output.index(job.format("europe-west4"))
    assert "services/df-cloud-run-gemma-2b-q-000000000000-serve" in output
    assert "no deployment is configured" in output


def test_the_requests_are_exactly_those_of_the_deployment(deployed: Deployed) -> None:
    planned = json.loads(deployed.run("plan", "--json", EXAMPLE).stdout)
    [job] = planned["placements"][0]["resources"]
    assert job["request"]["parent"] == "projects/p/locations/us-central1"
    task = job["request"]["job"]["template"]["template"]
    assert task["containers"][0]["image"] == deployed.configuration["train_trl_image"]
    assert task["timeout"] == "7200s"
    [service] = planned["endpoint"]["resources"]
    container = service["request"]["service"]["template"]["containers"][0]
    assert container["image"] == deployed.configuration["serve_vllm_image"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.json")), ids=lambda path: path.stem)
def test_80_columns_have_names_whole_and_tables_that_fit(path: Path) -> None:
    plan = make_plan(parse_spec(path.read_bytes()), placeholders(), path.name, NOW)
    text = StringIO()
    show(plan, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    places: list[Any] = [*plan.placements, *filter(None, [plan.endpoint])]
    names = [resource.name for place in places for resource in place.resources]
    named = [line for line in lines if "creates " in line]
    assert [line.rsplit(" ", 1)[1] for line in named] == names
    assert max(len(line) for line in lines if line not in named) <= 80


def test_an_endpoint_of_several_resources_has_one_price(dropforge: Run) -> None:
    gke = {"type": "gke", "accelerator": "nvidia-h100-80gb"}
    document = json.loads(EXAMPLE.read_text())
    document |= {"target": {**gke, "placements": [{"region": "us-central1"}]}, "serve": {**gke, "max_instances": 2}}
    Path("gke.json").write_text(json.dumps(document))
    output = dropforge("plan", "gke.json").output
    table = output[output.index("\nendpoint") : output.index("the price is per running instance")]
    assert table.count("YOUR-CLUSTER/k8s/namespaces/dropforge/") == 4
    assert table.count("$10.98") == 1
    assert "clients must be inside the VPC" in output


def test_an_endpoint_on_a_tpu_vm_shows_its_image_and_its_cost(dropforge: Run) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["serve"] = {"type": "tpu_vm", "zone": "us-west1-c", "startup_timeout": "1h", "ttl": "4h"}
    document["serve"]["price_usd_per_hour"] = 9.6
    document["limits"] = {"max_duration": "2h"}
    Path("tpu.json").write_text(json.dumps(document))
    output = dropforge("plan", "tpu.json").output
    shown = output[output.index("\nendpoint") :]
    assert "locations/us-west1-c/queuedResources/df-tpu-000000000000-serve" in shown
    assert "locations/us-west1-c/nodes/df-tpu-000000000000-serve" in shown
    assert shown.count("$48.00") == 1  # five hours
    assert "image YOUR-SERVE-VLLM-TPU-IMAGE" in shown
    assert "clients must be inside the VPC" in shown


def test_the_worst_case_is_the_price_of_all_allowed_time() -> None:
    plan = plan_of(serve=None, limits={"max_duration": "2h"})
    hourly = 8 * 0.0648 + 32 * 0.0072 + 0.67212
    assert plan.placements[0].price.usd_per_hour == pytest.approx(hourly, abs=1e-4)
    assert plan.worst_case_usd == pytest.approx(2 * hourly, abs=1e-3)


def test_a_budget_shortens_the_time_and_limits_the_cost(dropforge: Run) -> None:
    plan = plan_of(serve=None, limits={"max_duration": "2h", "max_cost_usd": 0.5})
    assert plan.placements[0].timeout_seconds == pytest.approx(0.5 / 1.4209 * 3600, abs=1)
    assert plan.worst_case_usd == pytest.approx(0.5, abs=0.001)
    Path("spec.json").write_text(
        json.dumps({**json.loads(EXAMPLE.read_text()), "limits": {"max_duration": "2h", "max_cost_usd": 0.5}})
    )
    output = dropforge("plan", "spec.json").output.replace("\n", " ")
    assert "$0.5000 buys 11 min of training; max_duration is 2h; the budget ends it first" in output
    assert "training leaves at least 10 min" in output


def test_an_endpoint_costs_all_instances_until_its_expiry() -> None:
    serve = {"type": "cloud_run", "max_instances": 3, "ttl": "10h", "startup_timeout": "30m"}
    plan = plan_of(serve=serve, limits={"max_duration": "1h"})
    assert plan.endpoint is not None
    assert plan.endpoint.worst_case_usd == pytest.approx(3 * 10.5 * 1.4209, abs=0.01)
    assert plan.worst_case_usd == pytest.approx(32.5 * 1.4209, abs=0.01)


def test_a_budget_ends_the_endpoint_before_its_ttl() -> None:
    serve = {"type": "cloud_run", "max_instances": 3, "ttl": "10h"}
    plan = plan_of(serve=serve, limits={"max_duration": "1h", "max_cost_usd": 10})
    assert plan.endpoint is not None
    assert plan.endpoint.lifetime_seconds == pytest.approx(10 / (3 * 1.4209) * 3600, abs=1)
    assert plan.worst_case_usd == 10


def test_an_unknown_price_is_unknown_and_never_0(dropforge: Run) -> None:
    target = {"type": "cloud_run", "placements": [{"region": "asia-southeast1"}, {"region": "us-central1"}]}
    plan = plan_of(target=target, serve=None, limits={"max_duration": "1h"})
    assert plan.placements[0].worst_case_usd is None
    assert plan.worst_case_usd is None
    assert plan.warnings == [
        "unknown price: no price for Cloud Run vcpu in asia-southeast1 in the catalog; set price_usd_per_hour"
    ]
    Path("s.json").write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "target": target, "limits": {}}))
    output = dropforge("plan", "s.json").output
    assert "worst case  unknown in all" in output
    assert "$0.00" not in output.partition("control plane")[0]


def test_a_price_in_the_spec_is_used_and_never_old() -> None:
    target = {"type": "cloud_run", "placements": [{"region": "asia-southeast1"}], "price_usd_per_hour": 2.5}
    plan = plan_of(target=target, serve=None, limits={"max_duration": "2h"})
    assert plan.worst_case_usd == 5.0
    assert plan.warnings == []


def test_an_old_price_is_marked_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of().warnings == []
    for part, price in catalog.CLOUD_RUN_PRICES.items():
        old = Price(price.usd_per_hour, price.regions, date(2025, 12, 1), price.source)
        monkeypatch.setitem(catalog.CLOUD_RUN_PRICES, part, old)
    [warning] = plan_of().warnings
    assert warning.startswith("the price of 2025-12-01 is 182 days old; check https://cloud.google.com/run/pricing")


def test_the_learning_rate_is_shown(dropforge: Run, tmp_path: Path) -> None:
    """Also the default one, which depends on the adapter."""
    document = json.loads(EXAMPLE.read_text())
    document["training"] = {"adapter": {"type": "qlora"}}
    (tmp_path / "job.json").write_text(json.dumps(document))
    assert "learning rate 0.0002, cosine" in dropforge("plan", tmp_path / "job.json").output


def test_an_invalid_spec_is_refused_with_a_pointer(dropforge: Run) -> None:
    Path("s.json").write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "limits": {"max_cost_usd": 0.001}}))
    result = dropforge("plan", "s.json")
    assert result.exit_code == 1
    assert "/limits/max_cost_usd: the budget is too small" in result.stderr


def test_the_memory_of_every_phase_is_a_table_of_at_most_80_columns() -> None:
    shape = shape_of(KNOWN_MODELS["google/gemma-2b"].config)
    assert shape is not None
    plan = make_plan(parse_spec(EXAMPLE.read_bytes()), placeholders(), "spec.json", NOW, shape)
    text = StringIO()
    show_phases(plan, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "optimiser step  2 rows, at most 1,024 tokens (1 x 2 accumulated x 1 device)" in lines
    [train] = [line.split() for line in lines if line.startswith("train ")]
    row = next(row for row in plan.phases if row.need.phase == "train")
    expected = (row.need.accelerator, row.accelerator_bytes, row.accelerator_bytes - row.need.accelerator)
    assert train[1:4] == [f"{count / GIB:.1f}" for count in expected]
    assert train[8:] == ["-", "-"]  # no disk: the files are in memory
    assert "the files are in the host's memory, and count there" in lines


def test_programs_read_the_bytes_of_every_phase(dropforge: Run) -> None:
    planned = json.loads(dropforge("plan", "--json", EXAMPLE).stdout)
    assert planned["batch"]["sequences"] == 2
    assert planned["batch"]["tokens"] == 1024
    phases = {phase["phase"]: phase for phase in planned["phases"]}
    merge = phases["merge"]
    assert merge["host"]["left"] == 32 * GIB - merge["host"]["need"] > 0
    assert merge["disk"] == {"need": merge["disk"]["need"], "available": None, "left": None}
    assert phases["serve"]["place"] == "serve"


def test_a_model_of_unknown_sizes_is_planned_by_a_given_configuration(dropforge: Run) -> None:
    document = {**json.loads(EXAMPLE.read_text()), "model": {"source": "gs://models/base"}}
    Path("spec.json").write_text(json.dumps(document))
    without = dropforge("plan", "spec.json").output.replace("\n", " ")
    assert "memory and disk are not planned: gs://models/base is not among the known models" in without
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps(KNOWN_MODELS["google/gemma-2b"].config))
    assert "left" in dropforge("plan", "spec.json", "--model-config", "base").output
    Path("large.json").write_text(json.dumps(KNOWN_MODELS["meta-llama/Llama-3.1-70B"].config))
    for command in ("plan", "validate"):
        refused = dropforge(command, "spec.json", "--model-config", "large.json")
        assert refused.exit_code == 1
        assert "phase 'evaluate' does not fit the memory of the accelerator" in refused.output
    Path("large.json").write_text("{")
    broken = dropforge("plan", "spec.json", "--model-config", "large.json")
    assert "--model-config large.json cannot be read" in broken.output


def test_a_deployment_reads_the_configuration_from_its_bucket(deployed: Deployed) -> None:
    storage = clients.storage()
    storage.create_bucket("models").blob("base/config.json").upload_from_string(
        json.dumps(KNOWN_MODELS["google/gemma-2b"].config)
    )
    document = {**json.loads(EXAMPLE.read_text()), "model": {"source": "gs://models/base"}}
    Path("spec.json").write_text(json.dumps(document))
    assert [phase["phase"] for phase in json.loads(deployed.run("plan", "--json", "spec.json").stdout)["phases"]]


def test_the_page_about_training_has_the_table_of_its_example() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    shown = page.split("<!-- dropforge plan examples/cloud-run-gemma-2b-qlora.json -->")[1].split("```")[1]
    shape = shape_of(KNOWN_MODELS["google/gemma-2b"].config)
    assert shape is not None
    text = StringIO()
    show_phases(make_plan(parse_spec(EXAMPLE.read_bytes()), placeholders(), "s.json", NOW, shape), Console(file=text))
    expected = [line.rstrip() for line in text.getvalue().splitlines() if line]
    assert shown.splitlines()[1:] == expected


@pytest.mark.parametrize(("hours", "most"), [(0.1, 200), (2, 700), (10, 1700)])
def test_the_control_plane_counts_the_points_of_the_container(hours: float, most: int) -> None:
    now, sent = 0.0, 0

    class Counter:
        def progress(self, **fields: Any) -> None:
            nonlocal sent
            sent += 1

    meter = ProgressMeter(Counter(), 10**9, clock=lambda: now)  # type: ignore[arg-type]
    meter.begin(0, 0)
    for step in range(1, int(hours * 3600 / 0.05) + 1):
        now += 0.05
        meter.step(step, step, None)
    assert sent <= progress_points(hours * 3600) <= most


def test_the_price_of_the_control_plane_grows_with_the_time() -> None:
    short, long = (plan_of(limits={"max_duration": time}).control_plane_usd for time in ("10m", "2h"))
    assert RUN.usd < short < long < 0.02
