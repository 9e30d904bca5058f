"""Converts a checkpoint of one process to a checkpoint of ranks, and back. Imports torch.

Ranks can read the shards of any other number of ranks (torch.distributed.checkpoint). The two kinds of checkpoints
differ in their files, and in the optimiser's key of a parameter: ranks use its name, one process uses its index.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

ADAPTER, MODEL, OPTIMIZER = "adapter_model.safetensors", "model.safetensors", "optimizer.pt"
SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # accelerate's names


def fit(checkpoint: Path, trainer: Any, *, sharded: bool) -> None:
    """Convert `checkpoint` in place so that this trainer resumes it. Neither kind contains frozen parameters."""
    has_shards = (checkpoint / SHARDED_OPTIMIZER).is_dir()
    if sharded and not has_shards:
        _to_shards(checkpoint, trainer)
    elif has_shards and not sharded:
        _to_one_process(checkpoint, adapter=hasattr(trainer.model, "peft_config"))


def _to_one_process(checkpoint: Path, *, adapter: bool) -> None:
    model = read_shards(checkpoint / SHARDED_MODEL)["model"]
    save_file(
        {name: tensor.contiguous() for name, tensor in model.items()}, checkpoint / (ADAPTER if adapter else MODEL)
    )
    optimizer = read_shards(checkpoint / SHARDED_OPTIMIZER)["optimizer"]
    order = [name for group in optimizer["param_groups"] for name in group["params"]]
    indices = {name: index for index, name in enumerate(order)}
    torch.save(_renamed(optimizer, indices), checkpoint / OPTIMIZER)
    # The trainer recognises a checkpoint of ranks by these directories.
    shutil.rmtree(checkpoint / SHARDED_MODEL)
    shutil.rmtree(checkpoint / SHARDED_OPTIMIZER)


def _to_shards(checkpoint: Path, trainer: Any) -> None:
    model = trainer.model
    if hasattr(model, "peft_config"):
        state = load_file(checkpoint / ADAPTER)
    else:  # load the whole model: the file has tied weights only once
        state = type(model).from_pretrained(checkpoint, dtype="auto").state_dict()
    _write_shards({"model": state}, checkpoint / SHARDED_MODEL)
    optimizer = torch.load(checkpoint / OPTIMIZER, weights_only=True)
    names = dict(enumerate(optimizer_order(trainer)))
    _write_shards({"optimizer": _renamed(optimizer, names)}, checkpoint / SHARDED_OPTIMIZER)


def optimizer_order(trainer: Any) -> list[str]:
    """The trained parameters in the optimiser's order: parameters with weight decay first."""
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    return sorted(trained, key=lambda name: name not in decaying)


def _renamed(optimizer: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [names[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {names[name]: state for name, state in optimizer["state"].items()}, "param_groups": groups}


def read_shards(directory: Path) -> dict[str, Any]:
    """The whole state of the shards below `directory`, on the CPU."""
    whole = directory.with_suffix(".whole")
    dcp_to_torch_save(directory, whole)
    state = torch.load(whole, weights_only=True)
    whole.unlink()
    return dict(state)


def _write_shards(state: dict[str, Any], directory: Path) -> None:
    whole = directory.with_suffix(".whole")
    torch.save(state, whole)
    torch_save_to_dcp(whole, directory)
    whole.unlink()
