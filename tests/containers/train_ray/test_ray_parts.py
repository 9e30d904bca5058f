"""The parts of the Ray container that need no Ray: its slice of TPU hosts, and its checkpoints in the bucket."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from containers.common.checkpoints import CheckpointStore
from containers.common.errors import JobError
from containers.common.job import Job
from containers.common.redactor import Redactor
from containers.common.report import Reporter
from containers.train_maxtext import watch as watch_module
from containers.train_maxtext.work import Work
from containers.train_ray import driver
from containers.train_ray.shared_checkpoints import SharedCheckpoints
from containers.train_ray.tpu_slice import Slice
from dropforge.cloud.clients import Clients

from ..interrupted import StopAt, stopped_everywhere
from ..maxtext import append_lines, start_line, step_line

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


class Bucket:
    """Replaces the shared checkpoints: the workers wrote those of `steps`."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.notes = steps, dict[int, dict[str, Any]]()

    def newest(self, limit: int) -> int:
        return max((step for step in self.steps if step <= limit), default=0)

    def write_notes(self, step: int, notes: dict[str, Any]) -> None:
        self.notes[step] = notes

    def prune(self, step: int) -> None:
        pass

    def step_uri(self, step: int) -> str:
        return f"gs://b/{step}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was just opened
def test_a_request_to_stop_at_any_instruction_of_the_watch_loses_no_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("p", "run", 1, "b", "", None, 10)

    def train(stop: StopAt) -> dict[int, dict[str, Any]]:
        """Six steps; the workers restart after step 4. The notes of the checkpoints."""
        bucket = Bucket(2, 4, 5)
        monkeypatch.setattr(SharedCheckpoints, "from_environment", lambda: bucket)
        with TemporaryDirectory(dir=tmp_path) as directory:
            work, reporter = Work(Path(directory)), Reporter(job, Redactor(), Clients())
            work.begin({}, [])
            store = CheckpointStore(None, job, reporter)
            watch = driver.Watch(work, store, reporter, 2, {"tokens": 5000})
            append_lines(work.progress, start_line(0, 6), *map(step_line, (1, 2, 3)))
            watch()
            append_lines(work.progress, step_line(4), step_line(5), start_line(4, 6), step_line(5, since=4))
            stop.call(watch)
            append_lines(work.progress, step_line(6, since=4))
            bucket.steps += (6,)
            watch.save_last()
        return bucket.notes

    *stopped, whole = stopped_everywhere(train, driver, watch_module)
    assert {step: notes["tokens"] for step, notes in whole.items()} == {2: 5200, 4: 5400, 6: 5600}
    assert len(stopped) > 100
    assert [place for place, notes in enumerate(stopped) if notes != whole] == []


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
