"""The second half of the export: loads the exported model as a server does, and compares it with the trained model.

Then scores base and exported model on the held-out rows, as containers/train_trl does. Runs on the CPU, with the
interpreter that has PyTorch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from containers.common import chat
from containers.common.errors import JobError, code_error
from containers.common.evaluation import compare, evaluate, mean_loss, write_samples
from containers.common.rows import Row
from containers.common.token_rows import TokenRows
from dropforge.base.log import log

from .batches import Data, Rows
from .stages import stage_main
from .work import Result, Work

# The allowed difference of the loss on the same tokens between MaxText and transformers. MaxText 0.2.5 rounds a tied
# embedding to bfloat16 for the output layer (attend_on_embedding in layers/embeddings.py): 5e-4 on the tiny model. With
# bfloat16, weights and activations are rounded as well. A wrong layer changes the loss by whole numbers.
LOSS_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}

MODEL_SECONDS = 300.0  # to judge one model; the evaluation judges two
PILOT_ROWS = 2


def run(work: Work) -> Result:
    """The exported model's loss on the probe rows, and the metrics of the evaluation if rows were held out."""
    import torch

    prepared, trained, spec = work.done("prepare"), work.done("train"), work.spec
    torch.manual_seed(0)
    directory = work.exported / "model"
    tokenizer = chat.load_tokenizer(str(directory), spec.model.trust_remote_code)
    model, missing = load(directory, spec.model.trust_remote_code)
    check_weights(model, missing)
    probe = mean_loss(model, tokenizer, encoded(Data.load(work.rows).probe))
    tolerance = LOSS_TOLERANCE["bfloat16" if prepared["tpu"] else prepared["dtype"]]
    if not abs(probe - trained["loss"]) <= tolerance:
        raise mismatch(f"it has the loss {probe:.6f} where the trained one has {trained['loss']:.6f} (+- {tolerance})")
    result: Result = {"loss_exported": probe, "loss_trained": trained["loss"], "evaluation": {}}
    rows = [Row(tuple(row["messages"]), row["text"]) for row in json.loads(work.held_out.read_text())]
    if spec.evaluation and rows:
        held_out = chat.encode(tokenizer, rows, spec.training.max_length, spec.dataset.source)
        limit = spec.evaluation.max_new_tokens
        count = affordable_rows(lambda n: evaluate(model, tokenizer, rows[:n], first(held_out, n), limit), len(rows))
        if count < len(rows):
            log(f"judging {count} of {len(rows)} held-out rows: more would take too long on a CPU", stage="check")
        rows, held_out = rows[:count], first(held_out, count)
        after = evaluate(model, tokenizer, rows, held_out, limit)
        del model  # the host's memory may not hold two models
        base, _ = load(Path(prepared["base"]), spec.model.trust_remote_code)
        before = evaluate(base, tokenizer, rows, held_out, limit)
        result["evaluation"] = {**compare(before, after), "rows_eval": len(rows)}
        write_samples(work.exported, rows, before, after)
    return result


def affordable_rows(judge: Callable[[int], Any], count: int, clock: Callable[[], float] = time.monotonic) -> int:
    """How many of `count` rows may be judged: a large model would take hours on a CPU while the chips wait.

    `judge` judges the first n rows. Rows are shuffled, so the first rows are a sample.
    """
    pilot = min(PILOT_ROWS, count)
    judge(pilot)  # the first time is longer than the others
    began = clock()
    judge(pilot)
    per_row = (clock() - began) / pilot
    if per_row * count <= MODEL_SECONDS:
        return count
    return max(pilot, int(MODEL_SECONDS / per_row))


def first(encoded: chat.Encoded, count: int) -> chat.Encoded:
    return replace(encoded, input_ids=encoded.input_ids[:count], labels=encoded.labels[:count])


def check_weights(model: Any, missing: list[str]) -> None:
    """Raise JobError unless the files have all of the model's tensors, with finite values."""
    import torch

    if missing:
        raise mismatch(f"{len(missing)} tensors are missing or of another shape, {missing[0]} among them")
    if broken := [name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())]:
        raise mismatch(f"{len(broken)} tensors have values that are not finite, {broken[0]} among them")


def load(directory: Path, trust_remote_code: bool) -> tuple[Any, list[str]]:
    """The model, and the names of tensors that its files lack: transformers initialises them with only a warning.

    In 32 bits: a CPU computes slowly in 16 bits, and rounds in its own way.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    return model.eval(), [*info["missing_keys"], *map(str, info["mismatched_keys"])]


def encoded(rows: Rows) -> chat.Encoded:
    parts = [rows.row(index) for index in range(len(rows))]
    return chat.Encoded(TokenRows.of(ids for ids, _ in parts), TokenRows.of(labels for _, labels in parts), 0, 0)


def mismatch(difference: str) -> JobError:
    message = f"the exported model is not the trained one: {difference}"
    return code_error(message, "nothing was published; the conversion has a bug")


if __name__ == "__main__":
    sys.exit(stage_main("check", run))
