"""The versions of KubeRay's operator: the pods that each makes, and the fields that each takes.

tests/data/kuberay_probes.yaml has the facts of upstream's source. test_ray.py runs jobs under each version.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.platforms.ray.requests import ray_job_manifest
from dropforge.platforms.training import Launch
from dropforge.spec import parse_spec
from dropforge_local.containers.dockerfile import evaluate
from dropforge_local.containers.programs import programs_of
from dropforge_local.emulators.kubernetes import KubernetesConfig
from dropforge_local.emulators.kubernetes.kuberay import OPERATORS, operator
from dropforge_local.emulators.kubernetes.ray.pods import Builder
from dropforge_local.emulators.kubernetes.rayrules import cluster_problem, set_job_defaults
from dropforge_local.emulators.kubernetes.schema import check

from ...deployments import settings_with

ROOT = Path(__file__).resolve().parents[3]
FACTS: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "data" / "kuberay_probes.yaml").read_text())
CASES = [(entry["version"], ray, kind) for entry in FACTS["versions"] for ray, kind in entry["with"].items()]


def sent() -> dict[str, Any]:
    """The RayJob that target `ray` sends for the example of full size."""
    spec = parse_spec((ROOT / "examples" / "ray-llama3-8b.json").read_bytes())
    settings = settings_with(gke_cluster="standing", train_ray_image="train-ray")
    started = datetime(2026, 11, 23, tzinfo=UTC)
    return ray_job_manifest(Launch("text-to-sql-0123456789ab", 1, 0, spec, settings, started, 3600, key=""))


def built(version: str, ray_version: str) -> dict[str, dict[str, Any]]:
    """The first containers that the operator makes of what we send, by node type."""
    job = json.loads(json.dumps(sent()))
    set_job_defaults(job)
    cluster = {"metadata": {"name": "c", "namespace": "n"}, "spec": job["spec"]["rayClusterSpec"]}
    cluster["spec"]["rayVersion"] = ray_version
    (group,) = cluster["spec"]["workerGroupSpecs"]
    builder = Builder(operator(version), KubernetesConfig().ray_probe_seconds)
    pods = {"head": builder.head(cluster), "worker": builder.worker(cluster, group, 0, 0)}
    return {node_type: template["spec"]["containers"][0] for node_type, (template, _) in pods.items()}


@pytest.mark.parametrize(("version", "ray_version", "kind"), CASES)
def test_probes_are_those_of_the_operators_source(version: str, ray_version: str, kind: str) -> None:
    for node_type, container in built(version, ray_version).items():
        commands = [FACTS["wget"]["command"].format(**values) for values in FACTS["wget"][node_type]]
        shell = {"exec": {"command": ["bash", "-c", " && ".join(commands)]}}
        handler = shell if kind == "wget" else {"httpGet": FACTS["http"]}
        for probe in ("readiness", "liveness"):
            timing = {**FACTS["timing"][probe], "timeoutSeconds": FACTS["timing"]["timeoutSeconds"][node_type]}
            assert container[f"{probe}Probe"] == {**timing, **handler}


@pytest.mark.parametrize("version", OPERATORS)
def test_the_image_has_every_program_that_the_operator_executes(version: str) -> None:
    """Without wget in the image, an operator before 1.6 never calls a node ready, and paid TPU hosts wait."""
    has = programs_of(evaluate(ROOT / "containers" / "train_ray" / "Dockerfile", ROOT).packages)
    for container in built(version, sent()["spec"]["rayClusterSpec"]["rayVersion"]).values():
        shell = container["command"][0].rpartition("/")[2]
        probes = [container[name]["exec"]["command"] for name in ("readinessProbe", "livenessProbe")
                  if "exec" in container[name]]  # fmt: skip
        words = {word for command in probes for word in [command[0], *re.findall(r"(?:^|[|&] )(\w+)", command[2])]}
        assert {shell, *words} <= has


def test_without_http_probes_every_program_is_named_by_the_test_above() -> None:
    command = built("1.5", "2.60.0")["head"]["readinessProbe"]["exec"]["command"]
    assert set(re.findall(r"(?:^|[|&] )(\w+)", command[2])) == {"wget", "grep"}


@pytest.mark.parametrize("version", OPERATORS)
def test_the_api_server_drops_what_the_crd_of_the_version_lacks(version: str) -> None:
    manifest = {key: value for key, value in sent().items() if key not in ("apiVersion", "kind")}
    clean, findings = check("RayJob", manifest, operator(version).absent)
    assert findings.unknown == []
    (dropped,) = FACTS["dropped"][version] or [None]
    assert ("authOptions" in clean["spec"]["rayClusterSpec"]) is (dropped is None)
    clean["spec"]["rayClusterSpec"].pop("authOptions", None)
    manifest["spec"]["rayClusterSpec"].pop("authOptions")
    assert clean == manifest


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("2.60.0", ""),
        ("2.52.0", ""),
        ("2.51.9", "minimum Ray version is 2.52.0, got 2.51.9"),
        ("nightly", "RayVersion format is invalid: nightly"),
        ("", "RayVersion was not specified"),
    ],
)
def test_a_token_needs_a_version_of_ray_that_demands_it(given: str, problem: str) -> None:
    spec = sent()["spec"]["rayClusterSpec"] | {"rayVersion": given}
    found = cluster_problem(spec)
    assert (problem in found) if problem else found == ""
    assert cluster_problem({**spec, "authOptions": {"mode": "disabled"}}) == ""


def test_what_is_sent_names_the_version_of_ray_in_the_image() -> None:
    """Without a rayVersion, an operator since 1.6 falls back to wget, and an operator since 1.5.1 refuses the token."""
    lock = (ROOT / "containers" / "train_maxtext" / "requirements.lock.txt").read_text()
    assert f"\nray=={sent()['spec']['rayClusterSpec']['rayVersion']}" in lock


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kuberay is '1.3'; expected one of 1.4, 1.5, 1.6, 1.7"):
        KubernetesConfig(kuberay="1.3")
