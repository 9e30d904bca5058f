"""Checkpoints in the bucket: uploaded beside the training, complete with their marker, the newest one resumed."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from job import Job
from report import Reporter

from dropforge import artifacts
from dropforge.artifacts import Checkpoint
from dropforge.log import log

KEEP = 2
NOTES = "dropforge.json"  # beside the trainer's own files: what a later attempt must know


class CheckpointStore:
    """The checkpoints of one run. Uploads run one at a time, in a thread; a failed one costs only itself."""

    def __init__(self, client: Any, job: Job, reporter: Reporter) -> None:
        self._client = client
        self._job = job
        self._reporter = reporter
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._upload: Future[None] | None = None
        self.saved_step = 0

    def resume(self, directory: Path) -> Path | None:
        """Download the newest checkpoint that is whole; None to start anew."""
        for checkpoint in artifacts.checkpoints(self._client, self._job.bucket, self._job.run):
            local = directory / f"checkpoint-{checkpoint.step}"
            if self._fetch(checkpoint, local):
                self.saved_step = checkpoint.step
                return local
        return None

    def save(self, step: int, local: Path, notes: dict[str, Any]) -> None:
        """Begin to upload the trainer's checkpoint in `local`; waits for the previous upload first."""
        (local / NOTES).write_text(json.dumps(notes))
        self.wait()
        self._upload = self._pool.submit(self._save, step, local)

    def wait(self, timeout: float | None = None) -> None:
        """Until the upload under way has ended, well or badly, or the time is over."""
        if self._upload is None:
            return
        try:
            self._upload.result(timeout)
        except FutureTimeout:
            log("a checkpoint's upload takes too long", stage="train", run=self._job.run, severity="WARNING")
        except Exception as error:  # noqa: BLE001  (training goes on; the checkpoint before this one still counts)
            log(f"a checkpoint was not uploaded: {error!r}", stage="train", run=self._job.run, severity="WARNING")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _save(self, step: int, local: Path) -> None:
        checkpoint = artifacts.upload_checkpoint(self._client, self._job.bucket, self._job.run, step, local, {})
        self.saved_step = step
        self._reporter.checkpointed(step, checkpoint.uri)
        artifacts.prune_checkpoints(self._client, self._job.bucket, self._job.run, KEEP)

    def _fetch(self, checkpoint: Checkpoint, local: Path) -> bool:
        found = artifacts.download_prefix(self._client, checkpoint.uri, local)
        (local / artifacts.COMPLETE).unlink()
        if [file for file in found if file.path != artifacts.COMPLETE] == checkpoint.files:
            return True
        log(f"{checkpoint.uri} differs from its marker", stage="train", run=self._job.run, severity="WARNING")
        return False
