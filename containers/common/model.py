"""The base model: its files on disk, and their exact source."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from dropforge.base.errors import ErrorClass
from dropforge.base.names import parse_gs_uri
from dropforge.platforms.images import unserved_model
from dropforge.run import artifacts
from dropforge.run.artifacts import Source
from dropforge.spec import JobSpec

from .errors import BAD_CONFIG, JobError, missing


def fetch_config(spec: JobSpec, client: Any, directory: Path) -> Path:
    """Download the base model's config.json alone. Raises JobError if a bucket has none."""
    source = spec.model.source
    if source.startswith("gs://"):
        bucket, prefix = parse_gs_uri(source)
        blob = client.bucket(bucket).blob(f"{prefix.rstrip('/')}/config.json")
        if not blob.exists():
            raise _no_config(source)
        directory.mkdir(parents=True, exist_ok=True)
        blob.download_to_filename(str(directory / "config.json"))
        return directory / "config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source, "config.json", revision=spec.model.revision))


def fetch_model(spec: JobSpec, client: Any, directory: Path, *, weights: bool = True) -> tuple[str, Source]:
    """Download the base model; returns its directory and source. Without `weights`, the Hub's weights stay there."""
    source = spec.model.source
    if source.startswith("gs://"):
        artifacts.download_prefix(client, source, directory)
        if not (directory / "config.json").is_file():
            raise _no_config(source)
        check_servable(spec, directory)
        return str(directory), Source(uri=source, revision=artifacts.prefix_revision(client, source))
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", *(["*.safetensors"] if weights else [])]
    copies = ["original/*", "consolidated*"]  # the same weights once more, in another layout
    path = snapshot_download(source, revision=spec.model.revision, allow_patterns=files, ignore_patterns=copies)
    check_servable(spec, Path(path))
    return path, Source(uri=source, revision=Path(path).name)  # the snapshot's directory is named by its commit


def base_day(client: Any, source: Source) -> date:
    """The day (UTC) on which the base model got its files: the same for all runs with this source."""
    if source.uri.startswith("gs://"):
        bucket, prefix = parse_gs_uri(source.uri)
        newest: date = max(blob.updated for blob in client.list_blobs(bucket, prefix=f"{prefix.rstrip('/')}/")).date()
        return newest
    from huggingface_hub import list_repo_commits

    committed: date = list_repo_commits(source.uri, revision=source.revision)[0].created_at.date()
    return committed


def check_servable(spec: JobSpec, directory: Path) -> None:
    """Raise JobError before the training is paid for, if the spec wants an endpoint that cannot serve the model."""
    kind = json.loads((directory / "config.json").read_text()).get("model_type", "")
    if problem := unserved_model(spec, kind):
        hint = "set serve to null, or build serve_vllm on a newer vLLM and change UNSERVED in platforms/images.py"
        raise JobError(ErrorClass.CONFIG, BAD_CONFIG, problem, hint)


def _no_config(source: str) -> JobError:
    hint = "give the prefix that holds the files of save_pretrained"
    return missing(f"model.source {source!r} has no config.json", hint)
