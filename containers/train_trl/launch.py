"""Several processes: starts `accelerate launch` with an FSDP2 configuration, and determines how its ranks ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from containers.common.errors import DONE, STOPPED, config_error, infrastructure_error
from containers.common.job import Job
from containers.common.outcome import Outcome, read_outcomes
from containers.common.stop import RANKS_MARGIN_SECONDS, Stopped, StopRequest
from containers.common.world import DIRECTORY, World
from dropforge.base.errors import ErrorClass
from dropforge.base.log import log
from dropforge.cloud import container_secrets
from dropforge.spec import JobSpec

TRAIN = "containers.train_trl.train"
STANDS_IN = "DROPFORGE_CPU_STANDS_IN"  # only what starts containers where there are no GPUs sets it: the local stack
# A rank that hangs in a collective after another rank failed is killed after this time. A checkpoint may take as long.
SHUTDOWN_SECONDS = 30


def run_ranks(spec: JobSpec, job: Job, directory: Path, stop: StopRequest) -> Outcome:
    """Train in the ranks of this machine and forward SIGTERM and the deadline to them; returns the common outcome."""
    if found := spec.training.unsharded():
        field, value, reason, cure = found
        message = f"training.{field.replace('/', '.')} is {value!r} and {job.world.size} processes train; {reason}"
        raise config_error(message, f"use {cure}, or one process")
    gpus = visible_gpus()
    if gpus and job.world.processes > gpus:
        raise config_error(
            f"DROPFORGE_NUM_PROCESSES is {job.world.processes}; expected at most {gpus}, the GPUs of this machine",
            "give the container as many GPUs as processes",
        )
    config = directory / "accelerate.json"
    config.write_text(json.dumps(accelerate_config(job.world, gpu=gpus > 0), indent=2))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--module", TRAIN]
    log("starting ranks", stage="train", run=job.run, processes=job.world.processes, machine=job.world.machine)
    launcher = None
    try:
        with stop.deferred():  # a started launcher is always assigned, so that it can be ended
            launcher = subprocess.Popen(command, env=rank_environment(job, directory), start_new_session=True)
        launcher.wait()
    except Stopped:
        if launcher:
            end_ranks(launcher, job, max(1.0, stop.seconds_left(job.grace_seconds) - RANKS_MARGIN_SECONDS))
    return conclude(read_outcomes(directory), stop, job.world, launcher.returncode if launcher else None)


def end_ranks(launcher: subprocess.Popen[bytes], job: Job, seconds: float) -> None:
    """Ask the ranks to save a checkpoint and end; wait at most `seconds`.

    A rank that waits in a collective does not receive the signal. A longer wait for that rank would lose the last
    event. When this process ends, the container ends with every rank.
    """
    launcher.terminate()  # the launcher forwards the signal to every rank
    try:
        launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        log(f"ranks did not end in {seconds:g} s", stage="train", run=job.run, severity="WARNING")


def accelerate_config(world: World, *, gpu: bool) -> dict[str, Any]:
    """The configuration that `accelerate config` would write (JSON is one of its formats).

    Only a rank knows the rest: the wrap classes (ranks.py, from the model), the precision and activation checkpointing
    (plan.py; both are arguments of the trainer, and must not be set twice).
    """
    host, port = world.host_and_port if world.machines > 1 else (None, 0)  # 0: any free port
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": False,
            "fsdp_offload_params": False,
            # One rank of a machine reads the weights and sends them to the GPUs of the other ranks.
            "fsdp_cpu_ram_efficient_loading": gpu,
        },
        "machine_rank": world.machine,
        "main_process_ip": host,
        "main_process_port": port,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": world.machines,
        "num_processes": world.size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not gpu,
    }


def rank_environment(job: Job, directory: Path) -> dict[str, str]:
    """This process's own environment, with the secrets that it read, and the variables that make a process a rank."""
    shutdown_seconds = str(int(max(SHUTDOWN_SECONDS, job.grace_seconds)))
    inherited = {name: value for name, value in os.environ.items() if name != container_secrets.VARIABLE}
    return {**inherited, DIRECTORY: str(directory), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": shutdown_seconds}


def check_gpus(spec: JobSpec) -> None:
    """Refuse to train on the CPU of a machine that is paid for its GPU. Raises JobError."""
    if os.environ.get(STANDS_IN) == "1" or visible_gpus():
        return
    raise config_error(
        f"the target {spec.target.type!r} has an accelerator {spec.target.machine.accelerator}, and torch "
        f"{version('torch')} sees no GPU",
        "the image has a torch without CUDA, or for a newer driver than the machine's: build the image train-trl again "
        f"(docs/deploy.md); to train on a CPU on purpose, set {STANDS_IN}=1 in the container",
    )


def visible_gpus() -> int:
    """The number of GPUs that torch, and so the ranks, can use. Makes no CUDA context."""
    if version("torch").endswith("+cpu"):
        return 0  # importing torch takes seconds
    import torch

    return int(torch.cuda.device_count())


def conclude(outcomes: dict[int, Outcome], stop: StopRequest, world: World, code: int | None) -> Outcome:
    """The outcome of all ranks: the first failure is the cause of the later failures."""
    first = outcomes.get(world.machine * world.processes)
    if first and first.exit_code == DONE:
        return first
    causes = [outcome for outcome in outcomes.values() if _is_cause(outcome, stop)]
    cause = min(causes, key=lambda outcome: outcome.time, default=None)
    if cause and cause.exit_code != STOPPED:
        return cause
    if cause or stop.reason:
        step = max((outcome.step for outcome in outcomes.values()), default=0)
        agreed = any(outcome.agreed for outcome in outcomes.values())
        reason = stop.reason or (cause.reason if cause else "")
        return Outcome.stopped(reason, step, agreed)
    lost = sorted(set(range(world.machine * world.processes, (world.machine + 1) * world.processes)) - set(outcomes))
    ranks = ", ".join(map(str, lost)) or "none"
    return Outcome.failed(
        infrastructure_error(
            f"the launcher ended with exit code {code}; these ranks left no outcome: {ranks}",
            "see the launcher's lines in the log; a rank killed by signal 9 usually means too little host memory",
        )
    )


def _is_cause(outcome: Outcome, stop: StopRequest) -> bool:
    """Whether a rank ended for a reason of its own."""
    if outcome.exit_code == STOPPED:
        # If neither this process nor the ranks together decided to stop, the launcher stopped this rank because
        # another rank had ended.
        return stop.reason is not None or outcome.agreed
    # Ranks do not end at the same moment: during a stop, some ranks lose their connection to ranks that ended earlier.
    return outcome.exit_code != DONE and not (stop.reason and outcome.error_class == ErrorClass.INFRASTRUCTURE)
