"""The second half of the export: loads the exported model as a server does, and compares it with the trained model.

Then asks it for the answers of a few held-out rows, and seals it, as containers/train_trl does. The chips have judged
it on all held-out rows (hooks.py). Runs on the CPU, with the interpreter that has PyTorch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from containers.common import chat, sealing
from containers.common.errors import JobError, code_error
from containers.common.evaluation import SAMPLES, generate, mean_loss, write_samples
from dropforge.base.log import log
from dropforge.fit.maxtext import SEALED_ROWS
from dropforge.rows import Row

from .batches import Data
from .stages import stage_main
from .work import Result, Work

# The allowed difference of the loss on the same tokens between MaxText and transformers. MaxText 0.2.5 rounds a tied
# embedding to bfloat16 for the output layer (attend_on_embedding in layers/embeddings.py): 5e-4 on the tiny model. With
# bfloat16, weights and activations are rounded as well. A wrong layer changes the loss by whole numbers.
LOSS_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}

# On a CPU, a token of a model with 8 billion parameters takes about a second, while the chips wait.
SAMPLE_TOKENS = 128


def run(work: Work) -> Result:
    """The exported model's loss on the probe rows, and how far it is from the trained model's loss.

    Leaves samples.json and seal.json beside the model.
    """
    import torch

    prepared, trained, spec = work.done("prepare"), work.done("train"), work.spec
    torch.manual_seed(0)
    directory = work.exported / "model"
    tokenizer = chat.load_tokenizer(str(directory), spec.model.trust_remote_code)
    model, missing = load(directory, spec.model.trust_remote_code)
    check_weights(model, missing)
    check_files(directory, model)
    probe = mean_loss(model, tokenizer, Data.load(work.rows).probe)
    tolerance = LOSS_TOLERANCE["bfloat16" if prepared["tpu"] else prepared["dtype"]]
    if not abs(probe - trained["loss"]) <= tolerance:
        raise mismatch(f"it has the loss {probe:.6f} where the trained one has {trained['loss']:.6f} (+- {tolerance})")
    links = {"trained_to_exported": abs(probe - trained["loss"]), "saved_to_reloaded": 0.0}
    samples = [row for row in read_rows(work.held_out)[:SAMPLES] if row.messages]
    after = answers(model, tokenizer, samples, work)
    seal(work, model, tokenizer, links)
    del model  # the host's memory may not hold two models
    if samples:
        base, _ = load(Path(prepared["base"]), spec.model.trust_remote_code)
        write_samples(work.exported, samples, answers(base, tokenizer, samples, work), after)
    return {"loss_exported": probe, "loss_trained": trained["loss"], "links": links}


def answers(model: Any, tokenizer: Any, rows: list[Row], work: Work) -> list[str]:
    """The model's greedy answers to the rows."""
    if not rows or work.spec.evaluation is None:
        return []
    prompts = [chat.encode_prompt(tokenizer, row.prompt, row.tools) for row in rows]
    return generate(model, tokenizer, prompts, min(SAMPLE_TOKENS, work.spec.evaluation.max_new_tokens or SAMPLE_TOKENS))


def seal(work: Work, model: Any, tokenizer: Any, links: dict[str, float]) -> None:
    """Write what an endpoint of the exported model must answer (seal.json). The model is of no further use."""
    made = sealing.write_seal(
        work.exported, model, tokenizer, read_rows(work.sealed), work.spec, links, count=SEALED_ROWS
    )
    if made is None:
        log("no row is short enough for a seal: the model is not sealed", stage="check")


def read_rows(path: Path) -> list[Row]:
    return [Row(tuple(row["messages"]), row["text"], tools=tuple(row["tools"])) for row in json.loads(path.read_text())]


def check_weights(model: Any, missing: list[str]) -> None:
    """Raise JobError unless the files have all of the model's tensors, with finite values."""
    import torch

    if missing:
        raise mismatch(f"{len(missing)} tensors are missing or of another shape, {missing[0]} among them")
    if broken := [name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())]:
        raise mismatch(f"{len(broken)} tensors have values that are not finite, {broken[0]} among them")


def check_files(directory: Path, model: Any) -> None:
    """Raise JobError unless the model has the numbers of its files: 16 bits become 32 without rounding."""
    from safetensors import safe_open

    loaded = model.state_dict()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name not in loaded or not loaded[name].equal(file.get_tensor(name).to(loaded[name].dtype)):
                    raise mismatch(f"the loaded model has another {name} than {path.name}")


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


def mismatch(difference: str) -> JobError:
    message = f"the exported model is not the trained one: {difference}"
    return code_error(message, "nothing was published; the conversion has a bug")


if __name__ == "__main__":
    sys.exit(stage_main("check", run))
