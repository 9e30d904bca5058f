"""The training container: fine-tunes the model of one job spec with TRL and leaves it, committed, in the runs bucket.

    DROPFORGE_PROJECT=p DROPFORGE_RUN=demo-0123456789ab DROPFORGE_ATTEMPT=1 DROPFORGE_RUNS_BUCKET=b \\
    DROPFORGE_JOB_EVENTS_TOPIC=projects/p/topics/job-events python train.py

Reads gs://b/runs/<run>/spec.json, writes gs://b/checkpoints/<run>/ and gs://b/models/<run>/. Exit codes: job.py.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chat
import rows as data
from checkpoints import CheckpointStore
from evaluation import Score, evaluate, samples
from job import DONE, INTERNAL, STOPPED, Job, JobError, Redactor, classify, config_error, missing
from plan import Plan, find_device, make_plan, shape_of, use_threads
from report import FLUSH_SECONDS, ProgressMeter, Reporter
from stop import Stopped, StopRequest

from dropforge import artifacts, clients
from dropforge.artifacts import Source
from dropforge.log import log
from dropforge.names import spec_object
from dropforge.spec import JobSpec, parse_spec

LOGGING_STEPS = 10
# Cloud Run kills 10 s after SIGTERM: for the step under way, the last checkpoint's upload, the last event.
STOP_UPLOAD_SECONDS = 6.0
STOP_EVENT_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one attempt. There are no arguments: what it must know is in the environment."""
    try:
        job = Job.from_environment()
    except JobError as error:
        log(error.message, stage="train", severity="ERROR", hint=error.hint)
        return error.exit_code
    redact, stop = Redactor(), StopRequest()
    reporter = Reporter(job, redact)
    try:
        with tempfile.TemporaryDirectory(prefix="dropforge-") as directory:
            run(job, Path(directory), reporter, stop, redact)
        return DONE
    except Stopped:
        return STOPPED
    except Exception as error:  # noqa: BLE001  (whatever it is, the control plane is told what it means)
        failure = classify(error)
        if failure.exit_code == INTERNAL:
            print(redact(traceback.format_exc()), file=sys.stderr)
        log(redact(failure.message), stage="train", run=job.run, severity="ERROR", hint=redact(failure.hint))
        reporter.failed(failure)
        return failure.exit_code
    finally:
        reporter.close(STOP_EVENT_SECONDS if stop.reason else FLUSH_SECONDS)


def run(job: Job, directory: Path, reporter: Reporter, stop: StopRequest, redact: Redactor) -> None:
    """One attempt from top to bottom: the committed manifest is its only result."""
    client = clients.storage()
    checkpoints = CheckpointStore(client, job, reporter)
    try:
        stop.arm(job.deadline)
        if committed := artifacts.read_manifest(client, job.bucket, job.run):
            log("the model is committed already", stage="train", run=job.run, attempt=committed.attempt)
            reporter.succeeded(committed)
            return
        spec = load_spec(client, job)
        redact.learn(spec.secrets)
        quiet_libraries()
        checkpoint = checkpoints.resume(directory / "trainer")
        inputs = prepare(spec, job, client, directory, reporter, checkpoints)
        if checkpoint is None or not is_finished(checkpoint):
            checkpoint = train(spec, job, inputs, directory / "trainer", checkpoint, checkpoints, reporter, stop)
        manifest = export_and_publish(spec, job, client, inputs, checkpoint, directory / "export")
        stop.disarm()
        reporter.succeeded(manifest)
        log("succeeded", stage="train", run=job.run, attempt=manifest.attempt, metrics=manifest.metrics)
        checkpoints.wait()
    except Stopped as request:
        checkpoints.wait(STOP_UPLOAD_SECONDS)
        step = checkpoints.saved_step
        reporter.out_of_time(step) if request.reason == "deadline" else reporter.preempted(step)
        log("stopped", stage="train", run=job.run, severity="WARNING", reason=request.reason, saved_step=step)
        raise
    finally:
        checkpoints.close()


@dataclass(frozen=True)
class Inputs:
    """What training and export work on: everything that was read, checked and decided before."""

    base: str
    base_source: Source
    data_source: Source
    tokenizer: Any
    split: data.Split
    train: chat.Encoded
    held_out: chat.Encoded | None
    plan: Plan


def prepare(
    spec: JobSpec, job: Job, client: Any, directory: Path, reporter: Reporter, checkpoints: CheckpointStore
) -> Inputs:
    """Read model and data, refuse what cannot work, and decide how to train on this device."""
    device = find_device()
    reporter.started(checkpoints.saved_step, device.name)
    log("started", stage="train", run=job.run, device=device.name, resumed_step=checkpoints.saved_step)
    base, base_source = fetch_model(spec, client, directory / "base")
    tokenizer = chat.load_tokenizer(base, spec.model.trust_remote_code)
    raw, data_source = data.load_rows(spec.dataset, client, directory / "data")
    split = data.prepare(raw, spec.dataset, spec.evaluation, spec.training.seed)
    check_gate(spec, split)
    max_length, source = spec.training.max_length, spec.dataset.source
    encoded = chat.encode(tokenizer, split.train, max_length, source)
    held_out = chat.encode(tokenizer, split.held_out, max_length, source) if split.held_out else None
    plan = make_plan(spec, shape_of(base, spec.model.trust_remote_code), device, encoded.lengths)
    use_threads(plan)
    log(
        "prepared",
        stage="train",
        run=job.run,
        rows_train=len(encoded.input_ids),
        rows_eval=len(split.held_out),
        rows_dropped=split.dropped + encoded.dropped,
        rows_truncated=encoded.truncated,
        batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        gradient_checkpointing=plan.gradient_checkpointing,
        packing=plan.packing,
        memory=str(plan.estimate),
    )
    return Inputs(base, base_source, data_source, tokenizer, split, encoded, held_out, plan)


def train(
    spec: JobSpec,
    job: Job,
    inputs: Inputs,
    directory: Path,
    resumed: Path | None,
    checkpoints: CheckpointStore,
    reporter: Reporter,
    stop: StopRequest,
) -> Path:
    """Evaluate the base model, then train; returns the last checkpoint. Raises Stopped once one is saved."""
    from callbacks import ReportProgress, StopWhenAsked, UploadCheckpoints

    notes = read_notes(resumed) if resumed else {}
    model = load_base(inputs, spec)
    if spec.evaluation and inputs.held_out and "before" not in notes:
        limit = spec.evaluation.max_new_tokens
        score = evaluate(model, inputs.tokenizer, inputs.split.held_out, inputs.held_out, limit)
        notes["before"] = asdict(score)
        log("evaluated the base model", stage="train", run=job.run, exact_match=score.exact_match, loss=score.loss)
    trainer = build_trainer(model, spec, inputs, directory)
    meter = ProgressMeter(reporter, total_steps(trainer))
    for callback in (ReportProgress(meter), UploadCheckpoints(checkpoints, notes), StopWhenAsked(stop)):
        trainer.add_callback(callback)
    with stop.deferred():
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    return directory / f"checkpoint-{trainer.state.global_step}"


def build_trainer(model: Any, spec: JobSpec, inputs: Inputs, directory: Path) -> Any:
    """TRL's trainer with the spec's settings, and the plan's where the spec leaves them open."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    training, plan = spec.training, inputs.plan
    arguments = SFTConfig(
        output_dir=str(directory),
        max_steps=training.max_steps or -1,
        num_train_epochs=training.epochs,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_ratio,  # below 1 it is a share of the steps
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        activation_checkpointing=plan.gradient_checkpointing,
        gradient_checkpointing=plan.gradient_checkpointing,
        packing=plan.packing,
        max_length=training.max_length if plan.packing else None,  # the rows are cut already
        train_sampling_strategy="group_by_length" if plan.group_by_length else "random",
        bf16=plan.device.bf16,
        use_cpu=plan.device.kind == "cpu",
        dataloader_pin_memory=plan.device.kind == "cuda",
        save_strategy="steps",
        save_steps=training.checkpoint_steps,
        save_total_limit=2,
        logging_steps=LOGGING_STEPS,
        include_num_input_tokens_seen="non_padding",
        seed=training.seed,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        # Ids and labels are ours: the same code renders the prompts of training, evaluation and serving.
        train_dataset=Dataset.from_dict({"input_ids": inputs.train.input_ids, "labels": inputs.train.labels}),
        processing_class=inputs.tokenizer,
        peft_config=lora_config(spec),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def export_and_publish(
    spec: JobSpec, job: Job, client: Any, inputs: Inputs, checkpoint: Path, directory: Path
) -> artifacts.Manifest:
    """Merge, save, judge what was saved as a server will load it, upload it, and commit it with the manifest."""
    import export

    free_memory()  # of the trainer: two models on one GPU are one too many
    merged = export.merged_model(inputs.base, checkpoint, spec)
    export.save(merged, inputs.tokenizer, checkpoint, directory, spec)
    served = export.reload(directory, inputs.plan, spec)
    export.check_parity(merged, served, inputs.tokenizer, inputs.split.held_out or inputs.split.train)
    del merged
    notes = read_notes(checkpoint)
    metrics = training_metrics(checkpoint, notes, inputs)
    if spec.evaluation and inputs.held_out:
        limit = spec.evaluation.max_new_tokens
        before, after = (
            Score(**notes["before"]),
            evaluate(served, inputs.tokenizer, inputs.split.held_out, inputs.held_out, limit),
        )
        metrics |= {
            "exact_match": after.exact_match,
            "exact_match_before": before.exact_match,
            "loss": after.loss,
            "loss_before": before.loss,
        }
        log("evaluated the model", stage="train", run=job.run, exact_match=after.exact_match, loss=after.loss)
        shown = samples(inputs.split.held_out, before, after)
        (directory / "samples.json").write_text(json.dumps(shown, indent=2, ensure_ascii=False), encoding="utf-8")
    provenance = export.Provenance(inputs.base_source, inputs.data_source)
    export.write_card(directory, spec, provenance, metrics)
    return export.publish(client, job, directory, spec, provenance, metrics)


def load_spec(client: Any, job: Job) -> JobSpec:
    """The job spec of the run, from the runs bucket."""
    return parse_spec(client.bucket(job.bucket).blob(spec_object(job.run)).download_as_bytes())


def fetch_model(spec: JobSpec, client: Any, directory: Path) -> tuple[str, Source]:
    """The base model's files on disk, and what exactly they are."""
    source = spec.model.source
    if source.startswith("gs://"):
        artifacts.download_prefix(client, source, directory)
        if not (directory / "config.json").is_file():
            hint = "give the prefix that holds what save_pretrained wrote"
            raise missing(f"model.source {source!r} has no config.json", hint)
        return str(directory), Source(uri=source, revision=artifacts.prefix_revision(client, source))
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
    copies = ["original/*", "consolidated*"]  # the same weights once more, in another layout
    path = snapshot_download(source, revision=spec.model.revision, allow_patterns=files, ignore_patterns=copies)
    return path, Source(uri=source, revision=Path(path).name)  # the snapshot's directory is named by its commit


def check_gate(spec: JobSpec, split: data.Split) -> None:
    """Refuse, before training, a gate that no model could pass."""
    gate = spec.evaluation.gate if spec.evaluation else None
    if gate and gate.metric == "exact_match" and not all(row.messages for row in split.held_out):
        message = "evaluation.gate.metric is 'exact_match', but the rows are plain text: there is no answer to match"
        raise config_error(message, "use the metric 'loss', or rows with prompts and completions")


def load_base(inputs: Inputs, spec: JobSpec) -> Any:
    """The base model as it is trained: in 4 bits for QLoRA."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if spec.training.adapter.type == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if inputs.plan.device.kind == "cuda":
        options["device_map"] = {"": torch.cuda.current_device()}
    return AutoModelForCausalLM.from_pretrained(
        inputs.base,
        dtype=getattr(torch, inputs.plan.dtype),
        attn_implementation=inputs.plan.attention,
        trust_remote_code=spec.model.trust_remote_code,
        **options,
    )


def lora_config(spec: JobSpec) -> Any:
    """PEFT's configuration of the adapter; None for full fine-tuning."""
    from peft import LoraConfig

    adapter = spec.training.adapter
    if adapter.type == "none":
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
    )


def total_steps(trainer: Any) -> int:
    """The optimiser steps that training will make."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    batches = len(trainer.get_train_dataloader())
    updates = max(1, -(-batches // trainer.args.gradient_accumulation_steps))
    return int(-(-updates * trainer.args.num_train_epochs // 1))


def is_finished(checkpoint: Path) -> bool:
    """Whether nothing is left to train: resuming such a checkpoint would make one step too many."""
    state = read_state(checkpoint)
    return bool(state["global_step"] >= state["max_steps"])


def training_metrics(checkpoint: Path, notes: dict[str, Any], inputs: Inputs) -> dict[str, float | None]:
    """What training did, over all attempts, from its last checkpoint."""
    state = read_state(checkpoint)
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    seconds, tokens = float(notes["train_seconds"]), int(state["num_input_tokens_seen"])
    return {
        "train_loss": losses[-1] if losses else None,
        "steps": state["global_step"],
        "tokens": tokens,
        "train_seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "rows_train": len(inputs.train.input_ids),
        "rows_eval": len(inputs.split.held_out),
    }


def read_state(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / "trainer_state.json").read_text()))


def read_notes(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / "dropforge.json").read_text()))


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quiet_libraries() -> None:
    """One JSON line per stage is the log; progress bars and advice would drown it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advises the `kernels` package on a CPU
    warnings.filterwarnings("ignore", category=FutureWarning)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    code = main()
    # Threads of a transfer that was given up, or of gRPC, must not keep a container that has said its last word.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
