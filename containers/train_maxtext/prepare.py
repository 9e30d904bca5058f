"""The prepare stage: fetches model and data, refuses impossible work, and turns rows into token ids."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from containers.common import fit
from containers.common.errors import data_error
from containers.common.job import Job
from containers.common.model import fetch_model
from containers.common.training_template import training_tokenizer
from dropforge.cloud.clients import Clients
from dropforge.fit.maxtext import BATCH_SIZE
from dropforge.spec import JobSpec
from dropforge.spec.methods import method_of

from .family import family_of
from .maxtext_settings import on_tpu
from .methods import load_method
from .stages import stage_main
from .work import Result, Work

CPU_BATCH_SIZE = 8  # sequences per device and step where the spec has no number


def run(work: Work) -> Result:
    """Fetch, check and tokenize; leaves DIRECTORY/rows.npz and held_out.json. Raises JobError."""
    spec, tpu, client = work.spec, on_tpu(), Clients().storage()
    method = load_method(spec.training.method)
    fit.check(spec, client, work.directory, spec.target.driver_machine)
    base, base_source = fetch_model(spec, client, work.base, weights=method_of(spec.training.method).starts_from_base)
    config = json.loads((Path(base) / "config.json").read_text())
    family = family_of(config, spec.model.source)
    tokenizer, shown = training_tokenizer(base, spec.model, lambda: Job.from_environment().day(client))
    prepared = method.read(work, client, base, tokenizer, config["vocab_size"], tpu)
    prepared.data.save(work.rows)
    for path, rows in ((work.held_out, prepared.held_out), (work.sealed, prepared.sealed)):
        path.write_text(json.dumps([{"messages": row.messages, "text": row.text, "tools": row.tools} for row in rows]))
    result: Result = {
        "base": base,
        "base_source": base_source.model_dump(),
        "data_source": prepared.source.model_dump(),
        "model_name": family.name,
        "family": family.arguments(),
        "dtype": source_dtype(config),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "tpu": tpu,
        "xla_cache": str(work.directory / "xla"),
        "length": prepared.data.length,
        "packing": prepared.packing,
        "sequences": len(prepared.data.sequences),
        "batch_size": spec.training.per_device_train_batch_size or (BATCH_SIZE if tpu else CPU_BATCH_SIZE),
        "rows_train": len(prepared.data.train.input_ids),
        "tokens_train": len(prepared.data.train.input_ids.values),
        "rows_eval": len(prepared.held_out),
        "rows_dropped": prepared.dropped,
        "rows_truncated": prepared.truncated,
        "answers_given": prepared.answers[0],
        "answers_learnt": prepared.answers[1],
        "max_new_tokens": prepared.limit.tokens,
        "answers_beyond": prepared.limit.beyond,
        "unused_fields": list(prepared.unused_fields),
        "template": tokenizer.chat_template,
        "template_date": shown and shown.isoformat(),
    }
    total_steps(spec, result, devices=1)  # the least number of devices; the train stage counts them
    return result


def source_dtype(config: dict[str, object]) -> str:
    """The type of the base's saved weights, and so of the exported weights."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return dtype if dtype in ("float32", "bfloat16") else "bfloat16"


def sequences_per_step(spec: JobSpec, prepared: Result, devices: int) -> int:
    return int(prepared["batch_size"]) * devices * spec.training.gradient_accumulation_steps


def step_size(spec: JobSpec, prepared: Result, devices: int) -> Result:
    """The rows and tokens of one optimiser step, on average over the sequences."""
    share = sequences_per_step(spec, prepared, devices) / int(prepared["sequences"])
    return {
        "rows_per_step": round(share * int(prepared["rows_train"]), 1),
        "tokens_per_step": round(share * int(prepared["tokens_train"]), 1),
    }


def total_steps(spec: JobSpec, prepared: Result, devices: int) -> int:
    """The number of optimiser steps. Raises JobError if the rows do not fill a step."""
    per_step = sequences_per_step(spec, prepared, devices)
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
