"""From exported files to the run's model: model card, upload, and the manifest last."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dropforge.base.changes import evolve
from dropforge.base.errors import Conflict
from dropforge.base.log import log
from dropforge.base.redact import cut
from dropforge.run import artifacts
from dropforge.run.artifacts import MAX_FIELD, MAX_FIELDS, Manifest, Source
from dropforge.run.events import dumps
from dropforge.spec import JobSpec

from .host import THIS_MACHINE, Host
from .job import Job

MODEL, BASE = "model", "base"  # what a server loads: a model of its own, or a base for many adapters
DROPFORGE = "[dropforge](https://dropforge.dev)"

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Provenance:
    """Where the base model and the data came from, and the fields of the data that the training did not use.

    `template_date` is the date that the chat template always shows, where the base model's shows today's.
    """

    base: Source
    dataset: Source
    unused_fields: tuple[str, ...] = ()
    template_date: date | None = None


@dataclass(frozen=True)
class Description:
    """A training method's words on the model card. `introduction` says what the model is and how to ask it."""

    method: str
    introduction: str


def describe_fine_tuning(spec: JobSpec) -> Description:
    """The words for a model that was fine-tuned to answer prompts."""
    adapter, columns = spec.training.adapter, getattr(spec.dataset, "columns", None)
    tuning = "full fine-tuning" if adapter.type == "none" else f"{adapter.type}, r {adapter.r}, alpha {adapter.alpha}"
    introduction = f"""Fine-tuned by {DROPFORGE}. Use chat completions: the chat template is part of the model, and
training used it. Ask with

```text
{columns.prompt if columns else "the prompts of the data set"}
```"""
    return Description(f"{tuning}; completion-only loss", introduction)


def write_card(
    directory: Path, spec: JobSpec, description: Description, provenance: Provenance, metrics: Metrics
) -> None:
    """Write README.md, the model card."""
    rows = "\n".join(f"| {name} | {_number(value)} |" for name, value in metrics.items())
    shown = provenance.template_date
    told = f"always {shown}; the base model's template shows today's date"
    dated = f"| date in the chat template | {told} |\n" if shown else ""
    card = f"""---
base_model: {json.dumps(provenance.base.uri)}
library_name: transformers
pipeline_tag: text-generation
tags: [dropforge, {spec.training.method}]
---
# {spec.name}

{description.introduction}

| | |
|---|---|
| base model | `{provenance.base.uri}` at `{provenance.base.revision}` |
| data set | `{provenance.dataset.uri}` at `{provenance.dataset.revision}` |
| method | {description.method} |
{dated}| licence | that of the base model and of the data |

| metric | value |
|---|---|
{rows}

The job spec:

```json
{json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2)}
```
"""
    (directory / "README.md").write_text(card, encoding="utf-8")


def publish(
    client: Any,
    job: Job,
    directory: Path,
    spec: JobSpec,
    provenance: Provenance,
    metrics: Metrics,
    packages: Sequence[str],
    host: Host = THIS_MACHINE,
) -> Manifest:
    """Upload `directory` below the attempt's own prefix and commit it, with the versions of `packages`.

    Returns the run's manifest: another attempt's if that attempt committed first.
    """
    if odd := [name for name, value in metrics.items() if value is not None and not math.isfinite(value)]:
        names = ", ".join(odd)
        log(f"not finite, and null in the manifest: {names}", stage="train", run=job.run, severity="WARNING")
    prefix = artifacts.attempt_directory(job.attempt)
    uri = f"{artifacts.model_uri(job.bucket, job.run)}/{prefix}"
    files = artifacts.upload_directory(client, directory, uri, host.threads)
    manifest = Manifest(
        run=job.run,
        attempt=job.attempt,
        created=host.clock.now(),
        spec_sha256=spec_digest(spec),
        base=provenance.base,
        dataset=provenance.dataset,
        serve_path=f"{prefix}/{MODEL if (directory / MODEL).is_dir() else BASE}",
        adapter_path=f"{prefix}/adapter" if (directory / "adapter").is_dir() else None,
        metrics=metrics,
        files=[evolve(file, path=f"{prefix}/{file.path}") for file in files],
        versions={name: version(name) for name in packages},
        unused_fields=[cut(name, MAX_FIELD) for name in provenance.unused_fields[:MAX_FIELDS]],
        template_date=provenance.template_date,
    )
    _delete_unlisted(client, job, manifest, f"{artifacts.model_prefix(job.run)}{prefix}/")
    try:
        return artifacts.write_manifest(client, job.bucket, manifest, job.key)
    except Conflict as error:
        log(f"{error}; this attempt's model is dropped", stage="train", run=job.run, severity="WARNING")
    return _committed_elsewhere(client, job, prefix)


def _delete_unlisted(client: Any, job: Job, manifest: Manifest, prefix: str) -> None:
    """Delete what this attempt's directory has besides the model, such as the files of an export that was killed.

    A server refuses a directory with other files than the manifest's (`artifacts.verify_manifest`).
    """
    listed = {artifacts.model_prefix(job.run) + file.path for file in manifest.files}
    blobs = client.list_blobs(job.bucket, prefix=prefix)
    artifacts.delete_blobs(blob for blob in blobs if blob.name not in listed)


def _committed_elsewhere(client: Any, job: Job, prefix: str) -> Manifest:
    """The manifest that is committed; this attempt's files are deleted unless the manifest is its own."""
    committed = artifacts.read_manifest(client, job.bucket, job.run, job.key)
    assert committed is not None, "a manifest is never deleted"
    if committed.attempt != job.attempt:
        stale = list(client.list_blobs(job.bucket, prefix=f"{artifacts.model_prefix(job.run)}{prefix}/"))
        artifacts.delete_blobs(stale)
    return committed


def spec_digest(spec: JobSpec) -> str:
    """The same for two spellings of the same spec."""
    return hashlib.sha256(dumps(spec.model_dump(mode="json", by_alias=True))).hexdigest()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
