"""Checkpoints in the bucket: uploaded during training, complete with their marker, resumed from the newest."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from dropforge.base.errors import NotFound
from dropforge.base.log import log
from dropforge.base.threads import Thread
from dropforge.run import artifacts
from dropforge.run.artifacts import ArtifactFile, Checkpoint
from dropforge.run.proof import is_document_proved, with_proof

from .host import THIS_MACHINE, Host
from .job import Job
from .report import Reporter

KEEP = 2
NOTES = "dropforge.json"  # beside the trainer's own files, for a later attempt
# With several machines, each uploads its own ranks' shards, then their list. The first machine commits all lists.
PART = "_PART-"
PART_POLL_SECONDS = 0.2
PART_SECONDS = 600.0


class CheckpointStore:
    """The checkpoints of one run. A thread uploads them one at a time; a failed upload loses only its checkpoint."""

    def __init__(self, client: Any, job: Job, reporter: Reporter, host: Host = THIS_MACHINE) -> None:
        self._client = client
        self._job = job
        self._reporter = reporter
        self._clock, self._threads = host
        self._upload: Thread | None = None
        self.saved_step = 0
        self.launch = ""  # the same in all ranks; tells this launch's parts from those of a killed launch

    def resume(self, directory: Path) -> Path | None:
        """Download the newest complete checkpoint; returns its directory, or None to start from the beginning."""
        for checkpoint in artifacts.checkpoints(self._client, self._job.bucket, self._job.run, self._job.key):
            local = directory / f"checkpoint-{checkpoint.step}"
            if self._fetch(checkpoint, local):
                self.saved_step = checkpoint.step
                return local
        return None

    def save(self, step: int, local: Path, notes: dict[str, Any]) -> None:
        """Start to upload the trainer's checkpoint in `local`; waits for the previous upload first."""
        if self._job.world.machine == 0:
            (local / NOTES).write_text(json.dumps(notes))
        self.wait()
        self._upload = self._threads.start("checkpoint", partial(self._try_to_save, step, local))

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the current upload has succeeded or failed, or for `timeout` seconds."""
        if self._upload is None:
            return
        self._upload.join(timeout)
        if self._upload.is_alive():
            log("a checkpoint's upload takes too long", stage="train", run=self._job.run, severity="WARNING")

    def _try_to_save(self, step: int, local: Path) -> None:
        try:
            self._save(step, local)
        except Exception as error:  # noqa: BLE001  (training continues; the previous checkpoint is still there)
            log(f"a checkpoint was not uploaded: {error!r}", stage="train", run=self._job.run, severity="WARNING")

    def _save(self, step: int, local: Path) -> None:
        world, bucket, run = self._job.world, self._job.bucket, self._job.run
        uri = f"gs://{bucket}/{artifacts.checkpoint_prefix(run, step)}"
        files = artifacts.upload_directory(self._client, local, uri, self._threads)
        if world.machine > 0:
            self._hand_in(step, files)
            shutil.rmtree(local)  # this machine does not read it again
            return
        for machine in range(1, world.machines):
            files += self._wait_for_part(step, machine)
        checkpoint = artifacts.complete_checkpoint(self._client, bucket, run, step, files, {}, self._job.key)
        self.saved_step = step
        self._reporter.checkpointed(step, checkpoint.uri)
        artifacts.prune_checkpoints(self._client, bucket, run, KEEP, self._job.key)

    def _hand_in(self, step: int, files: list[ArtifactFile]) -> None:
        part = self._part(step, self._job.world.machine)
        listing = {"files": [file.model_dump() for file in files]}
        part.upload_from_string(with_proof(self._job.key, part.name, listing), "application/json")

    def _wait_for_part(self, step: int, machine: int) -> list[ArtifactFile]:
        part, deadline = self._part(step, machine), self._clock.monotonic() + PART_SECONDS
        while (data := self._proved(part)) is None:
            if self._clock.monotonic() > deadline:
                raise TimeoutError(f"machine {machine} did not upload its shards of step {step} in {PART_SECONDS} s")
            self._clock.sleep(PART_POLL_SECONDS)
        return [ArtifactFile.model_validate(file) for file in json.loads(data)["files"]]

    def _proved(self, part: Any) -> bytes | None:
        """The list of a machine; None before, and for a list that another run's container wrote."""
        data = part.download_as_bytes() if part.exists() else None
        return data if data is not None and is_document_proved(self._job.key, part.name, data) else None

    def _part(self, step: int, machine: int) -> Any:
        prefix = artifacts.checkpoint_prefix(self._job.run, step)
        return self._client.bucket(self._job.bucket).blob(f"{prefix}{PART}{self.launch}-{machine}")

    def _fetch(self, checkpoint: Checkpoint, local: Path) -> bool:
        """Download the files that the marker lists. Others may be of an earlier, incomplete upload by other ranks."""
        try:
            artifacts.download_files(self._client, checkpoint.uri, local, checkpoint.files, self._threads)
        except NotFound as error:
            message = f"{checkpoint.uri} differs from its marker: {error}"
            log(message, stage="train", run=self._job.run, severity="WARNING")
            return False
        return True
