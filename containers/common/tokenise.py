"""Rows to token ids on all cores. A later attempt reads the token ids from the bucket.

    checkpoints/<run>/tokens/<key>.safetensors

The key is a digest of all that decides the token ids, so a changed row, tokenizer or version finds no object.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
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
from .job import Job
from .processes import in_processes
from .read_rows import CHUNK_ROWS, digests_of, mean_characters, processes_for
from .rows import Split, held_out_source
from .token_rows import Column, Ints, TokenRows

PART = 1 << 20  # token ids that are unpacked or digested at once
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
TIMEOUT_SECONDS = 120.0
DTYPES = {"int32": "I32", "int64": "I64", "uint8": "U8"}  # safetensors' names of numpy's types
COUNTS = ("truncated", "dropped", "refused", "given", "learnt")  # fields of Encoded that are no arrays


@dataclass(frozen=True)
class Tokeniser:
    """Encodes rows for one model and method. Without a `cache`, every call computes.

    `base` is the directory of the tokenizer, whose chat template may differ from the directory's.
    """

    tokenizer: Any
    base: str
    trust_remote_code: bool = False
    method: str = "sft"
    cache: TokenCache | None = None
    processes: int | None = None  # by default, those that pay off

    @classmethod
    def load(cls, base: str, trust_remote_code: bool, method: str, cache: TokenCache | None) -> Tokeniser:
        """With the tokenizer and the chat template of the directory `base`. Raises JobError if it has no tokenizer."""
        return cls(chat.load_tokenizer(base, trust_remote_code), base, trust_remote_code, method, cache)

    def encode(self, rows: Sequence[Row], max_length: int, source: str, learn: Learn = "answers") -> Encoded:
        """As chat.encode: the same result for any number of processes. Raises JobError."""
        key = self.key(rows, max_length, learn) if self.cache else ""
        if self.cache and (cached := self.cache.read(key)):
            log("read the token ids of an earlier attempt", stage="train", rows=len(rows), key=key)
            return cached
        began = time.monotonic()
        processes = self.processes or processes_for(len(rows), mean_characters(rows))
        chunks = self._chunks(rows, max_length, source, learn, processes)
        directory = self.cache.directory if self.cache else None
        encoded = chat.join(self.tokenizer, rows, chunks, max_length, source, directory)
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
        digest.update(digests_of(rows).tobytes())
        return digest.hexdigest()

    def _chunks(
        self, rows: Sequence[Row], max_length: int, source: str, learn: Learn, processes: int
    ) -> Iterator[Chunk]:
        parts = (rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS))
        if processes == 1:
            return (chat.encode_chunk(self.tokenizer, part, max_length, source, learn) for part in parts)
        work = partial(_encode_chunk, max_length=max_length, source=source, learn=learn)
        start = (self.base, self.trust_remote_code, self.tokenizer.chat_template)
        return in_processes(work, parts, processes, f"tokenise the rows of {source}", _start_process, start)


def encode_split(tokeniser: Tokeniser, split: Split, spec: JobSpec) -> tuple[Split, Encoded, Encoded | None]:
    """The rows' token ids, and the split without the rows that have none. Raises JobError.

    The held-out rows have a loss on their answers, whatever the training learns: those are what a user gets.
    """
    assert isinstance(spec.dataset, Dataset), "the spec's validation refuses other data"
    length, judged = spec.training.max_length, held_out_source(spec.dataset, spec.evaluation)
    train = tokeniser.encode(split.train, length, spec.dataset.title, spec.training.learn)
    held_out = tokeniser.encode(split.held_out, length, judged) if split.held_out else None
    refused = set(held_out.refused if held_out else ())
    kept = replace(
        split,
        train=split.train.take(np.delete(np.arange(len(split.train)), train.refused)),
        held_out=[row for place, row in enumerate(split.held_out) if place not in refused],
        dropped=split.dropped + train.dropped,
    )
    return kept, train, held_out


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
    """Write token ids, a bit for each learnt token, and the rows' starts; the header has a digest of them.

    The file is a safetensors file (https://huggingface.co/docs/safetensors, 2026-11-29), written piece by piece: the
    library would copy all token ids to the memory.
    """
    arrays = {
        "starts": encoded.input_ids.starts,  # first: numbers of 64 bits are mapped at multiples of 8
        "ids": encoded.input_ids.values,
        "rows": encoded.rows,
        "learnt": _packed(encoded.labels.values),
    }
    counts = {"counts": json.dumps({name: getattr(encoded, name) for name in COUNTS})}
    header: dict[str, Any] = {"__metadata__": {"key": key, "sha256": _digest(arrays, counts), **counts}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": [len(array)], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            array.tofile(file)


def load(path: Path, key: str) -> Encoded:
    """The token ids of `save`, mapped. Raises ValueError or KeyError if the file is damaged or of another key."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    told, names = header.pop("__metadata__"), {dtype: name for name, dtype in DTYPES.items()}
    arrays = {
        name: np.memmap(path, names[at["dtype"]], "r", 8 + length + at["data_offsets"][0], tuple(at["shape"]))
        if at["shape"] != [0]
        else np.empty(0, names[at["dtype"]])
        for name, at in header.items()
    }
    counts = {"counts": told["counts"]}
    if told["key"] != key or told["sha256"] != _digest(arrays, counts):
        raise ValueError("its digest differs from its contents")
    ids, starts = arrays["ids"], arrays["starts"]
    labels = _labels(ids, arrays["learnt"], path.parent)
    known = json.loads(counts["counts"])
    known["refused"] = tuple(known["refused"])
    return Encoded(TokenRows(ids, starts), TokenRows(labels, starts), rows=arrays["rows"], **known)


def _packed(labels: Ints) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A bit for each label that is learnt."""
    parts = [np.packbits(labels[start : start + PART] != chat.IGNORED) for start in range(0, len(labels), PART)]
    return np.concatenate([np.empty(0, np.uint8), *parts])


def _labels(ids: Ints, learnt: np.ndarray[Any, np.dtype[np.uint8]], directory: Path) -> Ints:
    """The labels of `_packed`."""
    with Column(directory) as labels:
        for start in range(0, len(ids), PART):
            part = ids[start : start + PART]
            bits = np.unpackbits(learnt[start // 8 : (start + PART) // 8], count=len(part)).astype(bool)
            labels.add(np.where(bits, part, np.int32(chat.IGNORED)))
        return labels.mapped()


def _digest(arrays: dict[str, Any], counts: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(counts).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        for start in range(0, len(array), PART):
            digest.update(array[start : start + PART].tobytes())
    return digest.hexdigest()


_tokenizer: Any = None  # of a process of the pool


def _start_process(base: str, trust_remote_code: bool, template: Any) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes take all cores
    _tokenizer = chat.load_tokenizer(base, trust_remote_code, template)


def _encode_chunk(rows: Sequence[Row], max_length: int, source: str, learn: Learn) -> Chunk:
    return chat.encode_chunk(_tokenizer, rows, max_length, source, learn)
