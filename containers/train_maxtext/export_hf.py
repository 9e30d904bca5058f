"""The export stage: converts the trained weights to Hugging Face's layout, with the base model's configuration."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from containers.common import chat
from containers.common.errors import code_error

from .imports import quick_imports
from .maxtext_settings import common, use_source_config
from .stages import stage_main
from .work import Result, Work

Tensors = dict[str, tuple[str, list[int]]]


def run(work: Work) -> Result:
    """Write DIRECTORY/export/model, and check its tensors against the base model's files."""
    prepared, verified = work.done("prepare"), work.done("verify")
    with quick_imports():
        from absl import flags
        from maxtext.checkpoint_conversion import to_huggingface

    base, directory = Path(prepared["base"]), work.exported / "model"
    shutil.rmtree(work.exported, ignore_errors=True)
    flags.FLAGS([sys.argv[0], f"--hf_model_path={base}"])
    use_source_config(prepared)
    to_huggingface.main(
        [
            to_huggingface.__file__,
            *common(prepared),
            f"load_parameters_path={verified['parameters']}",
            f"base_output_directory={directory}",
            f"weight_dtype={prepared['dtype']}",
            "hardware=cpu",
        ]
    )
    tokenizer = chat.load_tokenizer(str(base), work.spec.model.trust_remote_code, prepared["template"])
    tokenizer.save_pretrained(directory)
    write_configs(base, directory, tokenizer)
    if expected := tensors(base):  # pre-training downloads no weights; the check stage counts the model's tensors
        check_tensors(expected, tensors(directory), prepared["dtype"], tied=prepared["tied"])
    return {"model": str(directory)}


def write_configs(base: Path, directory: Path, tokenizer: Any) -> None:
    """Copy the base's configuration, because MaxText writes its template's. Set the end of an answer as in training."""
    shutil.copy(base / "config.json", directory / "config.json")
    path = base / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    known = SimpleNamespace(eos_token_id=generation.get("eos_token_id"))
    generation |= {"eos_token_id": chat.stop_ids(tokenizer, known), "pad_token_id": tokenizer.pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))


def tensors(directory: Path) -> Tensors:
    """The type and shape of every tensor, from the headers of the files.

    Format: 8 bytes of length, little-endian, then JSON (https://github.com/huggingface/safetensors#format).
    """
    headers: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        headers |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return headers


def check_tensors(base: Tensors, exported: Tensors, dtype: str, *, tied: bool) -> None:
    """Raise JobError unless the export has the base's tensors, with their shapes, and no others."""
    names = base.keys() | exported.keys()
    if tied:  # an output layer tied to the embedding may be saved or left out; both load
        names -= {"lm_head.weight"}
    short = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    wrong = [
        f"{name}: {exported.get(name)}, expected {(short, base[name][1]) if name in base else None}"
        for name in sorted(names)
        if name not in base or exported.get(name) != (short, base[name][1])
    ]
    if wrong:
        raise code_error(
            f"{len(wrong)} of {len(names)} exported tensors differ from the base model: {'; '.join(wrong[:5])}",
            "nothing was published; the conversion has a bug",
        )


if __name__ == "__main__":
    sys.exit(stage_main("export", run))
