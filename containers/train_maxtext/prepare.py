"""The prepare stage: model and data are fetched, everything that cannot work is refused, and rows become tokens."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import chat
import rows as data
from batches import Data, Rows, pack
from family import family_of
from job import config_error, data_error
from stages import Result, Work, stage_main
from train import check_gate, fetch_model

from dropforge import clients
from dropforge.spec import JobSpec

PROBE_ROWS = 64  # on which the trained loss is compared with the exported model's
# Sequences per device and step where the spec leaves it to us; a TPU's is what tutorial 002 trains with.
TPU_BATCH_SIZE, CPU_BATCH_SIZE = 1, 8
TPU_LANES, CPU_LANES = 128, 16  # sequences are padded to a multiple of it


def run(work: Work) -> Result:
    """Fetch, check, tokenize; leaves DIRECTORY/rows.npz and held_out.json. Raises JobError."""
    spec, client, tpu = work.spec, clients.storage(), on_tpu()
    base, base_source = fetch_model(spec, client, work.base)
    config = json.loads((Path(base) / "config.json").read_text())
    family = family_of(config, spec.model.source)
    tokenizer = chat.load_tokenizer(base, spec.model.trust_remote_code)
    raw, data_source = data.load_rows(spec.dataset, client, work.directory / "data")
    split = data.prepare(raw, spec.dataset, spec.evaluation, spec.training.seed)
    check_gate(spec, split)
    max_length, source = spec.training.max_length, spec.dataset.source
    encoded = chat.encode(tokenizer, split.train, max_length, source)
    held_out = chat.encode(tokenizer, split.held_out, max_length, source) if split.held_out else encoded
    check_vocabulary(encoded, config["vocab_size"])
    packing, length = shape(spec, encoded.lengths, held_out.lengths, tpu)
    train = Rows.of(encoded.input_ids, encoded.labels)
    prepared = Data(
        train=train,
        probe=Rows.of(held_out.input_ids[:PROBE_ROWS], held_out.labels[:PROBE_ROWS]),
        sequences=pack(train.lengths, length) if packing else [[index] for index in range(len(train))],
        length=length,
    )
    prepared.save(work.rows)
    work.held_out.write_text(json.dumps([{"messages": row.messages, "text": row.text} for row in split.held_out]))
    result: Result = {
        "base": base,
        "base_source": base_source.model_dump(),
        "data_source": data_source.model_dump(),
        "model_name": family.name,
        "family": family.arguments(),
        "dtype": source_dtype(config),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "tpu": tpu,
        "xla_cache": str(work.directory / "xla"),
        "length": length,
        "packing": packing,
        "sequences": len(prepared.sequences),
        "batch_size": spec.training.per_device_train_batch_size or (TPU_BATCH_SIZE if tpu else CPU_BATCH_SIZE),
        "rows_train": len(train),
        "rows_eval": len(split.held_out),
        "rows_dropped": split.dropped + encoded.dropped,
        "rows_truncated": encoded.truncated,
    }
    total_steps(spec, result, devices=1)  # of which there are more; the train stage counts them
    return result


def on_tpu() -> bool:
    """Whether this image is one for TPUs. To ask JAX would take the chips."""
    return find_spec("libtpu") is not None


def shape(spec: JobSpec, train: list[int], held_out: list[int], tpu: bool) -> tuple[bool, int]:
    """Whether rows are packed, and the length of every sequence: XLA compiles for one."""
    longest, mean = max([*train, *held_out]), sum(train) / len(train)
    packing = spec.training.packing
    if packing == "auto":
        packing = tpu and mean < spec.training.max_length / 2
    lanes = TPU_LANES if tpu else CPU_LANES
    length = spec.training.max_length if packing else longest
    return bool(packing), math.ceil(length / lanes) * lanes


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
