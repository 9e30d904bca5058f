"""From a finished checkpoint to a model that a server loads: merge, save, reload, compare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from containers.common.chat import encode_prompt, stop_ids
from containers.common.errors import code_error
from containers.common.rows import Row
from dropforge.spec import JobSpec

from .plan import dtype_of, host_memory

SHARD_SIZE = "4GB"  # the server streams several shards at once
PARITY_ROWS = 3
PARITY_TOLERANCE = 1e-3  # of logits, between the saved model and the loaded one


def merged_model(base: str, checkpoint: Path, spec: JobSpec) -> Any:
    """The whole trained model: the checkpoint itself, or its adapter merged into the unquantised base.

    Merges in 32 bits if the memory is large enough, and rounds to the base's precision once. Merging in 16 bits, or
    into 4-bit weights, rounds twice.
    """
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    remote = spec.model.trust_remote_code
    dtype = AutoConfig.from_pretrained(base, trust_remote_code=remote).dtype or dtype_of("float32")
    if spec.training.adapter.type == "none":
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, trust_remote_code=remote)
        return model.eval()
    size = sum(path.stat().st_size for path in Path(base).glob("*.safetensors"))
    fits = size * (4 / dtype.itemsize) * 1.2 < host_memory()
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype_of("float32") if fits else dtype, trust_remote_code=remote
    )
    merged = PeftModel.from_pretrained(model, checkpoint).merge_and_unload(safe_merge=True)
    return merged.to(dtype).eval()


def save(model: Any, tokenizer: Any, checkpoint: Path, directory: Path, spec: JobSpec) -> None:
    """Write model/ and, for LoRA, adapter/ below `directory`."""
    model.generation_config.eos_token_id = stop_ids(tokenizer, model.generation_config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = True
    model.save_pretrained(directory / "model", max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(directory / "model")
    if spec.training.adapter.type != "none":
        _save_adapter(checkpoint, directory / "adapter", spec)


def reload(directory: Path, device_map: Any, spec: JobSpec) -> Any:
    """The saved model, loaded as a server loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory / "model",
        dtype="auto",
        device_map=device_map,
        trust_remote_code=spec.model.trust_remote_code,
    )
    return model.eval()


def check_parity(saved: Any, loaded: Any, tokenizer: Any, rows: list[Row]) -> None:
    """Raise JobError unless the loaded model computes the saved model's logits."""
    import torch

    for row in rows[:PARITY_ROWS]:
        ids = encode_prompt(tokenizer, row.prompt) if row.messages else tokenizer(row.text)["input_ids"]
        with torch.inference_mode():
            expected, actual = (
                model(input_ids=torch.tensor([ids], device=model.device)).logits.float().cpu()
                for model in (saved, loaded)
            )
        difference = float((expected - actual).abs().max())
        # Devices round 16-bit logits differently; the answers must not differ.
        allowed = PARITY_TOLERANCE if loaded.dtype == torch.float32 else 0.25
        if not difference <= allowed:
            raise code_error(
                f"the exported model differs from the trained one: logits by {difference:.2g}; expected {allowed:g}",
                "nothing was published; the export has a bug",
            )


def _save_adapter(checkpoint: Path, directory: Path, spec: JobSpec) -> None:
    directory.mkdir()
    shutil.copy(checkpoint / "adapter_model.safetensors", directory)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = spec.model.source  # not the download directory
    config["revision"] = None if spec.model.source.startswith("gs://") else spec.model.revision
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
