"""The parts of the Ray container that need no Ray: its slice of TPU hosts, and its checkpoints in the bucket."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers.common.errors import JobError
from containers.train_ray.shared_checkpoints import SharedCheckpoints
from containers.train_ray.tpu_slice import Slice

RUNS = "runs-bucket"
SLICE = {
    "DROPFORGE_TPU_ACCELERATOR": "tpu-v6e-slice",
    "DROPFORGE_TPU_TOPOLOGY": "4x4",
    "DROPFORGE_TPU_HOSTS": "4",
    "DROPFORGE_TPU_CHIPS_PER_HOST": "4",
}


@pytest.fixture
def shared(cloud: Any) -> SharedCheckpoints:
    return SharedCheckpoints(f"gs://{RUNS}/checkpoints/r-{uuid.uuid4().hex[:12]}/maxtext", cloud.client)


def put_step(cloud: Any, shared: SharedCheckpoints, step: int, *, whole: bool = True) -> None:
    prefix = shared.root.removeprefix(f"gs://{RUNS}/") + f"/run/checkpoints/{step}"
    for name in ("model_params/manifest.ocdbt", "optimizer_state/d/0", *(["commit_success.txt"] if whole else [])):
        cloud.put(RUNS, f"{prefix}/{name}", b"x")


def test_the_newest_checkpoint_is_the_last_one_that_is_whole(cloud: Any, shared: SharedCheckpoints) -> None:
    assert shared.newest() == 0
    for step in (2, 10, 9):
        put_step(cloud, shared, step)
    put_step(cloud, shared, 12, whole=False)
    assert shared.newest() == 10


def test_the_newest_two_are_kept_and_what_is_being_written(cloud: Any, shared: SharedCheckpoints) -> None:
    for step in (1, 4, 8, 12):
        put_step(cloud, shared, step, whole=step < 12)
        shared.write_notes(step, {"tokens": step})
    shared.prune(8)
    prefix = shared.root.removeprefix(f"gs://{RUNS}/")
    kept = {
        name.removeprefix(f"{prefix}/run/checkpoints/").split("/")[0] for name in cloud.names(RUNS, f"{prefix}/run/")
    }
    assert kept == {"4", "8", "12"}
    assert shared.read_notes(8) == {"tokens": 8}
    assert shared.read_notes(1) == {}
    shared.prune(8)
    shared.prune(4)
    assert shared.newest() == 8


def test_only_a_checkpoint_with_the_proof_of_its_run_is_resumed(cloud: Any, shared: SharedCheckpoints) -> None:
    own, other = replace(shared, key="k" * 64), replace(shared, key="o" * 64)
    for step in (4, 8, 12, 16):
        put_step(cloud, shared, step)
    for step in (4, 8):
        own.write_notes(step, {"tokens": step})
    other.write_notes(12, {"tokens": 12})
    assert (own.settle(), own.read_notes(8)) == (8, {"tokens": 8})
    assert (own.newest(), own.newest(limit=7)) == (8, 4)  # MaxText resumes the newest checkpoint that it sees
    cloud.put(RUNS, f"{shared.root.removeprefix(f'gs://{RUNS}/')}/run/checkpoints/8/optimizer_state/d/0", b"forged")
    assert own.settle() == 4
    assert shared.settle() == 4  # a run without a key believes every complete checkpoint


def test_imported_weights_are_copied_with_their_paths(cloud: Any, shared: SharedCheckpoints, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("_METADATA", "d/0"):
        (tmp_path / name).write_text(name)
    shared.upload_imported(tmp_path)
    prefix = shared.root.removeprefix(f"gs://{RUNS}/")
    assert cloud.names(RUNS, f"{prefix}/") == [f"{prefix}/imported/_METADATA", f"{prefix}/imported/d/0"]


def test_a_slice_is_one_worker_for_each_host() -> None:
    hosts = Slice.from_environment(SLICE)
    scaling = hosts.scaling(tpu=True)
    assert (scaling["num_workers"], scaling["topology"], scaling["accelerator_type"]) == (4, "4x4", "TPU-V6E")
    assert scaling["resources_per_worker"] == {"TPU": 4}
    assert hosts.scaling(tpu=False)["num_workers"] == 4


@pytest.mark.parametrize(
    "change",
    [
        {"DROPFORGE_TPU_ACCELERATOR": "tpu-v9"},
        {"DROPFORGE_TPU_TOPOLOGY": ""},
        {"DROPFORGE_TPU_HOSTS": "0"},
        {"DROPFORGE_TPU_CHIPS_PER_HOST": "four"},
    ],
)
def test_a_slice_that_is_not_described_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(JobError, match="DROPFORGE_TPU_ACCELERATOR") as refused:
        Slice.from_environment(SLICE | change)
    assert next(iter(change.values())) in str(refused.value)
