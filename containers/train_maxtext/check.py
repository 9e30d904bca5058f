"""The second half of the export stage: load the exported model as a server will, compare it with the trained one.

Held-out rows judge it, as in containers/train_trl. Runs on the CPU, by the interpreter that has PyTorch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chat
from batches import Data, Rows
from evaluation import Score, evaluate, mean_loss, samples
from job import INTERNAL, JobError
from rows import Row
from stages import Result, Work, stage_main

from dropforge.base.errors import ErrorClass

# Of the loss on the same tokens, by MaxText and by transformers. MaxText 0.2.5 rounds a tied embedding to bfloat16 for
# the output layer (attend_on_embedding in layers/embeddings.py): 5e-4 on the tiny model. With bfloat16, weights and
# activations are rounded as well. A layer that is wrong makes whole numbers.
LOSS_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}


def run(work: Work) -> Result:
    """Loss of the exported model on the probe rows, and, where rows were held out, scores before and after."""
    import torch

    prepared, trained, spec = work.done("prepare"), work.done("train"), work.spec
    torch.manual_seed(0)
    directory = work.exported / "model"
    tokenizer = chat.load_tokenizer(str(directory), spec.model.trust_remote_code)
    model, lacking = load(directory, spec.model.trust_remote_code)
    if lacking:
        raise mismatch(f"{len(lacking)} tensors are missing or of another shape, {lacking[0]} among them")
    if broken := [name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())]:
        raise mismatch(f"{len(broken)} tensors have values that are not finite, {broken[0]} among them")
    data = Data.load(work.rows)
    probe = mean_loss(model, tokenizer, encoded(data.probe))
    tolerance = LOSS_TOLERANCE["bfloat16" if prepared["tpu"] else prepared["dtype"]]
    if not abs(probe - trained["loss"]) <= tolerance:
        raise mismatch(f"it has the loss {probe:.6f} where the trained one has {trained['loss']:.6f} (+- {tolerance})")
    result: Result = {"loss_exported": probe, "loss_trained": trained["loss"]}
    rows = [Row(tuple(row["messages"]), row["text"]) for row in json.loads(work.held_out.read_text())]
    if spec.evaluation and rows:
        held_out = chat.encode(tokenizer, rows, spec.training.max_length, spec.dataset.source)
        limit = spec.evaluation.max_new_tokens
        after = evaluate(model, tokenizer, rows, held_out, limit)
        del model
        base, _ = load(Path(prepared["base"]), spec.model.trust_remote_code)
        before = evaluate(base, tokenizer, rows, held_out, limit)
        result |= scores(before, after)
        shown = samples(rows, before, after)
        (work.exported / "samples.json").write_text(json.dumps(shown, indent=2, ensure_ascii=False), encoding="utf-8")
    return result


def load(directory: Path, trust_remote_code: bool) -> tuple[Any, list[str]]:
    """The model, and the names of tensors that its files lack, which transformers makes up with no more than a warning.

    In 32 bits: a CPU computes 16 slowly and with roundings of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    return model.eval(), [*found["missing_keys"], *map(str, found["mismatched_keys"])]


def encoded(rows: Rows) -> chat.Encoded:
    parts = [rows.row(index) for index in range(len(rows))]
    return chat.Encoded([ids.tolist() for ids, _ in parts], [labels.tolist() for _, labels in parts], 0, 0)


def scores(before: Score, after: Score) -> Result:
    names = ("loss", "exact_match")
    found = {name: asdict(after)[name] for name in names}
    return found | {f"{name}_before": asdict(before)[name] for name in names}


def mismatch(what: str) -> JobError:
    return JobError(
        ErrorClass.CODE,
        INTERNAL,
        f"the exported model is not the trained one: {what}",
        "nothing was published; this is a bug of the conversion",
    )


if __name__ == "__main__":
    sys.exit(stage_main("check", run))
