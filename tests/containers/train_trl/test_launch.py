"""Several processes, without starting them: the environment, the configuration, and the outcome of all ranks."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers.common import attempt
from containers.common.errors import BAD_CONFIG, DONE, INTERNAL, OUT_OF_MEMORY, STOPPED, JobError, classify
from containers.common.job import Job
from containers.common.outcome import Outcome, read_outcomes
from containers.common.stop import StopRequest
from containers.common.world import World, read_world
from containers.train_trl import launch
from dropforge.base.errors import ErrorClass
from dropforge.spec import JobSpec

JOB = Job("p", "demo-0123456789ab", 1, "b", "", None, 10)
OUT_OF = Outcome.failed(JobError(ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY, "out of memory"))
LOST = Outcome.failed(JobError(ErrorClass.INFRASTRUCTURE, INTERNAL, "connection closed by peer"))


def test_the_environment_describes_the_world() -> None:
    problems: list[str] = []
    values = {"DROPFORGE_NUM_PROCESSES": "8", "DROPFORGE_NUM_MACHINES": "2", "JOB_COMPLETION_INDEX": "1"}
    world = read_world({**values, "DROPFORGE_MAIN_ADDRESS": "job-0.job:3000"}, problems)
    assert (world.size, world.machine, world.host_and_port, problems) == (16, 1, ("job-0.job", 3000), [])
    assert world.starts_ranks
    assert not world.main
    assert read_world({}, problems) == World()
    assert World().main


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"DROPFORGE_NUM_PROCESSES": "all"}, "DROPFORGE_NUM_PROCESSES is 'all'; expected 1 to 4096"),
        ({"DROPFORGE_NUM_MACHINES": "2"}, "DROPFORGE_MAIN_ADDRESS is ''; expected machine 0's host"),
        (
            {"DROPFORGE_NUM_MACHINES": "2", "DROPFORGE_MACHINE_RANK": "2", "DROPFORGE_MAIN_ADDRESS": "a"},
            "DROPFORGE_MACHINE_RANK is 2; expected less than DROPFORGE_NUM_MACHINES, 2",
        ),
    ],
)
def test_a_world_that_cannot_be_is_refused(environment: dict[str, str], problem: str) -> None:
    problems: list[str] = []
    read_world(environment, problems)
    assert any(text.startswith(problem) for text in problems), problems


def test_accelerate_reads_the_configuration(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import DistributedType

    world = World(processes=8, machines=2, machine=1, address="job-0.job")
    (tmp_path / "accelerate.json").write_text(json.dumps(launch.accelerate_config(world, gpu=True)))
    config = ClusterConfig.from_json_file(str(tmp_path / "accelerate.json"))
    assert config.distributed_type == DistributedType.FSDP
    assert (config.num_processes, config.machine_rank, config.main_process_port) == (16, 1, 29500)
    fsdp = config.fsdp_config
    assert (fsdp["fsdp_version"], fsdp["fsdp_state_dict_type"]) == (2, "SHARDED_STATE_DICT")
    assert fsdp["fsdp_cpu_ram_efficient_loading"]
    assert not launch.accelerate_config(World(2), gpu=False)["fsdp_config"]["fsdp_cpu_ram_efficient_loading"]


def test_what_cannot_be_sharded_is_refused_before_any_rank_starts(monkeypatch: Any, tmp_path: Path) -> None:
    job = replace(JOB, world=World(processes=8))
    with pytest.raises(JobError, match="'qlora' and 8 processes train; 4-bit weights cannot be sharded"):
        launch.run_ranks(spec("qlora"), job, tmp_path, StopRequest())
    monkeypatch.setattr(launch, "visible_gpus", lambda: 4)
    with pytest.raises(JobError, match="DROPFORGE_NUM_PROCESSES is 8; expected at most 4") as caught:
        launch.run_ranks(spec("lora"), job, tmp_path, StopRequest())
    assert caught.value.exit_code == BAD_CONFIG


@pytest.mark.parametrize(
    ("outcomes", "stopped", "exit_code", "message"),
    [
        # The model is committed: errors while the ranks end do not matter.
        ({0: Outcome.done(), 1: LOST}, False, DONE, ""),
        # The first failure is the cause of the others.
        ({0: replace(LOST, time=2.0), 1: replace(OUT_OF, time=1.0)}, False, OUT_OF_MEMORY, "out of memory"),
        # Rank 1 was killed; the launcher stopped rank 0.
        ({0: Outcome.stopped("preempted", 20, agreed=False)}, False, INTERNAL, "left no outcome: 1"),
        ({}, False, INTERNAL, "left no outcome: 0, 1"),
        ({0: Outcome.stopped("preempted", 20, agreed=True), 1: LOST}, True, STOPPED, ""),
        # Another machine got the signal, and all ranks agreed.
        ({0: Outcome.stopped("preempted", 20, agreed=True)}, False, STOPPED, ""),
        # The signal came before the ranks listened.
        ({}, True, STOPPED, ""),
    ],
)
def test_what_the_ends_of_the_ranks_mean(
    outcomes: dict[int, Outcome], stopped: bool, exit_code: int, message: str
) -> None:
    stop = StopRequest()
    stop.reason = "deadline" if stopped else None
    result = launch.conclude(outcomes, stop, World(processes=2), 1)
    assert result.exit_code == exit_code
    assert message in result.message
    if exit_code == STOPPED:
        assert result.reason == ("deadline" if stopped else "preempted")
        assert result.step == max((outcome.step for outcome in outcomes.values()), default=0)


@pytest.mark.parametrize(("left", "reason"), [(20.0, "deadline"), (300.0, "preempted"), (None, "preempted")])
def test_ranks_know_why_they_are_stopped(left: float | None, reason: str, monkeypatch: Any) -> None:
    stop = StopRequest()
    with monkeypatch.context() as patch:  # pytest-timeout uses the same timer when the test has ended
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(signal, "setitimer", lambda *_: pytest.fail("the process that started the ranks is woken"))
        stop.arm(None if left is None else time.time() + left, wake=False)
    stop.agree()
    assert stop.reason == reason
    assert stop.seconds_left(10) == (30 if reason == "deadline" else 10)


def test_ranks_inherit_secrets_and_do_not_read_them_again(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("DROPFORGE_SECRETS", '{"HF_TOKEN": "projects/p/secrets/hf-token/versions/latest"}')
    monkeypatch.setenv("HF_TOKEN", "value")
    environment = launch.rank_environment(JOB, tmp_path)
    assert "DROPFORGE_SECRETS" not in environment
    assert environment["HF_TOKEN"] == "value"
    assert environment["DROPFORGE_LAUNCH_DIRECTORY"] == str(tmp_path)


def test_a_rank_leaves_its_end_to_the_process_that_started_it(tmp_path: Path) -> None:
    rank = replace(JOB, world=World(processes=2, rank=1, local_rank=1, directory=tmp_path))
    agreed = Outcome.stopped("preempted", 20, agreed=True)
    reported: list[Outcome] = []
    assert attempt.conclude(rank, agreed, tmp_path, recorder(reported)) == DONE
    assert attempt.conclude(rank, OUT_OF, tmp_path, recorder(reported)) == OUT_OF_MEMORY
    assert reported == []
    assert read_outcomes(tmp_path) == {1: OUT_OF}
    assert OUT_OF.error.error_class == ErrorClass.OUT_OF_MEMORY


def test_another_machine_tells_only_what_nobody_else_can_know(tmp_path: Path) -> None:
    reported: list[Outcome] = []
    first, second = (replace(JOB, world=World(machines=2, machine=machine)) for machine in (0, 1))
    alone, together = (Outcome.stopped("preempted", 20, agreed) for agreed in (False, True))
    for job, outcome in (
        (second, OUT_OF), (second, LOST), (second, Outcome.done()), (second, together), (second, alone), (first, LOST)
    ):  # fmt: skip
        assert attempt.conclude(job, outcome, tmp_path, recorder(reported)) == outcome.exit_code
    assert reported == [OUT_OF, alone, LOST]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2345"),
        type("DistBackendError", (RuntimeError,), {})("NCCL error"),
    ],
)
def test_a_collective_that_a_lost_rank_broke_is_tried_again(error: Exception) -> None:
    assert classify(error).error_class == ErrorClass.INFRASTRUCTURE


def recorder(reported: list[Outcome]) -> Any:
    return type("Recorder", (), {"ended": staticmethod(reported.append)})()


def spec(adapter: str) -> JobSpec:
    document = {
        "api_version": "dropforge/v1",
        "name": "gemma",
        "model": {"source": "google/gemma-3-12b-pt"},
        "dataset": {"source": "gs://data/x.jsonl"},
        "training": {"adapter": {"type": adapter}},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }
    return JobSpec.model_validate_json(json.dumps(document))
