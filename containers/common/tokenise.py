"""Rows to token ids on all cores. A later attempt reads the token ids from the bucket.

    checkpoints/<run>/tokens/<key>.safetensors

The key is a digest of all that decides the token ids, so a changed row, tokenizer or version finds no object.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from dropforge.base.log import log
from dropforge.rows import Row
from dropforge.run.artifacts import tokens_object
from dropforge.run.proof import PROOF, is_proved, proof
from dropforge.spec import Dataset, JobSpec

from . import chat
from .chat import Chunk, Encoded, Learn
from .errors import infrastructure_error
from .job import Job
from .rows import Split, held_out_source
from .token_rows import TokenRows

CHUNK_ROWS = 2048
# Below, a single process is done before others have started: a process imports transformers first, which takes seconds.
PARALLEL_CHARACTERS = 8_000_000
MAX_PROCESSES = 32  # each takes about 300 MB
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
TIMEOUT_SECONDS = 120.0
COUNTS = ("truncated", "dropped", "refused", "given", "learnt")  # fields of Encoded that are no arrays


@dataclass(frozen=True)
class Tokeniser:
    """Encodes rows for one model and method. Without a `cache`, every call computes."""

    tokenizer: Any
    base: str
    trust_remote_code: bool = False
    method: str = "sft"
    cache: TokenCache | None = None
    processes: int | None = None  # by default, those that pay off

    @classmethod
    def load(cls, base: str, trust_remote_code: bool, method: str, cache: TokenCache | None) -> Tokeniser:
        """The tokeniser of the model in the directory `base`. Raises JobError if the model has no tokenizer."""
        return cls(chat.load_tokenizer(base, trust_remote_code), base, trust_remote_code, method, cache)

    def encode(self, rows: Sequence[Row], max_length: int, source: str, learn: Learn = "answers") -> Encoded:
        """As chat.encode: the same result for any number of processes. Raises JobError."""
        key = self.key(rows, max_length, learn) if self.cache else ""
        if self.cache and (cached := self.cache.read(key)):
            log("read the token ids of an earlier attempt", stage="train", rows=len(rows), key=key)
            return cached
        began, processes = time.monotonic(), self.processes or processes_for(rows)
        chunks = list(self._chunks(rows, max_length, source, learn, processes))
        encoded = chat.join(self.tokenizer, rows, chunks, max_length, source)
        seconds = round(time.monotonic() - began, 1)
        log(f"tokenised {len(rows):,} rows", stage="train", rows=len(rows), seconds=seconds, processes=processes)
        if self.cache:
            self.cache.write(key, encoded)
        return encoded

    def key(self, rows: Sequence[Row], max_length: int, learn: Learn = "answers") -> str:
        """A digest of the rows and of everything that turns rows into token ids."""
        packages = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
        digest = hashlib.sha256(Path(chat.__file__).read_bytes())
        digest.update(json.dumps([packages, self.method, max_length, learn, self.tokenizer.chat_template]).encode())
        for path in sorted(path for pattern in TOKENIZER_FILES for path in Path(self.base).glob(pattern)):
            digest.update(f"\n{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
        for row in rows:
            digest.update(json.dumps([row.messages, row.text, sorted(row.muted), row.tools]).encode())
        return digest.hexdigest()

    def _chunks(
        self, rows: Sequence[Row], max_length: int, source: str, learn: Learn, processes: int
    ) -> Iterator[Chunk]:
        parts = [rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]
        if processes == 1:
            yield from (chat.encode_chunk(self.tokenizer, part, max_length, source, learn) for part in parts)
            return
        # Not fork: this process has threads (gRPC, the job events), and a fork copies their locks in any state.
        pool = ProcessPoolExecutor(
            processes,
            multiprocessing.get_context("spawn"),
            initializer=_start_process,
            initargs=(self.base, self.trust_remote_code),
        )
        try:
            yield from pool.map(_encode_chunk, parts, repeat(max_length), repeat(source), repeat(learn))
        except BrokenProcessPool:
            raise infrastructure_error(
                f"one of {processes} processes that tokenise the rows of {source} was killed",
                "dropforge tries the run again; if it fails again, use a machine with more memory",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def processes_for(rows: Sequence[Row]) -> int:
    """How many processes tokenise the rows fastest here."""
    characters = sum(len(row.content) for row in rows)
    return 1 if characters < PARALLEL_CHARACTERS else min(cores(), MAX_PROCESSES)


def cores() -> int:
    """The cores that this container may use: by affinity, and by the control group's share of time."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return available
    return available if quota == "max" else max(1, min(available, int(quota) // int(period)))


def encode_split(tokeniser: Tokeniser, split: Split, spec: JobSpec) -> tuple[Split, Encoded, Encoded | None]:
    """The rows' token ids, and the split without the rows that have none. Raises JobError.

    The held-out rows have a loss on their answers, whatever the training learns: those are what a user gets.
    """
    assert isinstance(spec.dataset, Dataset), "the spec's validation refuses other data"
    length, judged = spec.training.max_length, held_out_source(spec.dataset, spec.evaluation)
    train = tokeniser.encode(split.train, length, spec.dataset.source, spec.training.learn)
    held_out = tokeniser.encode(split.held_out, length, judged) if split.held_out else None
    kept = replace(
        split,
        train=_without(split.train, train.refused),
        held_out=_without(split.held_out, held_out.refused) if held_out else [],
        dropped=split.dropped + train.dropped,
    )
    return kept, train, held_out


def _without(rows: Sequence[Row], refused: Collection[int]) -> list[Row]:
    return [row for place, row in enumerate(rows) if place not in refused]


@dataclass(frozen=True)
class TokenCache:
    """The token ids of one run in the runs bucket. No fault of the cache fails an attempt: it then computes."""

    client: Any
    bucket: str
    run: str
    directory: Path  # for the files in transfer
    writes: bool = True
    run_key: str = field(default="", repr=False)

    @classmethod
    def of(cls, job: Job, client: Any, directory: Path) -> TokenCache:
        """The cache of a job. With several machines, the first one writes."""
        return cls(client, job.bucket, job.run, directory, writes=job.world.machine == 0, run_key=job.key)

    def read(self, key: str) -> Encoded | None:
        """The token ids with this key; None if there are none, or if they are damaged."""
        path = self._path(key)
        try:
            blob = self._find(key)
            if blob is None:
                return None
            blob.download_to_filename(str(path), checksum="crc32c", timeout=TIMEOUT_SECONDS)
            if not is_proved(self.run_key, blob.name, sha256_of(path), (blob.metadata or {}).get(PROOF)):
                raise ValueError("it has no proof of its run")
            return load(path, key)
        except Exception as error:  # noqa: BLE001  (the rows are tokenised again)
            self._warn(f"the token ids in the bucket cannot be used, so the rows are tokenised again: {error!r}")
            return None
        finally:
            path.unlink(missing_ok=True)

    def write(self, key: str, encoded: Encoded) -> None:
        """Save the token ids; replaces a damaged object."""
        if not self.writes:
            return
        path = self._path(key)
        try:
            save(path, key, encoded)
            damaged = self._find(key)
            generation = damaged.generation if damaged else 0
            blob = self.client.bucket(self.bucket).blob(tokens_object(self.run, key))
            blob.metadata = {PROOF: proof(self.run_key, blob.name, sha256_of(path))} if self.run_key else None
            blob.upload_from_filename(
                str(path), if_generation_match=generation, checksum="crc32c", timeout=TIMEOUT_SECONDS
            )
        except Exception as error:  # noqa: BLE001  (a later attempt tokenises again)
            self._warn(f"the token ids were not saved for a later attempt: {error!r}")
        finally:
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / f"{key}.safetensors"

    def _find(self, key: str) -> Any:
        name = tokens_object(self.run, key)
        return self.client.bucket(self.bucket).get_blob(name, timeout=TIMEOUT_SECONDS)

    def _warn(self, message: str) -> None:
        log(message, stage="train", run=self.run, severity="WARNING")


def sha256_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def save(path: Path, key: str, encoded: Encoded) -> None:
    """Write token ids, a bit for each learnt token, and the rows' starts; the header has a digest of them."""
    from safetensors.numpy import save_file

    arrays = {
        "ids": encoded.input_ids.values,
        "learnt": np.packbits(encoded.labels.values != chat.IGNORED),
        "starts": encoded.input_ids.starts,
        "rows": encoded.rows,
    }
    counts = {"counts": json.dumps({name: getattr(encoded, name) for name in COUNTS})}
    save_file(arrays, path, {"key": key, "sha256": _digest(arrays, counts), **counts})


def load(path: Path, key: str) -> Encoded:
    """The token ids of `save`. Raises ValueError or a SafetensorError if the file is damaged or of another key."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        header = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in ("ids", "learnt", "starts", "rows")}
    counts = {"counts": header.get("counts", "")}
    if header.get("key") != key or header.get("sha256") != _digest(arrays, counts):
        raise ValueError("its digest differs from its contents")
    ids, starts = arrays["ids"], arrays["starts"]
    learnt = np.unpackbits(arrays["learnt"], count=len(ids)).astype(bool)
    labels = np.where(learnt, ids, np.int32(chat.IGNORED))
    known = json.loads(counts["counts"])
    known["refused"] = tuple(known["refused"])
    return Encoded(TokenRows(ids, starts), TokenRows(labels, starts), rows=arrays["rows"], **known)


def _digest(arrays: dict[str, Any], counts: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(counts).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


_tokenizer: Any = None  # of a process of the pool


def _start_process(base: str, trust_remote_code: bool) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes take all cores
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = chat.load_tokenizer(base, trust_remote_code)


def _end_with_parent() -> None:
    """End this process when the one that started it was killed: nobody would take its results."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_chunk(rows: Sequence[Row], max_length: int, source: str, learn: Learn) -> Chunk:
    return chat.encode_chunk(_tokenizer, rows, max_length, source, learn)
