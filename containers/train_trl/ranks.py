"""Steps that the ranks of one training take together. Imports torch: import this module only in a rank."""

from __future__ import annotations

import pickle
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from containers.common.errors import config_error, infrastructure_error

# How long ranks wait for a rank that reads or evaluates the model.
PATIENCE = timedelta(minutes=30)


def join() -> None:
    """Join the process group. Raises JobError when accelerate would not shard the model."""
    timeout = InitProcessGroupKwargs(timeout=PATIENCE)
    check_sharding(Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[timeout]))


def check_sharding(accelerator: Any) -> None:
    """Raise JobError unless accelerate shards. Without GPUs it silently runs DDP, whatever its configuration says."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    version = getattr(plugin, "fsdp_version", None)
    if accelerator.distributed_type == DistributedType.FSDP and version == 2:
        return
    actual = str(accelerator.distributed_type).rpartition(".")[2]
    raise config_error(
        f"{accelerator.num_processes} processes were to shard the model by FSDP2; accelerate runs {actual} "
        f"(FSDP version {version}) on {accelerator.device}",
        "give every process a GPU that the image's torch sees, or set DROPFORGE_NUM_PROCESSES to 1",
    )


def hand_over(directory: Path, value: Any = None) -> Any:
    """Give the first rank's `value` to every rank of the machine: work done once cannot differ."""
    path = directory / "inputs.pickle"
    if value is not None:
        path.write_bytes(pickle.dumps(value))
    dist.barrier()
    return pickle.loads(path.read_bytes()) if value is None else value


def agree(digest: str) -> str:
    """Check that all machines prepared the same inputs; returns a name for this launch, equal in every rank."""
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, (digest, uuid.uuid4().hex))
    if differing := [rank for rank, (view, _) in enumerate(views) if view != views[0][0]]:
        raise infrastructure_error(
            f"ranks {differing} prepared other rows, another plan or another checkpoint than rank 0",
            "the data set or the checkpoints changed while the machines read them; dropforge tries the run again",
        )
    return str(views[0][1])


def use_wrap_classes(trainer: Any, model: Any) -> list[str]:
    """Shard layer by layer: by the classes in the model's `_no_split_modules` that its language layers really have.

    accelerate uses the model's list unchanged, and fails for a class that this checkpoint does not use. Layers of a
    vision tower do not run on text.
    """
    present = {type(module).__name__ for module in model.get_decoder().modules()}
    named = set(getattr(model, "_no_split_modules", None) or ())
    if not present & named:
        raise config_error(
            f"{type(model).__name__} names {sorted(named)} as its layers (_no_split_modules) and has none of them; "
            "it cannot be sharded layer by layer",
            "set DROPFORGE_NUM_PROCESSES to 1, or use another model",
        )
    classes = sorted(present & named)
    trainer.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = classes
    return classes


def save_full_state(model: Any, directory: Path) -> None:
    """Gather the trained adapter or model; rank 0 writes it in the layout that `from_pretrained` reads."""
    from peft import PeftModel

    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=isinstance(model, PeftModel)
    )
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=state)


def wait_for_all() -> None:
    dist.barrier()


def leave() -> None:
    """Leave the process group: transformers loads a model in another way where a group exists."""
    dist.destroy_process_group()
