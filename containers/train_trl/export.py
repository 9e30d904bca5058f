"""From a finished checkpoint to committed artifacts: merge, save, check what was saved, upload, manifest last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from chat import encode_prompt, stop_ids
from job import INTERNAL, Job, JobError
from plan import dtype_of, host_memory
from rows import Row

from dropforge.base.errors import Conflict, ErrorClass
from dropforge.base.log import log
from dropforge.run import artifacts
from dropforge.run.artifacts import Manifest, Source
from dropforge.run.events import dumps
from dropforge.spec import JobSpec, SyntheticDataset

SHARD_SIZE = "4GB"  # streamed by the server, several at once
PARITY_ROWS = 3
PARITY_TOLERANCE = 1e-3  # of logits, between the model that was saved and the one that loads again
DROPFORGE = "[dropforge](https://dropforge.dev)"
PRETRAINING = "pre-training from random weights; loss on every token"
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")


@dataclass(frozen=True)
class Provenance:
    """Where the base model and the data came from."""

    base: Source
    dataset: Source


def merged_model(base: str, checkpoint: Path, spec: JobSpec) -> Any:
    """The trained model in full: the checkpoint itself, or its adapter merged into the unquantised base.

    Merged in 32 bits where the memory is there, and rounded to the base's precision once: merging in 16 bits, or into
    4-bit weights, rounds twice.
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
    """The model as a server will load it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory / "model",
        dtype="auto",
        device_map=device_map,
        trust_remote_code=spec.model.trust_remote_code,
    )
    return model.eval()


def check_parity(saved: Any, loaded: Any, tokenizer: Any, rows: list[Row]) -> None:
    """Raise JobError unless the loaded model computes what the saved one did."""
    import torch

    for row in rows[:PARITY_ROWS]:
        ids = encode_prompt(tokenizer, row.prompt) if row.messages else tokenizer(row.text)["input_ids"]
        with torch.inference_mode():
            expected, found = (
                model(input_ids=torch.tensor([ids], device=model.device)).logits.float().cpu()
                for model in (saved, loaded)
            )
        difference = float((expected - found).abs().max())
        # 16-bit logits differ by a rounding between devices; the answers may not.
        allowed = PARITY_TOLERANCE if loaded.dtype == torch.float32 else 0.25
        if not difference <= allowed:
            raise JobError(
                ErrorClass.CODE,
                INTERNAL,
                f"the exported model differs from the trained one: logits by {difference:.2g}; expected {allowed:g}",
                "nothing was published; this is a bug of the export",
            )


def write_card(directory: Path, spec: JobSpec, provenance: Provenance, metrics: dict[str, float | None]) -> None:
    """README.md: the model card, with how to ask the model what it was trained to answer."""
    rows = "\n".join(f"| {name} | {_number(value)} |" for name, value in metrics.items())
    adapter = spec.training.adapter
    tuning = "full fine-tuning" if adapter.type == "none" else f"{adapter.type}, r {adapter.r}, alpha {adapter.alpha}"
    method = PRETRAINING if spec.training.method == "pretrain" else f"{tuning}; completion-only loss"
    card = f"""---
base_model: {json.dumps(provenance.base.uri)}
library_name: transformers
pipeline_tag: text-generation
tags: [dropforge, {spec.training.method}]
---
# {spec.name}

{_introduction(spec)}

| | |
|---|---|
| base model | `{provenance.base.uri}` at `{provenance.base.revision}` |
| data set | `{provenance.dataset.uri}` at `{provenance.dataset.revision}` |
| method | {method} |
| licence | that of the base model and of the data |

| metric | value |
|---|---|
{rows}

The job spec:

```json
{json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2)}
```
"""
    (directory / "README.md").write_text(card, encoding="utf-8")


def _introduction(spec: JobSpec) -> str:
    """What the model is, and how to ask it."""
    if isinstance(spec.dataset, SyntheticDataset):
        return f"""Pre-trained by {DROPFORGE} on random tokens, with shapes and tokenizer of another model. It shows
that the machines train, and has learnt nothing that one could ask for."""
    ask = spec.dataset.columns.prompt if spec.dataset.columns else "the prompts of the data set"
    return f"""Fine-tuned by {DROPFORGE}. Use chat completions: the chat template is part of the model, and
is what it was trained with. Ask with

```text
{ask}
```"""


def publish(
    client: Any,
    job: Job,
    directory: Path,
    spec: JobSpec,
    provenance: Provenance,
    metrics: dict[str, float | None],
    packages: Sequence[str] = VERSIONS,
) -> Manifest:
    """Upload below the attempt's own prefix and commit, with the versions of `packages`.

    Another attempt's commit, if it was first, is the result.
    """
    prefix = artifacts.attempt_directory(job.attempt)
    files = artifacts.upload_directory(client, directory, f"{artifacts.model_uri(job.bucket, job.run)}/{prefix}")
    manifest = Manifest(
        run=job.run,
        attempt=job.attempt,
        created=datetime.now(UTC),
        spec_sha256=spec_digest(spec),
        base=provenance.base,
        dataset=provenance.dataset,
        serve_path=f"{prefix}/model",
        adapter_path=f"{prefix}/adapter" if (directory / "adapter").is_dir() else None,
        metrics=metrics,
        files=[file.model_copy(update={"path": f"{prefix}/{file.path}"}) for file in files],
        versions={name: version(name) for name in packages},
    )
    try:
        return artifacts.write_manifest(client, job.bucket, manifest)
    except Conflict as error:
        log(f"{error}; this attempt's model is dropped", stage="train", run=job.run, severity="WARNING")
    committed = artifacts.read_manifest(client, job.bucket, job.run)
    assert committed is not None, "a manifest is never deleted"
    if committed.attempt != job.attempt:
        stale = list(client.list_blobs(job.bucket, prefix=f"{artifacts.model_prefix(job.run)}{prefix}/"))
        artifacts.delete_blobs(stale)
    return committed


def spec_digest(spec: JobSpec) -> str:
    """The same for two spellings of one spec."""
    return hashlib.sha256(dumps(spec.model_dump(mode="json", by_alias=True))).hexdigest()


def _save_adapter(checkpoint: Path, directory: Path, spec: JobSpec) -> None:
    directory.mkdir()
    shutil.copy(checkpoint / "adapter_model.safetensors", directory)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = spec.model.source  # not the directory it was downloaded to
    config["revision"] = None if spec.model.source.startswith("gs://") else spec.model.revision
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
