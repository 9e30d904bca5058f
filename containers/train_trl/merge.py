"""Writes the trained weights as a server reads them, tensor by tensor. Imports torch.

Memory holds a few tensors at once, never a model: a machine that trained a model in 4 bits may have no room for the
same model in 16. The files keep the base's names and layout, so that whatever loads the base loads the result.
The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from containers.common.errors import DIVERGED, code_error, config_error

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # bytes of an element; others have 1
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Pair(NamedTuple):
    """The two matrices of an adapted module, in 32 bits; the module's change is `scale` * (b @ a)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> list[int]:
        """That of the module's weight."""
        shape = [self.b.shape[0], self.a.shape[1]]
        return shape[::-1] if self.transposed else shape

    def change(self) -> torch.Tensor:
        change = (self.b @ self.a).mul_(self.scale)
        return change.T if self.transposed else change


def merge_adapter(base: Path, checkpoint: Path, directory: Path) -> None:
    """Write the base's weights with the checkpoint's adapter merged into them.

    Each weight is computed in 32 bits and rounded once, to the base's precision, as PEFT does with a base in 32 bits.
    Raises JobError for a module that the base's files lack, and for numbers that are not finite.
    """
    pairs = _read_adapter(checkpoint)
    modules = _by_file_name(pairs)
    unmerged = set(pairs)
    for path in weight_files(base):
        with safe_open(path, "pt") as file:

            def load(name: str, file: Any = file) -> torch.Tensor:
                tensor: torch.Tensor = file.get_tensor(name)
                module = modules.get(file_name(name))
                if module is None or not name.endswith(".weight"):
                    return tensor
                unmerged.discard(module)
                return _sum(name, tensor, pairs[module].change())

            entries = [(name, _dtype(file, name), _shape(file, name)) for name in file.keys()]  # noqa: SIM118
            _write(directory / path.name, entries, load)
    if unmerged:
        raise code_error(
            f"the base's files have no weights for {sorted(unmerged)[:3]}, which the adapter changes",
            "nothing was published; the check before the training should have refused the run",
        )
    _copy_index(base, directory)


def copy_weights(base: Path, directory: Path) -> None:
    """Copy the base's weights as they are: a server adds the adapter, while it computes."""
    for path in weight_files(base):
        shutil.copy(path, directory / path.name)
    _copy_index(base, directory)


def cast(checkpoint: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write a fully trained checkpoint's weights in the base's precision.

    Raises JobError for numbers that are not finite.
    """
    kind = next(name for name, known in FLOATS.items() if known == dtype)
    for path in weight_files(checkpoint):
        with safe_open(path, "pt") as file:
            entries = [
                (name, kind if _dtype(file, name) in FLOATS else _dtype(file, name), _shape(file, name))
                for name in file.keys()  # noqa: SIM118
            ]
            kinds = {name: kind for name, kind, _ in entries}

            def load(name: str, file: Any = file, kinds: dict[str, str] = kinds) -> torch.Tensor:
                tensor: torch.Tensor = file.get_tensor(name)
                return _finite(name, tensor.to(FLOATS[kinds[name]])) if kinds[name] in FLOATS else tensor

            _write(directory / path.name, entries, load)
    _copy_index(checkpoint, directory)


def copy_adapter(checkpoint: Path, directory: Path) -> None:
    """Copy the adapter's weights as they are. Raises JobError for numbers that are not finite."""
    with safe_open(checkpoint / ADAPTER, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            _finite(name, file.get_tensor(name))
    shutil.copy(checkpoint / ADAPTER, directory)


def check_adapter(base: Path, parameters: Iterable[str]) -> None:
    """Refuse, before the training, an adapter that cannot be merged. Raises JobError.

    `parameters` are the names of the trained parameters.
    """
    kinds: dict[str, str] = {}
    for path in weight_files(base):
        with safe_open(path, "pt") as file:
            kinds |= {file_name(name): _dtype(file, name) for name in file.keys()}  # noqa: SIM118
    for parameter in parameters:
        module, _, part = parameter.removeprefix("base_model.model.").partition(".lora_")
        kind = kinds.get(file_name(f"{module}.weight"))
        if part[:2] not in ("A.", "B.") or kind is None:
            raise config_error(
                f"training.adapter.target_modules includes {module!r}; the model's files have no weights for an "
                "adapter there (an embedding, or an output layer that shares the embedding's weights)",
                "name linear layers, or use 'all-linear'",
            )
        if kind not in FLOATS:
            raise config_error(
                f"the weights of {module!r} have the type {kind}; expected {', '.join(FLOATS)}: an adapter cannot be "
                "merged into quantised weights",
                "name the unquantised model in model.source; an adapter of type qlora quantises it for the training",
            )


def check_zero(base: Path, checkpoint: Path) -> None:
    """Check, before the training, that an adapter of zeros fits the base's weights and changes none of them.

    Compares the shapes of all weights, and the numbers of the smallest. Raises JobError.
    """
    pairs = _read_adapter(checkpoint)
    modules = _by_file_name(pairs)
    fitting: dict[str, tuple[int, Path, str]] = {}
    for path in weight_files(base):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                module = modules.get(file_name(name)) if name.endswith(".weight") else None
                if module is not None and _shape(file, name) == pairs[module].shape:
                    fitting[module] = math.prod(pairs[module].shape), path, name
    if missing := sorted(set(pairs) - set(fitting)):
        raise config_error(
            f"the model's files have no weights of the shape {pairs[missing[0]].shape} for {missing[0]!r}, "
            "which training.adapter would train",
            "nothing was trained; the files belong to another model than config.json, or are packed or quantised",
        )
    module = min(fitting, key=lambda name: fitting[name][0])
    _, path, name = fitting[module]
    with safe_open(path, "pt") as file:
        weight = file.get_tensor(name)
    if not _sum(name, weight, pairs[module].change()).equal(weight):
        raise code_error(f"an adapter of zeros changes {name}", "nothing was trained; the merge has a bug")


def weight_files(directory: Path) -> list[Path]:
    """The files of a saved model's weights. Raises JobError if the model has none in the safetensors format."""
    if (directory / INDEX).is_file():
        names = json.loads((directory / INDEX).read_text())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    raise config_error(
        "model.source has no weights in the safetensors format; expected model.safetensors or its index",
        "save the model with save_pretrained of transformers 5, and name that directory",
    )


def _read_adapter(checkpoint: Path) -> dict[str, Pair]:
    """The adapter's matrices by the name of their module in the model's class."""
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    rank = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    scale, transposed = config["lora_alpha"] / rank, bool(config["fan_in_fan_out"])
    parts: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(checkpoint / ADAPTER, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            parts.setdefault(module, {})[part[0]] = file.get_tensor(name).float()
    return {module: Pair(both["A"], both["B"], scale, transposed) for module, both in parts.items()}


def _by_file_name(modules: Iterable[str]) -> dict[str, str]:
    return {file_name(f"{module}.weight"): module for module in modules}


def file_name(name: str) -> str:
    """A weight's name without the parts in which a class and its files differ.

    Gemma 3's class has model.language_model.layers where its files have language_model.model.layers.
    """
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def _sum(name: str, weight: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return _finite(name, weight.float().add_(change).to(weight.dtype))


def _finite(name: str, trained: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(trained).all():
        raise code_error(f"{name} has numbers that are not finite after the training; nothing was published", DIVERGED)
    return trained


def _write(path: Path, entries: list[tuple[str, str, list[int]]], load: Callable[[str], torch.Tensor]) -> None:
    """Write a file with these tensors (name, type, shape); `load` returns one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, kind, shape in entries:
        end = offset + math.prod(shape) * SIZES.get(kind, 1)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _, _ in entries:
            file.write(load(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _copy_index(source: Path, directory: Path) -> None:
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        index["metadata"] = {"total_size": sum(path.stat().st_size for path in directory.glob("*.safetensors"))}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def _dtype(file: Any, name: str) -> str:
    return str(file.get_slice(name).get_dtype())


def _shape(file: Any, name: str) -> list[int]:
    return list(file.get_slice(name).get_shape())
