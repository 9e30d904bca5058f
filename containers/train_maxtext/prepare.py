"""The prepare stage: model and data are fetched, everything that cannot work is refused, and rows become tokens."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import chat
import numpy as np
import rows as data
from batches import Data, Rows, pack
from family import family_of
from job import config_error, data_error
from stages import Result, Work, stage_main
from train import check_gate, fetch_model

from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import Source
from dropforge.spec import JobSpec, SyntheticDataset

# On which the trained loss is compared with the exported model's, on a CPU: so many rows, or random tokens.
PROBE_ROWS, PROBE_TOKENS = 64, 16_384
# Sequences per device and step where the spec leaves it to us; a TPU's is what tutorial 002 trains with.
TPU_BATCH_SIZE, CPU_BATCH_SIZE = 1, 8
TPU_LANES, CPU_LANES = 128, 16  # sequences are padded to a multiple of it


@dataclass(frozen=True)
class Prepared:
    """What is trained on, whence it came, and what became of its rows."""

    data: Data
    source: Source
    packing: bool = False
    held_out: tuple[data.Row, ...] = ()
    dropped: int = 0
    truncated: int = 0


def run(work: Work) -> Result:
    """Fetch, check, tokenize; leaves DIRECTORY/rows.npz and held_out.json. Raises JobError."""
    spec, tpu = work.spec, on_tpu()
    pretrain = spec.training.method == "pretrain"
    base, base_source = fetch_model(spec, Clients().storage(), work.base, weights=not pretrain)
    config = json.loads((Path(base) / "config.json").read_text())
    family = family_of(config, spec.model.source)
    found = synthetic(spec, config["vocab_size"], tpu) if pretrain else read(work, base, config["vocab_size"], tpu)
    found.data.save(work.rows)
    work.held_out.write_text(json.dumps([{"messages": row.messages, "text": row.text} for row in found.held_out]))
    result: Result = {
        "base": base,
        "base_source": base_source.model_dump(),
        "data_source": found.source.model_dump(),
        "model_name": family.name,
        "family": family.arguments(),
        "dtype": source_dtype(config),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "tpu": tpu,
        "xla_cache": str(work.directory / "xla"),
        "length": found.data.length,
        "packing": found.packing,
        "sequences": len(found.data.sequences),
        "batch_size": spec.training.per_device_train_batch_size or (TPU_BATCH_SIZE if tpu else CPU_BATCH_SIZE),
        "rows_train": len(found.data.train),
        "rows_eval": len(found.held_out),
        "rows_dropped": found.dropped,
        "rows_truncated": found.truncated,
    }
    total_steps(spec, result, devices=1)  # of which there are more; the train stage counts them
    return result


def read(work: Work, base: str, vocabulary: int, tpu: bool) -> Prepared:
    """The spec's own rows, as token ids. Raises JobError."""
    spec = work.spec
    tokenizer = chat.load_tokenizer(base, spec.model.trust_remote_code)
    raw, source = data.load_rows(spec.dataset, Clients().storage(), work.directory / "data")
    split = data.prepare(raw, spec.dataset, spec.evaluation, spec.training.seed)
    check_gate(spec, split)
    max_length, named = spec.training.max_length, spec.dataset.source
    encoded = chat.encode(tokenizer, split.train, max_length, named)
    held_out = chat.encode(tokenizer, split.held_out, max_length, named) if split.held_out else encoded
    check_vocabulary(encoded, vocabulary)
    packing, length = shape(spec, encoded.lengths, held_out.lengths, tpu)
    train = Rows.of(encoded.input_ids, encoded.labels)
    prepared = Data(
        train=train,
        probe=Rows.of(held_out.input_ids[:PROBE_ROWS], held_out.labels[:PROBE_ROWS]),
        sequences=pack(train.lengths, length) if packing else [[index] for index in range(len(train))],
        length=length,
    )
    dropped = split.dropped + encoded.dropped
    return Prepared(prepared, source, packing, tuple(split.held_out), dropped, encoded.truncated)


def synthetic(spec: JobSpec, vocabulary: int, tpu: bool) -> Prepared:
    """Random tokens, each of them learnt, in whole sequences: MaxText's `dataset_type=synthetic`.

    MaxText repeats one batch of them; here the seed makes as many rows as the spec says.
    """
    assert isinstance(spec.dataset, SyntheticDataset), "validated"
    length, count = padded(spec.training.max_length, tpu), spec.dataset.rows
    ids = np.random.default_rng(spec.training.seed).integers(0, vocabulary, count * length, dtype=np.int32)
    train = Rows(ids, ids, np.arange(count + 1, dtype=np.int32) * length)
    probed = min(count, max(1, PROBE_TOKENS // length))
    probe = Rows(ids[: probed * length], ids[: probed * length], train.starts[: probed + 1])
    prepared = Data(train, probe, [[index] for index in range(count)], length)
    return Prepared(prepared, Source(uri=spec.dataset.source, revision=f"seed-{spec.training.seed}"))


def on_tpu() -> bool:
    """Whether this image is one for TPUs. To ask JAX would take the chips."""
    return find_spec("libtpu") is not None


def shape(spec: JobSpec, train: list[int], held_out: list[int], tpu: bool) -> tuple[bool, int]:
    """Whether rows are packed, and the length of every sequence: XLA compiles for one."""
    longest, mean = max([*train, *held_out]), sum(train) / len(train)
    packing = spec.training.packing
    if packing == "auto":
        packing = tpu and mean < spec.training.max_length / 2
    return bool(packing), padded(spec.training.max_length if packing else longest, tpu)


def padded(length: int, tpu: bool) -> int:
    """The length of sequences for rows of at most `length`."""
    lanes = TPU_LANES if tpu else CPU_LANES
    return math.ceil(length / lanes) * lanes


def check_vocabulary(encoded: chat.Encoded, size: int) -> None:
    """An embedding that is read beyond its end gives zeros on a TPU, and no error."""
    largest = max(max(ids) for ids in encoded.input_ids)
    if largest >= size:
        raise config_error(
            f"the tokenizer makes token {largest}; expected less than the model's vocab_size, {size}",
            "give the tokenizer that belongs to the model",
        )


def source_dtype(config: dict[str, object]) -> str:
    """What the base's weights are saved in, which the exported ones are saved in too."""
    found = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return found if found in ("float32", "bfloat16") else "bfloat16"


def total_steps(spec: JobSpec, prepared: Result, devices: int) -> int:
    """The optimiser steps to train. Raises JobError when the rows do not fill one of them."""
    per_step = int(prepared["batch_size"]) * devices * spec.training.gradient_accumulation_steps
    sequences = int(prepared["sequences"])
    if sequences < per_step:
        raise data_error(
            f"the data set gives {sequences} sequences of {prepared['length']} tokens; one step takes {per_step} "
            f"({prepared['batch_size']} on each of {devices} devices, "
            f"{spec.training.gradient_accumulation_steps} times)",
            "add rows, or lower training.per_device_train_batch_size or training.gradient_accumulation_steps",
        )
    return spec.training.max_steps or math.ceil(sequences * spec.training.epochs / per_step)


if __name__ == "__main__":
    sys.exit(stage_main("prepare", run))
