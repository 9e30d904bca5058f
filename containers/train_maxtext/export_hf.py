"""The export stage: the trained weights back in Hugging Face's layout, with the base model's own configuration."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chat
from job import INTERNAL, JobError
from maxtext_settings import common, use_source_config
from stages import Result, Work, stage_main

from dropforge.base.errors import ErrorClass

Tensors = dict[str, tuple[str, list[int]]]


def run(work: Work) -> Result:
    """Write DIRECTORY/export/model, and check it against the base model's files."""
    prepared, verified = work.done("prepare"), work.done("verify")
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
    tokenizer = chat.load_tokenizer(str(base), work.spec.model.trust_remote_code)
    tokenizer.save_pretrained(directory)
    write_configs(base, directory, tokenizer)
    if expected := tensors(base):  # pre-training needs none of them; the check stage counts what a model has
        check_tensors(expected, tensors(directory), prepared["dtype"], tied=prepared["tied"])
    return {"model": str(directory)}


def write_configs(base: Path, directory: Path, tokenizer: Any) -> None:
    """The base's configuration, word for word: MaxText's is its template's. What ends an answer, as in training."""
    shutil.copy(base / "config.json", directory / "config.json")
    path = base / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    known = SimpleNamespace(eos_token_id=generation.get("eos_token_id"))
    generation |= {"eos_token_id": chat.stop_ids(tokenizer, known), "pad_token_id": tokenizer.pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))


def tensors(directory: Path) -> Tensors:
    """Type and shape of every tensor, from the headers of the files.

    Format: 8 bytes of length, little-endian, then JSON (https://github.com/huggingface/safetensors#format).
    """
    found: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        found |= {name: (of["dtype"], of["shape"]) for name, of in header.items() if name != "__metadata__"}
    return found


def check_tensors(base: Tensors, exported: Tensors, dtype: str, *, tied: bool) -> None:
    """Every tensor of the base, with its shape, and no other. Raises JobError."""
    names = base.keys() | exported.keys()
    if tied:  # to the embedding, the output layer may be saved or left out; both load
        names -= {"lm_head.weight"}
    short = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    wrong = [
        f"{name}: {exported.get(name)}, expected {(short, base[name][1]) if name in base else None}"
        for name in sorted(names)
        if name not in base or exported.get(name) != (short, base[name][1])
    ]
    if wrong:
        raise JobError(
            ErrorClass.CODE,
            INTERNAL,
            f"{len(wrong)} of {len(names)} exported tensors are not as in the base model: {'; '.join(wrong[:5])}",
            "nothing was published; this is a bug of the conversion",
        )


if __name__ == "__main__":
    sys.exit(stage_main("export", run))
