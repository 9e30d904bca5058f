"""The checkpoints of a run on a Ray cluster: all hosts write them to the bucket together, with Orbax.

checkpoints/<run>/maxtext/imported/…                  the base model's weights, if training starts with them
checkpoints/<run>/maxtext/run/checkpoints/<step>/…    a checkpoint; commit_success.txt marks it as complete
checkpoints/<run>/maxtext/notes/<step>.json           the notes for an attempt that resumes at the step

The hosts cannot prove each file that Orbax writes. So the driver's notes, which carry the run's proof, list the objects
of the checkpoint with their generations. A later attempt resumes only a checkpoint that still has these objects.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from containers.common.job import Job
from dropforge.base.log import log
from dropforge.base.names import parse_gs_uri
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import checkpoint_prefix, delete_blobs, download_prefix
from dropforge.run.proof import is_document_proved, with_proof

PREFIX = "maxtext"
COMPLETE = "commit_success.txt"  # Orbax writes it last, where directories cannot be renamed
KEEP = 2
TRANSFERS = 8


@dataclass(frozen=True)
class SharedCheckpoints:
    """The objects below `root`, gs://<bucket>/checkpoints/<run>/maxtext. `client` is Cloud Storage's."""

    root: str
    client: Any
    key: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls) -> SharedCheckpoints:
        """The checkpoints of this process's job. Raises JobError."""
        job = Job.from_environment()
        return cls(f"gs://{job.bucket}/{checkpoint_prefix(job.run)}{PREFIX}", Clients().storage(), job.key)

    @property
    def imported(self) -> str:
        return f"{self.root}/imported"

    def step_uri(self, step: int | str) -> str:
        return f"{self.root}/run/checkpoints/{step}"

    def newest(self, limit: int | None = None) -> int:
        """The newest step, up to `limit`, with a complete checkpoint; 0 if there is none."""
        steps = [step for step in self._steps() if limit is None or step <= limit]
        complete = (step for step in reversed(steps) if self._blob(f"{self.step_uri(step)}/{COMPLETE}").exists())
        return next(complete, 0)

    def settle(self) -> int:
        """The newest step whose notes prove its objects; 0 if there is none. Deletes newer steps, which have no proof.

        The workers resume the newest checkpoint that they see. Without a key, every complete checkpoint counts.
        """
        if not self.key:
            return self.newest()
        for step in reversed(self._steps()):
            if self._is_proved(step):
                return step
            log(f"checkpoint {step} has no proof of its run, so it is deleted", stage="train", severity="WARNING")
            self._delete(step)
        return 0

    def prune(self, step: int) -> None:
        """Keep the newest KEEP checkpoints up to `step` and delete the older ones; Tunix keeps all."""
        older = [other for other in self._steps() if other < step]
        for stale in older[: len(older) - KEEP + 1]:
            self._delete(stale)

    def write_notes(self, step: int, notes: dict[str, Any]) -> None:
        """Write the notes of a step, and prove the objects that its checkpoint has now."""
        blob, document = self._notes(step), {"notes": notes, "objects": self._objects(step)}
        blob.upload_from_string(with_proof(self.key, blob.name, document), "application/json")

    def read_notes(self, step: int) -> dict[str, Any]:
        """The notes of a step; {} if the attempt ended before it wrote them."""
        return dict(self._read_notes(step).get("notes", {}))

    def _read_notes(self, step: int) -> dict[str, Any]:
        """The notes of a step with the objects; {} if there are none, or if they have no proof."""
        blob = self._notes(step)
        data = blob.download_as_bytes() if blob.exists() else b"{}"
        return dict(json.loads(data)) if is_document_proved(self.key, blob.name, data) else {}

    def _is_proved(self, step: int) -> bool:
        return self._read_notes(step).get("objects") == self._objects(step)

    def _objects(self, step: int) -> dict[str, int]:
        """The generation of each object of a checkpoint, by name."""
        bucket, prefix = parse_gs_uri(f"{self.step_uri(step)}/")
        return {blob.name: int(blob.generation) for blob in self.client.list_blobs(bucket, prefix=prefix)}

    def _delete(self, step: int) -> None:
        bucket, prefix = parse_gs_uri(f"{self.step_uri(step)}/")
        delete_blobs([*self.client.list_blobs(bucket, prefix=prefix), self._notes(step)])

    def upload_imported(self, source: Path) -> None:
        """Copy the directory of the imported weights to the bucket."""
        files = [path for path in source.rglob("*") if path.is_file()]

        def upload(path: Path) -> None:
            self._blob(f"{self.imported}/{path.relative_to(source)}").upload_from_filename(path)

        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(upload, files))
        log("uploaded the imported weights", stage="train", files=len(files), uri=self.imported)

    def download_weights(self, step: int, directory: Path) -> None:
        """Copy the weights of a checkpoint to a directory."""
        download_prefix(self.client, f"{self.step_uri(step)}/model_params", directory)

    def _steps(self) -> list[int]:
        """All steps with any object, in order."""
        bucket, prefix = parse_gs_uri(f"{self.root}/run/checkpoints/")
        blobs = self.client.list_blobs(bucket, prefix=prefix, delimiter="/")
        list(blobs)  # reads all pages, which fills `prefixes`
        names = (folder.removeprefix(prefix).rstrip("/") for folder in blobs.prefixes)
        return sorted(int(name) for name in names if name.isdecimal())

    def _notes(self, step: int) -> Any:
        return self._blob(f"{self.root}/notes/{step}.json")

    def _blob(self, uri: str) -> Any:
        bucket, name = parse_gs_uri(uri)
        return self.client.bucket(bucket).blob(name)
