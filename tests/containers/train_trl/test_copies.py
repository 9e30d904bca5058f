"""An export of some hundred MiB is written once and uploaded from there: no second copy, on the disk or in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from tests.patience import PATIENCE_SECONDS

from dropforge.fit.configuration import read_shape
from dropforge.fit.phases import PROCESS_BYTES, Need, phase_rows
from dropforge.run.artifacts import read_manifest, verify_manifest
from dropforge.spec import parse_spec
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator

from ..conftest import ROOT, job_spec
from ..lazy import Lazy

safetensors, torch, transformers = Lazy("safetensors.torch"), Lazy("torch"), Lazy("transformers")
merge = Lazy("containers.train_trl.merge")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/io").is_file(), reason="the bytes that a process writes are counted by Linux"
    ),
]
RUN, RUNS = "big-0123456789ab", "runs-bucket"
LAYERS, SHARDS = 8, 2  # of 31 MB each; of 127 MB each
SLACK = 32 << 20  # of memory: the libraries' own, at their first use


@dataclass(frozen=True)
class Export:
    """A base, an adapter's checkpoint and the merged model, in a directory, and what the merge took."""

    directory: Path
    config: dict[str, Any]
    took: dict[str, int]

    @property
    def inputs(self) -> int:
        return size(self.directory / "base") + size(self.directory / "checkpoint")

    @property
    def exported(self) -> int:
        return size(self.directory / "export")

    def need(self, phase: str) -> Need:
        """What the phase plan says of a phase."""
        rows = phase_rows(parse_spec(json.dumps(job_spec()).encode()), read_shape(self.config, "gs://data/base"))
        (row,) = [row for row in rows if row.need.phase == phase]
        return row.need


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def measured(*arguments: Any) -> dict[str, int]:
    """The bytes that measured.py wrote to files, and by how many its memory grew."""
    command = [sys.executable, "-P", "-m", "tests.containers.train_trl.measured", *map(str, arguments)]
    # Freed memory goes back to the system at once: the peak is that of live tensors.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def write_model(base: Path, checkpoint: Path) -> dict[str, Any]:
    """A Qwen 3 of zeros in shards, and an adapter of all its linear layers; returns the configuration."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = transformers.Qwen3Config(**sizes, vocab_size=1024, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    config.dtype = torch.bfloat16
    config.save_pretrained(base)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    names, index = list(shapes), dict[str, str]()
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in names[shard::SHARDS]}
        safetensors.save_file(tensors, base / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (base / merge.INDEX).write_text(json.dumps({"weight_map": index}))
    adapter: dict[str, Any] = {}
    for name, (*_, rows, columns) in ((name, shape) for name, shape in shapes.items() if "_proj" in name):
        module = "base_model.model." + name.removesuffix(".weight")
        adapter |= {f"{module}.lora_A.weight": torch.ones(8, columns), f"{module}.lora_B.weight": torch.ones(rows, 8)}
    checkpoint.mkdir()
    safetensors.save_file(adapter, checkpoint / merge.ADAPTER)
    (checkpoint / merge.ADAPTER_CONFIG).write_text(json.dumps({"lora_alpha": 16, "r": 8, "fan_in_fan_out": False}))
    return dict(json.loads((base / "config.json").read_text()))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    directory = tmp_path_factory.mktemp("big")
    base, checkpoint, model = directory / "base", directory / "checkpoint", directory / "export" / "model"
    config = write_model(base, checkpoint)
    model.mkdir(parents=True)
    return Export(directory, config, measured("merge", base, checkpoint, model))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[storage.Client]:
    def build() -> list[StorageEmulator]:
        return [StorageEmulator(Database(tmp_path / "state.db"), tmp_path / "blobs", SystemClock())]

    with BackgroundServer(build) as server:
        options = {"api_endpoint": server.url}
        client = storage.Client(project="p", credentials=AnonymousCredentials(), client_options=options)
        client.create_bucket(RUNS)
        yield client
        client.close()


def test_a_merge_writes_the_model_once_and_holds_a_few_tensors(export: Export) -> None:
    assert export.exported > 250_000_000
    need, took = export.need("merge"), export.took
    assert export.exported <= took["written"] <= export.exported * 1.01
    assert export.inputs + took["written"] <= need.disk
    # The kernel counts the pages of the base's open file, which it can drop at any time, as memory of the process.
    open_file = max(path.stat().st_size for path in (export.directory / "base").iterdir())
    assert took["memory"] <= open_file + need.host - PROCESS_BYTES + SLACK


def test_an_upload_writes_no_file_and_holds_a_part_of_each(export: Export, client: storage.Client) -> None:
    exported, url = export.exported, client._connection.API_BASE_URL
    took = measured("upload", url, RUNS, RUN, export.directory / "export", json.dumps(job_spec()))
    assert took["written"] < 1_000_000
    assert export.inputs + exported + took["written"] <= export.need("upload").disk
    assert took["memory"] < exported / 2
    manifest = read_manifest(client, RUNS, RUN)
    assert manifest is not None
    assert sum(file.size for file in manifest.files) >= exported
    assert verify_manifest(client, RUNS, manifest) == []
