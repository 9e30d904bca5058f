"""The training container: fine-tunes the model of one job spec with TRL and leaves it, committed, in the runs bucket.

    DROPFORGE_PROJECT=p DROPFORGE_RUN=demo-0123456789ab DROPFORGE_ATTEMPT=1 DROPFORGE_RUNS_BUCKET=b \\
    DROPFORGE_JOB_EVENTS_TOPIC=projects/p/topics/job-events python train.py

Reads gs://b/runs/<run>/spec.json, writes gs://b/checkpoints/<run>/ and gs://b/models/<run>/. Exit codes: job.py.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import chat
import launch
import rows as data
from checkpoints import CheckpointStore
from evaluation import Score, evaluate, samples
from job import DONE, Job, JobError, Redactor, config_error, missing
from outcome import Outcome, outcome_of
from plan import Plan, device_map, find_device, keep_rows_per_step, make_plan, shape_of, use_threads
from report import FLUSH_SECONDS, ProgressMeter, Reporter
from stop import EVENT_SECONDS, UPLOAD_MARGIN_SECONDS, UPLOAD_SECONDS, Stopped, StopRequest
from world import World

from dropforge.base.log import log
from dropforge.base.names import spec_object
from dropforge.cloud.clients import Clients
from dropforge.cloud.container_secrets import load_secrets
from dropforge.run import artifacts
from dropforge.run.artifacts import Source
from dropforge.spec import JobSpec, parse_spec


def main(argv: Sequence[str] | None = None) -> int:
    """Run one attempt, or one rank of it. There are no arguments: what it must know is in the environment."""
    try:
        job = Job.from_environment()
    except JobError as error:
        log(error.message, stage="train", severity="ERROR", hint=error.hint)
        return error.exit_code
    redact, stop = Redactor(), StopRequest()
    reporter = Reporter(job, redact)
    try:
        with work_directory(job.world) as directory:
            outcome = outcome_of(lambda: run(job, directory, reporter, stop, redact), job, stop, redact)
            return conclude(job, outcome, directory, reporter)
    finally:
        reporter.close(EVENT_SECONDS if stop.reason == "preempted" else FLUSH_SECONDS)


def conclude(job: Job, outcome: Outcome, directory: Path, reporter: Reporter) -> int:
    """Tell how it ended, or, in a rank, leave that to the process that started it; returns the exit code."""
    world = job.world
    if world.rank is not None:
        outcome.write(directory, world.rank)
        # When all stop together the launcher has nobody to end, and nothing to complain of.
        return DONE if outcome.agreed else outcome.exit_code
    if world.machine == 0 or outcome.is_news:
        reporter.ended(outcome)
    return outcome.exit_code


def run(job: Job, directory: Path, reporter: Reporter, stop: StopRequest, redact: Redactor) -> Outcome:
    """One attempt from top to bottom: the committed manifest is its only result."""
    world = job.world
    stop.arm(job.deadline, wake=not world.sharded)  # ranks are told by the process that started them
    clients = Clients()
    load_secrets(clients, os.environ)
    client = clients.storage()
    checkpoints = CheckpointStore(client, job, reporter)
    try:
        if not world.sharded and is_committed(client, job, reporter):
            return Outcome.done()
        spec = load_spec(client, job)
        redact.learn(spec.secrets)
        if world.rank is None:  # a rank inherits it
            redact.guard_output()
        if world.starts_ranks:
            return launch.run_ranks(spec, job, directory, stop)
        quiet_libraries()
        inputs, checkpoint = prepare(spec, job, client, directory, reporter, checkpoints)
        if checkpoint is None or not is_finished(checkpoint):
            checkpoint = train(spec, job, inputs, directory / "trainer", checkpoint, checkpoints, reporter, stop)
        if world.sharded:
            import ranks

            ranks.leave()
        if world.main:
            manifest = export_and_publish(spec, job, client, inputs, checkpoint, directory / "export")
            stop.disarm()  # what remains takes less time than stopping would
            reporter.succeeded(manifest)
            log("succeeded", stage="train", run=job.run, attempt=manifest.attempt, metrics=manifest.metrics)
        checkpoints.wait()
        return Outcome.done()
    except Stopped as request:
        checkpoints.wait(max(UPLOAD_SECONDS, stop.seconds_left(job.grace_seconds) - UPLOAD_MARGIN_SECONDS))
        step = checkpoints.saved_step
        if world.first_here:
            log("stopped", stage="train", run=job.run, severity="WARNING", reason=request.reason, saved_step=step)
        return Outcome.stopped(request.reason, step, stop.agreed)
    finally:
        stop.disarm()
        checkpoints.close()


@contextmanager
def work_directory(world: World) -> Iterator[Path]:
    """One directory for all ranks of a machine."""
    if world.directory is not None:
        yield world.directory
        return
    # A rank that outlives the launcher may still write into it.
    with tempfile.TemporaryDirectory(prefix="dropforge-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def is_committed(client: Any, job: Job, reporter: Reporter) -> bool:
    """Whether an earlier attempt has made the model; it is told again, and nothing else is done."""
    committed = artifacts.read_manifest(client, job.bucket, job.run)
    if committed is None:
        return False
    log("the model is committed already", stage="train", run=job.run, attempt=committed.attempt)
    if job.world.machine == 0:
        reporter.succeeded(committed)
    return True


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

    def digest(self, checkpoint: Path | None) -> str:
        """The same for machines whose ranks will train alike."""
        plan = self.plan
        decided = (plan.batch_size, plan.gradient_accumulation_steps, plan.gradient_checkpointing, plan.packing)
        found = hashlib.sha256(repr((self.base_source, decided, checkpoint and checkpoint.name)).encode())
        for ids, labels in zip(self.train.input_ids, self.train.labels, strict=True):
            found.update(repr((ids, labels)).encode())
        return found.hexdigest()


def prepare(
    spec: JobSpec, job: Job, client: Any, directory: Path, reporter: Reporter, checkpoints: CheckpointStore
) -> tuple[Inputs, Path | None]:
    """The inputs, and the checkpoint to go on from: made once on every machine, and everywhere the same."""
    if not job.world.sharded:
        return read_inputs(spec, job, client, directory, reporter, checkpoints)
    import ranks

    ranks.join()
    if job.world.first_here:
        inputs, checkpoint = read_inputs(spec, job, client, directory, reporter, checkpoints)
        # A tokenizer with code of its own cannot be pickled.
        digest = inputs.digest(checkpoint)
        ranks.hand_over(directory, (replace(inputs, tokenizer=None), checkpoint, digest))
    else:
        inputs, checkpoint, digest = ranks.hand_over(directory)
        inputs = replace(inputs, tokenizer=chat.load_tokenizer(inputs.base, spec.model.trust_remote_code))
    use_threads(inputs.plan)
    checkpoints.launch = ranks.agree(digest)
    return inputs, checkpoint


def read_inputs(
    spec: JobSpec, job: Job, client: Any, directory: Path, reporter: Reporter, checkpoints: CheckpointStore
) -> tuple[Inputs, Path | None]:
    """Read checkpoint, model and data, refuse what cannot work, and decide how to train on this device."""
    world = job.world
    checkpoint = checkpoints.resume(directory / "trainer")
    device = find_device(world.processes)
    name = f"{world.size} x {device.name}" if world.sharded else device.name
    if world.main:
        reporter.started(checkpoints.saved_step, name)
    log("started", stage="train", run=job.run, device=name, resumed_step=checkpoints.saved_step)
    base, base_source = fetch_model(spec, client, directory / "base")
    tokenizer = chat.load_tokenizer(base, spec.model.trust_remote_code)
    raw, data_source = data.load_rows(spec.dataset, client, directory / "data")
    split = data.prepare(raw, spec.dataset, spec.evaluation, spec.training.seed)
    check_gate(spec, split)
    max_length, source = spec.training.max_length, spec.dataset.source
    encoded = chat.encode(tokenizer, split.train, max_length, source)
    held_out = chat.encode(tokenizer, split.held_out, max_length, source) if split.held_out else None
    plan = make_plan(spec, shape_of(base, spec.model.trust_remote_code), device, encoded.lengths, world.size)
    if checkpoint and (rows := read_notes(checkpoint).get("rows_per_step")):
        plan = keep_rows_per_step(plan, rows, world.size)
    use_threads(plan)
    log(
        "prepared",
        stage="train",
        run=job.run,
        rows_train=len(encoded.input_ids),
        rows_eval=len(split.held_out),
        rows_dropped=split.dropped + encoded.dropped,
        rows_truncated=encoded.truncated,
        ranks=world.size,
        batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        gradient_checkpointing=plan.gradient_checkpointing,
        packing=plan.packing,
        memory=str(plan.estimate),
    )
    return Inputs(base, base_source, data_source, tokenizer, split, encoded, held_out, plan), checkpoint


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
    from trainer import build_trainer

    world = job.world
    notes = {"rows_per_step": inputs.plan.rows_per_step(world.size)} | (read_notes(resumed) if resumed else {})
    model = load_and_evaluate(spec, job, inputs, notes)
    trainer = build_trainer(model, spec, inputs.train, inputs.tokenizer, inputs.plan, directory)
    if world.sharded:
        shard(trainer, job)
    if resumed:
        fit_checkpoint(resumed, trainer, world)
    meter = ProgressMeter(reporter, trainer.total_steps())
    for callback in (ReportProgress(meter), UploadCheckpoints(checkpoints, notes, world), StopWhenAsked(stop)):
        trainer.add_callback(callback)
    with stop.deferred():
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    return directory / f"checkpoint-{trainer.state.global_step}"


def load_and_evaluate(spec: JobSpec, job: Job, inputs: Inputs, notes: dict[str, Any]) -> Any:
    """The base model as it is trained. How good it is before comes into `notes`, once per run."""
    alone, model = not job.world.sharded, None
    if job.world.main and spec.evaluation and inputs.held_out and "before" not in notes:
        model = load_base(inputs, spec, device_map(inputs.plan.device, spread=not alone))
        notes["before"] = asdict(evaluate_base(model, spec, job, inputs))
    if alone:
        return model or load_base(inputs, spec, device_map(inputs.plan.device))
    del model  # it is whole; what ranks shard is loaded in another way, by all of them at once
    free_memory()
    return load_base(inputs, spec, None)


def shard(trainer: Any, job: Job) -> None:
    """Have accelerate shard the model, or refuse to train."""
    import ranks

    ranks.check_sharding(trainer.accelerator)
    wrapped = ranks.use_wrap_classes(trainer, trainer.model)
    if job.world.main:
        log("sharding", stage="train", run=job.run, fsdp_version=2, ranks=job.world.size, wrapped=wrapped)


def fit_checkpoint(checkpoint: Path, trainer: Any, world: World) -> None:
    """An attempt may have other ranks than the one before it, or none."""
    import reshard

    if world.first_here:
        reshard.fit(checkpoint, trainer, sharded=world.sharded)
    if world.sharded:
        import ranks

        ranks.wait_for_all()


def evaluate_base(model: Any, spec: JobSpec, job: Job, inputs: Inputs) -> Score:
    """How good the model is before training."""
    assert spec.evaluation is not None
    assert inputs.held_out is not None
    limit = spec.evaluation.max_new_tokens
    score = evaluate(model, inputs.tokenizer, inputs.split.held_out, inputs.held_out, limit)
    log("evaluated the base model", stage="train", run=job.run, exact_match=score.exact_match, loss=score.loss)
    return score


def export_and_publish(
    spec: JobSpec, job: Job, client: Any, inputs: Inputs, checkpoint: Path, directory: Path
) -> artifacts.Manifest:
    """Merge, save, judge what was saved as a server will load it, upload it, and commit it with the manifest."""
    import export

    free_memory()  # of the trainer: two models on one GPU are one too many
    merged = export.merged_model(inputs.base, checkpoint, spec)
    export.save(merged, inputs.tokenizer, checkpoint, directory, spec)
    served = export.reload(directory, device_map(inputs.plan.device, spread=job.world.sharded), spec)
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


def fetch_model(spec: JobSpec, client: Any, directory: Path, *, weights: bool = True) -> tuple[str, Source]:
    """The base model's files on disk, and what exactly they are; the Hub's come without `weights` if need be."""
    source = spec.model.source
    if source.startswith("gs://"):
        artifacts.download_prefix(client, source, directory)
        if not (directory / "config.json").is_file():
            hint = "give the prefix that holds what save_pretrained wrote"
            raise missing(f"model.source {source!r} has no config.json", hint)
        return str(directory), Source(uri=source, revision=artifacts.prefix_revision(client, source))
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", *(["*.safetensors"] if weights else [])]
    copies = ["original/*", "consolidated*"]  # the same weights once more, in another layout
    path = snapshot_download(source, revision=spec.model.revision, allow_patterns=files, ignore_patterns=copies)
    return path, Source(uri=source, revision=Path(path).name)  # the snapshot's directory is named by its commit


def check_gate(spec: JobSpec, split: data.Split) -> None:
    """Refuse, before training, a gate that no model could pass."""
    gate = spec.evaluation.gate if spec.evaluation else None
    if gate and gate.metric == "exact_match" and not all(row.messages for row in split.held_out):
        message = "evaluation.gate.metric is 'exact_match', but the rows are plain text: there is no answer to match"
        raise config_error(message, "use the metric 'loss', or rows with prompts and completions")


def load_base(inputs: Inputs, spec: JobSpec, placed: Any) -> Any:
    """The base model as it is trained: in 4 bits for QLoRA. `placed` is its device map; None where FSDP places it."""
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
    if placed is not None:
        options["device_map"] = placed
    return AutoModelForCausalLM.from_pretrained(
        inputs.base,
        dtype=getattr(torch, inputs.plan.dtype),
        attn_implementation=inputs.plan.attention,
        trust_remote_code=spec.model.trust_remote_code,
        **options,
    )


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
