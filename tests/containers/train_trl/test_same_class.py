"""Whole runs on tiny models of the real models' classes (same_class.py): what a text-only model cannot show.

With the variable DROPFORGE_TEST_FAMILIES, every family goes through every kind of training (ten minutes).
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from dropforge.run.artifacts import Manifest, checkpoints, download_prefix, upload_directory, verify_manifest
from dropforge.run.record import Parity
from dropforge.run.seal import read_seal
from dropforge.stages.parity import Endpoint, progress
from dropforge_local.base.ports import free_port

from .. import same_class
from ..conftest import DATA, ROOT, RUN_KEY, RUNS
from ..serve_vllm.test_serve import PORTS, SEALED_ROWS, fork, wait_until_ready
from .test_fsdp import newest_step, rank_processes, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Every family in another way: the training, the export and the evaluation of each differ by it.
ADAPTERS: dict[same_class.Family, dict[str, Any]] = {
    "gemma3": {"type": "qlora", "r": 4},
    "gemma1": {"type": "lora", "r": 4},
    "qwen3": {"type": "lora", "r": 4, "target_modules": ["q_proj", "v_proj"]},
    "llama31": {"type": "none"},
}
LAYERS = {
    "gemma3": "Gemma3DecoderLayer",
    "gemma1": "GemmaDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "llama31": "LlamaDecoderLayer",
}
KINDS: list[dict[str, Any]] = [{"type": "lora", "r": 4}, {"type": "qlora", "r": 4}, {"type": "none"}]
ALL = bool(os.environ.get("DROPFORGE_TEST_FAMILIES"))
RUNS_OF_ONE = [(family, kind) for family in ADAPTERS for kind in KINDS] if ALL else list(ADAPTERS.items())
RUNS_OF_TWO = [(family, kind) for family in ADAPTERS for kind in KINDS[::2]] if ALL else [("gemma3", KINDS[0])]


def name_of(value: Any) -> str:
    return str(value["type"] if isinstance(value, dict) else value)


Spec = Callable[..., dict[str, Any]]


def upload(cloud: Any, family: same_class.Family) -> tuple[str, Path]:
    """The model's URI in the data bucket, and its directory."""
    directory = same_class.make(ROOT / "build" / "same_class", family)
    uri = f"gs://{DATA}/{family}-{uuid.uuid4().hex[:8]}"
    upload_directory(cloud.client, directory, uri)
    return uri, directory


@pytest.mark.parametrize(("family", "adapter"), RUNS_OF_ONE, ids=name_of)
def test_a_run_ends_with_a_model_that_loads_as_its_base_does(
    family: same_class.Family, adapter: dict[str, Any], trainer: Any, spec: Spec, cloud: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    uri, directory = upload(cloud, family)
    training = {"max_steps": 4, "max_length": 256, "learning_rate": 1e-3}
    # The answers of random weights mean nothing, and end only at their limit: judge as many rows as are compared below.
    document = spec(model={"source": uri}, training=training, evaluation={"max_rows": SEALED_ROWS})
    document["training"]["adapter"] = adapter
    attempt = trainer.start(document)
    assert attempt.wait() == 0, attempt.output
    manifest = trainer.manifest(attempt.run)
    assert verify_manifest(cloud.client, RUNS, manifest) == []
    download_prefix(cloud.client, f"gs://{RUNS}/models/{attempt.run}/{manifest.serve_path}", tmp_path)
    base, model = AutoModelForCausalLM.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (type(model), model.dtype) == (type(base), base.dtype)
    changed = [name for name, tensor in base.state_dict().items() if not tensor.equal(model.state_dict()[name])]
    assert changed
    assert not [name for name in changed if "vision" in name or "projector" in name]
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / name).exists() == (directory / name).exists()
        if (directory / name).exists():
            assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    stops = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    known = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert set(known if isinstance(known, list) else [known]) <= set(stops)
    assert served(cloud, manifest) == "sealed"


def served(cloud: Any, manifest: Manifest) -> str:
    """How stage deploy finds an endpoint of the model: the serving container, with `transformers serve`."""
    seal, port = read_seal(cloud.client, RUNS, manifest), free_port(PORTS, set())
    assert seal is not None
    seal = seal.model_copy(update={"rows": seal.rows[:SEALED_ROWS]})
    uri, url = f"gs://{RUNS}/models/{manifest.run}", f"http://127.0.0.1:{port}"
    process = fork(cloud, uri, port, DROPFORGE_MAX_MODEL_LEN="1024")
    try:
        wait_until_ready(process, url)
        with requests.Session() as session:
            *_, found = progress(Parity(state="checking"), seal, Endpoint(session, url, "text-to-sql"))
    finally:
        process.terminate()
        process.communicate()
    assert found.rows == SEALED_ROWS
    return found.state


@pytest.mark.parametrize(("family", "adapter"), RUNS_OF_TWO, ids=name_of)
def test_two_ranks_that_are_killed_resume(
    family: same_class.Family, adapter: dict[str, Any], trainer: Any, spec: Spec, cloud: Any, events: Any
) -> None:
    """Adapters on the vision tower of Gemma 3 had no state in the optimiser, so ranks could not load the checkpoint."""
    uri, _ = upload(cloud, family)
    training = {"max_steps": 8, "max_length": 256, "checkpoint_steps": 1, "per_device_train_batch_size": 4}
    document, run = spec(model={"source": uri}, training=training), f"{family}-{uuid.uuid4().hex[:12]}"
    document["training"]["adapter"] = adapter
    first = trainer.start(document, run, processes=2)
    wait_for(lambda: any(checkpoint.step > 1 for checkpoint in checkpoints(cloud.client, RUNS, run, RUN_KEY)))
    rank_processes(first.process.pid)[1].send_signal(signal.SIGKILL)
    assert first.wait() == 70, first.output
    resumed = newest_step(cloud, run)
    second = trainer.start(document, run, attempt=2, processes=2)
    assert second.wait() == 0, second.output
    started = next(event for event in events(run) if event.attempt == 2)
    assert started.resumed_step == resumed >= 2
    assert f'"wrapped": ["{LAYERS[family]}"]' in second.output
    assert trainer.manifest(run).metrics["steps"] == 8
