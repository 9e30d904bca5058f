"""The images and the GPUs on which they start: the rule, the table against containers/, the refusals."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge.base.errors import SpecProblem
from dropforge.platforms import images
from dropforge.platforms.cloud_run.catalog import CLOUD_RUN_DRIVERS, CLOUD_RUN_MACHINES
from dropforge.platforms.facts import Source
from dropforge.platforms.gke.catalog import GKE_DRIVER_VERSION, GKE_DRIVERS, GKE_GPUS, gke_drivers
from dropforge.platforms.gpus import GPUS
from dropforge.platforms.images import IMAGES, Driver, Image
from dropforge.spec import parse_spec
from dropforge.stages.admission import machine_problems

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
FACTS = yaml.safe_load((ROOT / "tests" / "data" / "cuda.yaml").read_text())
HERE = Source("this test", date(2026, 11, 23))
OFFERED = [("cloud_run", name) for name in CLOUD_RUN_MACHINES] + [("gke", name) for name in GKE_GPUS]
# The bases before containers/bases.toml listed them. Neither starts on Cloud Run's L4.
BEFORE_BASES = {"docker.io/pytorch/pytorch:2.13.0-cuda12.8-cudnn9-runtime", "docker.io/vllm/vllm-openai:v0.33.0"}


def image_of(cuda: str) -> Image:
    """Return an image with PyTorch's build for a version of CUDA."""
    major, _, minor = cuda.partition(".")
    built = tuple((major, minor) for major, minor in FACTS["architectures"][cuda])
    return Image("test", f"torch+cu{major}{minor}", HERE, (int(major), int(minor)), built)


@pytest.mark.parametrize("case", FACTS["cases"], ids=lambda case: f"{case['cuda']}-{case['driver']}-{case['gpu']}")
def test_the_rule_agrees_with_what_people_saw(case: dict[str, Any]) -> None:
    driver = Driver(case["driver"], HERE)
    assert image_of(case["cuda"]).starts_on(GPUS[case["gpu"]], driver) is case["starts"], case["source"]


@pytest.mark.parametrize("role", ["train_trl", "serve_vllm"])
@pytest.mark.parametrize(("platform", "accelerator"), OFFERED)
def test_each_image_starts_on_each_accelerator_on_which_it_is_offered(
    role: str, platform: str, accelerator: str
) -> None:
    drivers = CLOUD_RUN_DRIVERS if platform == "cloud_run" else gke_drivers()
    assert IMAGES[role].starts_on(GPUS[accelerator], drivers[accelerator])


def test_every_offered_accelerator_has_a_driver() -> None:
    assert set(CLOUD_RUN_DRIVERS) == set(CLOUD_RUN_MACHINES)
    assert set(gke_drivers()) == set(GKE_GPUS)


def test_the_default_driver_of_gke_would_not_do() -> None:
    assert GKE_DRIVER_VERSION == "latest"
    blackwell = GPUS["nvidia-b200"]
    assert not IMAGES["train_trl"].starts_on(blackwell, GKE_DRIVERS["default"])
    assert IMAGES["train_trl"].starts_on(blackwell, GKE_DRIVERS["latest"])


def test_the_table_has_pytorchs_architectures() -> None:
    for image in IMAGES.values():
        if image.cuda is not None:
            listed = FACTS["architectures"][".".join(map(str, image.cuda))]
            assert [list(built) for built in image.architectures] == listed, image.role


def bases() -> dict[str, Any]:
    """Return containers/bases.toml by role. Skip while the Dockerfiles still have the bases of before."""
    path = CONTAINERS / "bases.toml"
    if not path.exists():
        for role in ("train_trl", "serve_vllm"):
            base = re.search(r"^ARG BASE=(.+)$", (CONTAINERS / role / "Dockerfile").read_text(), re.M)
            assert base is not None, f"{path} is missing, and containers/{role}/Dockerfile names no base"
            assert base[1] in BEFORE_BASES, f"{path} is missing, and {base[1]} is a new base"
        pytest.skip("containers/bases.toml does not exist yet, and the bases are those of before")
    return tomllib.loads(path.read_text())


def test_the_table_names_the_serving_base() -> None:
    base = bases()["serve_vllm"]["image"].removeprefix("docker.io/")
    assert IMAGES["serve_vllm"].pin == base
    assert IMAGES["serve_vllm"].cuda == cuda_of(base)


def cuda_of(pin: str) -> tuple[int, int]:
    """Return the CUDA version in a pin: `…-cu129` or `…+cu129` is (12, 9). vLLM's tags without it are CUDA 13."""
    named = re.search(r"[-+]cu(\d\d)(\d)\b", pin)
    return (int(named[1]), int(named[2])) if named else (13, 0)


def inputs(role: str) -> list[str]:
    """Return the texts that decide what an image contains: its Dockerfile and each lock that it copies."""
    dockerfile = (CONTAINERS / role / "Dockerfile").read_text()
    copied = re.findall(r"containers/[\w./]+\.txt", dockerfile)
    return [dockerfile, *((ROOT / path).read_text() for path in dict.fromkeys(copied))]


def torch_pins(role: str) -> set[str]:
    return {pin for text in inputs(role) for pin in re.findall(r"\b(torch==[\w.+]+)", text)}


def test_the_table_names_the_training_torch() -> None:
    bases()
    assert torch_pins("train_trl") == {IMAGES["train_trl"].pin}
    assert IMAGES["train_trl"].cuda == cuda_of(IMAGES["train_trl"].pin)


@pytest.mark.parametrize("role", ["train_maxtext", "train_ray", "serve_vllm_tpu"])
def test_the_images_for_tpus_have_the_cpu_build(role: str) -> None:
    assert torch_pins(role) == {IMAGES[role].pin}
    assert IMAGES[role].cuda is None


def test_no_image_has_flash_attention_unless_the_table_says_so() -> None:
    for image in IMAGES.values():
        installed = any(re.search(r"^\s*flash[-_]attn\b", text, re.M | re.I) for text in inputs(image.role))
        assert installed is bool(image.attention), image.role


def problems_of(**changes: Any) -> list[SpecProblem]:
    """Return what admission says about the machines of the README's example with some fields changed."""
    document = json.loads((ROOT / "examples" / "cloud-run-gemma-2b-qlora.json").read_text())
    return machine_problems(parse_spec(json.dumps({**document, **changes}).encode()))


def test_the_examples_are_accepted() -> None:
    for path in (ROOT / "examples").rglob("*.json"):
        assert machine_problems(parse_spec(path.read_bytes())) == [], path.name


def test_an_image_with_cuda_13_is_refused_on_cloud_runs_l4_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = replace(IMAGES["serve_vllm"], pin="vllm/vllm-openai:v0.33.0", cuda=(13, 0))
    monkeypatch.setitem(images.IMAGES, "serve_vllm", vllm)
    [problem] = problems_of()
    assert problem.pointer == "/serve/accelerator"
    assert "its CUDA 13.0 (vllm/vllm-openai:v0.33.0) is too new for driver 535, which runs CUDA 12" in problem.message
    assert problem.found == "nvidia-l4"
    assert problem.expected == "one of nvidia-rtx-pro-6000, or another base in containers/serve_vllm"
    rtx = {"type": "cloud_run", "accelerator": "nvidia-rtx-pro-6000", "cpu": 20, "memory_gib": 80}
    assert problems_of(serve=rtx) == []


def test_an_image_without_the_gpus_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(image_of("12.6"), role="train_trl")
    monkeypatch.setitem(images.IMAGES, "train_trl", old)
    gke = {"type": "gke", "accelerator": "nvidia-b200", "accelerator_count": 8}
    target = {**gke, "placements": [{"region": "us-central1"}]}
    [problem] = problems_of(target=target, training={"adapter": {"type": "lora"}})
    assert problem.pointer == "/target/accelerator"
    assert "the GPU is sm_100" in problem.message
    assert "nvidia-b200" not in str(problem.expected)


@pytest.mark.parametrize(
    "target",
    [
        {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        {"type": "gke", "placements": [{"region": "us-central1"}]},
        {"type": "tpu_vm", "placements": [{"zone": "us-west4-a"}]},
        {"type": "ray", "placements": [{"region": "us-central1"}]},
    ],
)
@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_a_flash_attention_that_no_image_has_is_refused_with_the_mend(target: dict[str, Any], attention: str) -> None:
    adapter = "lora" if target["type"] in ("cloud_run", "gke") else "none"
    model = {"source": "google/gemma-2b", "attn_implementation": attention}
    [problem] = problems_of(
        model=model, target=target, training={"adapter": {"type": adapter}}, serve=None, evaluation=None
    )
    assert (problem.pointer, problem.found) == ("/model/attn_implementation", attention)
    assert str(problem.expected).startswith("'auto', 'sdpa' or 'eager'")


def test_the_types_that_serving_lacks_are_those_of_the_training_lock() -> None:
    """A newer transformers in the lock of train_trl, or another vLLM: compare its types of text models again."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    lock = (CONTAINERS / "train_trl" / "requirements.lock.txt").read_text()
    assert f"transformers=={images.UNSERVED.training} " in lock
    assert "v0.29.0" in IMAGES["serve_vllm"].pin
    assert set(CONFIG_MAPPING_NAMES) >= images.UNSERVED.types
    assert not images.UNSERVED.types & {"gemma", "gemma3", "gemma3_text", "llama", "qwen3", "qwen3_moe"}
