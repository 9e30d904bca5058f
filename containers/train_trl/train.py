"""The training container: fine-tunes the model of one job spec with TRL and commits it to the runs bucket.

    DROPFORGE_PROJECT=p DROPFORGE_RUN=demo-0123456789ab DROPFORGE_ATTEMPT=1 DROPFORGE_RUNS_BUCKET=b \\
    DROPFORGE_JOB_EVENTS_TOPIC=projects/p/topics/job-events python -m containers.train_trl.train

On a machine without a GPU, DROPFORGE_CPU_STANDS_IN=1 lets the CPU train.

Reads the spec that the function `access` gives or, without that function, gs://b/runs/<run>/spec.json. Writes
gs://b/checkpoints/<run>/ and gs://b/models/<run>/. Exit codes: containers/common/errors.py.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from containers.common import chat, evaluation, fit, sealing
from containers.common.attempt import Attempt, exit_now, run_attempt
from containers.common.checkpoints import NOTES
from containers.common.evaluation import AnswerLimit, Score
from containers.common.job import Job
from containers.common.model import base_day, fetch_model
from containers.common.outcome import Outcome
from containers.common.publish import Metrics, Provenance, publish, write_card
from containers.common.report import ProgressMeter
from containers.common.tokenise import TokenCache, Tokeniser
from containers.common.training_template import training_tokenizer
from containers.common.watchdog import Watchdog
from containers.common.world import World
from dropforge.base.log import log
from dropforge.fit.phases import LOSS_TOKENS
from dropforge.run.artifacts import Manifest, Source
from dropforge.spec import JobSpec

from . import launch
from .methods import Examples, Method, load_method
from .plan import (
    Device,
    Plan,
    device_map,
    device_map_of,
    dtype_of,
    find_device,
    keep_rows_per_step,
    make_plan,
    shape_of,
    use_threads,
)

REHEARSED_ROWS = 32  # whose prompts the saved tokenizer must make again
CURVE_ROWS = 32  # of the curve of the held-out loss
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")


def main() -> int:
    """Run one attempt, or one rank of it. The environment is the only input."""
    return run_attempt(run, work_directory)


def run(attempt: Attempt) -> Outcome:
    """One attempt from start to end. Its only result is the committed manifest."""
    world = attempt.job.world
    if not world.sharded and attempt.resend_success():
        return Outcome.done()
    spec = attempt.load_spec()
    if world.rank is None:  # a rank inherits the guarded output
        attempt.redact.guard_output()
        launch.check_gpus(spec)
    if world.starts_ranks:
        return launch.run_ranks(spec, attempt.job, attempt.directory, attempt.stop)
    quiet_libraries()
    inputs, checkpoint = prepare(spec, attempt)
    if checkpoint is None or not is_finished(checkpoint):
        checkpoint = train(spec, attempt, inputs, checkpoint)
    if world.sharded:
        from . import ranks

        ranks.leave()
    if world.main:
        attempt.succeed(export_and_publish(spec, attempt, inputs, checkpoint))
    attempt.checkpoints.wait()
    return Outcome.done()


@contextmanager
def work_directory(job: Job) -> Iterator[Path]:
    """The directory that all ranks of a machine share."""
    if job.world.directory is not None:
        yield job.world.directory
        return
    # A rank that outlives the launcher may still write into the directory.
    with tempfile.TemporaryDirectory(prefix="dropforge-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Inputs:
    """The input of training and export: read, checked and decided before both."""

    base: str
    base_source: Source
    tokenizer: Any
    examples: Examples
    plan: Plan
    limit: AnswerLimit
    template_date: date | None = None  # that the tokenizer's chat template always shows

    def digest(self, checkpoint: Path | None) -> str:
        """Equal on machines whose ranks train alike."""
        plan = self.plan
        settings = (plan.batch_size, plan.gradient_accumulation_steps, plan.gradient_checkpointing, plan.packing)
        digest = hashlib.sha256(repr((self.base_source, settings, checkpoint and checkpoint.name)).encode())
        for rows in self.examples.columns.values():
            digest.update(rows.starts.tobytes() + rows.values.tobytes())
        return digest.hexdigest()


def prepare(spec: JobSpec, attempt: Attempt) -> tuple[Inputs, Path | None]:
    """The inputs and the checkpoint to resume: read once on every machine, and equal on all machines."""
    if not attempt.job.world.sharded:
        return read_inputs(spec, attempt)
    from . import ranks

    ranks.join()
    if attempt.job.world.first_here:
        inputs, checkpoint = read_inputs(spec, attempt)
        # A tokenizer with code of its own cannot be pickled.
        digest = inputs.digest(checkpoint)
        template = inputs.tokenizer.chat_template
        ranks.hand_over(attempt.directory, (replace(inputs, tokenizer=None), template, checkpoint, digest))
    else:
        inputs, template, checkpoint, digest = ranks.hand_over(attempt.directory)
        tokenizer = chat.load_tokenizer(inputs.base, spec.model.trust_remote_code, template)
        inputs = replace(inputs, tokenizer=tokenizer)
    use_threads(inputs.plan)
    attempt.checkpoints.launch = ranks.agree(digest)
    return inputs, checkpoint


def read_inputs(spec: JobSpec, attempt: Attempt) -> tuple[Inputs, Path | None]:
    """Read checkpoint, model and data, refuse impossible work, and plan the training for this device."""
    world, checkpoints, directory = attempt.job.world, attempt.checkpoints, attempt.directory
    checkpoint = checkpoints.resume(directory / "trainer")
    device = find_device(world.processes)
    name = f"{world.size} x {device.name}" if world.sharded else device.name
    if world.main:
        attempt.reporter.started(checkpoints.saved_step, name)
    log("started", stage="train", run=attempt.job.run, device=name, resumed_step=checkpoints.saved_step)
    check_phases(spec, attempt.client, directory, device)
    base, base_source = fetch_model(spec, attempt.client, directory / "base")
    method = load_method(spec.training.method)
    cache = TokenCache.of(attempt.job, attempt.client, directory / "tokens")
    tokenizer, shown = training_tokenizer(base, spec.model, lambda: template_day(spec, attempt, base_source))
    tokeniser = Tokeniser(tokenizer, base, spec.model.trust_remote_code, spec.training.method, cache)
    examples = method.read_examples(spec, tokeniser, attempt.client, directory / "data")
    shape = shape_of(base, spec.model.trust_remote_code)
    plan = make_plan(spec, shape, device, examples.lengths, world.size)
    if checkpoint and (rows := read_notes(checkpoint).get("rows_per_step")):
        plan = keep_rows_per_step(plan, rows, world.size)
    use_threads(plan)
    from . import export

    rows = examples.split.held_out or examples.split.train[:REHEARSED_ROWS]
    export.rehearse(Path(base), tokenizer, rows, directory / "rehearsal", spec)
    limit = evaluation.answer_limit(spec, tokenizer, examples.split.held_out, examples.held_out)
    log_plan(spec, attempt.job, examples, plan, limit)
    return Inputs(base, base_source, tokenizer, examples, plan, limit, shown), checkpoint


def template_day(spec: JobSpec, attempt: Attempt, base: Source) -> date:
    """The date for a chat template that shows today's: the adapters of a shared endpoint have one template."""
    if spec.serve is not None and spec.serve.share:
        return base_day(attempt.client, base)
    return attempt.job.day(attempt.client)


def check_phases(spec: JobSpec, client: Any, directory: Path, device: Device) -> None:
    """Refuse, before anything is downloaded, a run whose phases do not fit this machine. Raises JobError."""
    machine = spec.target.machine
    if device.kind == "cuda":
        machine = replace(machine, accelerator=device.name, accelerator_bytes=device.memory_bytes)
    fit.check(spec, client, directory, machine)


def log_plan(spec: JobSpec, job: Job, examples: Examples, plan: Plan, limit: AnswerLimit) -> None:
    rows_per_step = rows_of_a_step(spec, plan, examples.lengths, job.world.size)
    log(
        "prepared",
        stage="train",
        run=job.run,
        rows_train=len(examples.lengths),
        rows_eval=len(examples.split.held_out),
        rows_dropped=examples.dropped,
        rows_truncated=examples.truncated,
        ranks=job.world.size,
        batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        gradient_checkpointing=plan.gradient_checkpointing,
        packing=plan.packing,
        rows_per_step=rows_per_step,
        tokens_per_step=round(rows_per_step * sum(examples.lengths) / len(examples.lengths)),
        memory=str(plan.estimate),
        max_new_tokens=limit.tokens,
    )
    evaluation.warn_of_long_answers(limit, job.run)


def rows_of_a_step(spec: JobSpec, plan: Plan, lengths: list[int], processes: int) -> float:
    """The rows of the data set in one optimiser step; with packing, on average over the blocks."""
    batch = plan.rows_per_step(processes)
    if not plan.packing:
        return batch
    blocks = -(-sum(lengths) // spec.training.max_length)
    return round(batch * len(lengths) / blocks, 1)


def train(spec: JobSpec, attempt: Attempt, inputs: Inputs, resumed: Path | None) -> Path:
    """Evaluate the base model, then train; returns the last checkpoint. Raises Stopped once it is saved."""
    from .callbacks import MeasureHeldOut, ReportProgress, StopOnRequest, TellWatchdog, UploadCheckpoints, load_now
    from .trainer import freeze_other_parts, keep_gradients, keep_precision

    world, directory = attempt.job.world, attempt.directory / "trainer"
    method = load_method(spec.training.method)
    notes = {"rows_per_step": inputs.plan.rows_per_step(world.size)} | (read_notes(resumed) if resumed else {})
    model = load_and_evaluate(spec, attempt.job, inputs, notes, method)
    freeze_other_parts(model)
    trainer = method.build_trainer(model, spec, inputs.examples.columns, inputs.tokenizer, inputs.plan, directory)
    keep_precision(trainer.model, inputs.plan)
    keep_gradients(trainer.model)
    if world.sharded:
        shard(trainer, attempt.job)
    if resumed:
        fit_checkpoint(resumed, trainer, world)
    meter = ProgressMeter(attempt.reporter, trainer.total_steps(), load=load_now)
    uploads = UploadCheckpoints(attempt.checkpoints, notes, world)
    if spec.evaluation and inputs.examples.held_out:
        loss_of, every = held_out_loss(inputs, trainer.total_steps(), world.size)
        trainer.add_callback(MeasureHeldOut(meter, loss_of, every))
    watchdog = Watchdog(f"rank {world.rank}" if world.sharded else "the training", attempt.fail)
    for callback in (TellWatchdog(watchdog), ReportProgress(meter), uploads, StopOnRequest(attempt.stop)):
        trainer.add_callback(callback)
    with attempt.stop.deferred(), watchdog:
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    return directory / f"checkpoint-{trainer.state.global_step}"


def held_out_loss(inputs: Inputs, steps: int, processes: int) -> tuple[Callable[[Any], float], int]:
    """The loss of a model in training on the first held-out rows, and after how many steps it is measured."""
    held_out, plan = inputs.examples.held_out, inputs.plan
    assert held_out is not None, "the caller has held-out rows"
    rows = held_out[:CURVE_ROWS]
    # No batch takes more memory than one of the training.
    most_tokens = min(LOSS_TOKENS, plan.batch_size * max(inputs.examples.lengths))
    every = evaluation.steps_between(steps, plan.rows_per_step(processes), len(rows.lengths))
    return lambda model: evaluation.mean_loss(model, inputs.tokenizer, rows, most_tokens), every


def load_and_evaluate(spec: JobSpec, job: Job, inputs: Inputs, notes: dict[str, Any], method: Method) -> Any:
    """The base model, ready to train. Adds its score to `notes`, once per run."""
    alone, model = not job.world.sharded, None
    if job.world.main and spec.evaluation and inputs.examples.held_out and "before" not in notes:
        model = load_to_judge(inputs, spec, spread=not alone)
        score = method.evaluate(model, inputs.tokenizer, inputs.examples, inputs.limit.tokens)
        log("evaluated the base model", stage="train", run=job.run, exact_match=score.exact_match, loss=score.loss)
        notes["before"] = asdict(score)
    if model is not None and alone and trains_as_saved(inputs, spec):
        return model
    del model  # ranks load the whole model together, to shard it; QLoRA loads it in 4 bits
    free_memory()
    return load_base(inputs, spec, device_map(inputs.plan.device) if alone else None)


def load_to_judge(inputs: Inputs, spec: JobSpec, *, spread: bool) -> Any:
    """The base model in the precision in which the exported model is judged."""
    from . import export

    if trains_as_saved(inputs, spec):
        return load_base(inputs, spec, device_map(inputs.plan.device, spread=spread))
    base = Path(inputs.base)
    return export.load(base, device_map_of(base, inputs.plan.device, spec, spread=spread), spec)


def trains_as_saved(inputs: Inputs, spec: JobSpec) -> bool:
    """Whether the base model is trained in the precision of its files."""
    from . import export

    saved = export.base_dtype(Path(inputs.base), spec)
    return spec.training.adapter.type != "qlora" and saved == dtype_of(inputs.plan.dtype)


def load_base(inputs: Inputs, spec: JobSpec, placement: Any) -> Any:
    """The base model to train, in 4 bits for QLoRA. `placement` is its device map; None lets FSDP place it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from . import export

    dtype = dtype_of(inputs.plan.dtype)
    options: dict[str, Any] = {}
    if spec.training.adapter.type == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,  # without instructions for 16 bits, a CPU multiplies them 14 times slower
        )
    if placement is not None:
        options["device_map"] = placement
    model = AutoModelForCausalLM.from_pretrained(
        inputs.base,
        dtype=dtype,
        attn_implementation=inputs.plan.attention,
        trust_remote_code=spec.model.trust_remote_code,
        **options,
    )
    model.generation_config = export.generation_settings(Path(inputs.base), spec)  # a checkpoint of all weights has it
    return model


def shard(trainer: Any, job: Job) -> None:
    """Let accelerate shard the model. Raises JobError if it would not."""
    from . import ranks

    ranks.check_sharding(trainer.accelerator)
    wrapped = ranks.use_wrap_classes(trainer, trainer.model)
    if job.world.main:
        log("sharding", stage="train", run=job.run, fsdp_version=2, ranks=job.world.size, wrapped=wrapped)


def fit_checkpoint(checkpoint: Path, trainer: Any, world: World) -> None:
    """Convert a checkpoint of another number of ranks, or of a single process."""
    from . import reshard

    if world.first_here:
        reshard.fit(checkpoint, trainer, sharded=world.sharded)
    if world.sharded:
        from . import ranks

        ranks.wait_for_all()


def export_and_publish(spec: JobSpec, attempt: Attempt, inputs: Inputs, checkpoint: Path) -> Manifest:
    """Merge and save the model, load it as a server does, judge it, upload it, and commit the manifest."""
    from . import export

    job, directory, examples = attempt.job, attempt.directory / "export", inputs.examples
    method = load_method(spec.training.method)
    free_memory()  # of the trainer: a GPU may not hold two models
    export.save(Path(inputs.base), checkpoint, inputs.tokenizer, directory, spec)
    served, links = load_export(spec, job, inputs, checkpoint, directory)
    notes = read_notes(checkpoint)
    metrics = training_metrics(checkpoint, notes, examples)
    metrics["rows_per_step"] = rows_of_a_step(spec, inputs.plan, examples.lengths, job.world.size)
    if spec.evaluation and examples.held_out:
        before = Score(**notes["before"])
        after = method.evaluate(served, inputs.tokenizer, examples, inputs.limit.tokens)
        log("evaluated the model", stage="train", run=job.run, exact_match=after.exact_match, loss=after.loss)
        metrics |= method.metrics(before, after)
        metrics |= {"max_new_tokens": inputs.limit.tokens, "answers_beyond": inputs.limit.beyond}
        evaluation.write_samples(directory, examples.split.held_out, before.answers, after.answers)
    metrics |= links
    seal_export(spec, job, inputs, served, directory, links)
    provenance = Provenance(inputs.base_source, examples.source, examples.split.unused, inputs.template_date)
    write_card(directory, spec, method.describe(spec), provenance, metrics)
    return publish(attempt.client, job, directory, spec, provenance, metrics, VERSIONS)


def load_export(
    spec: JobSpec, job: Job, inputs: Inputs, checkpoint: Path, directory: Path
) -> tuple[Any, dict[str, float]]:
    """The exported model, and how far each link of the export differs. Raises JobError if one differs too far."""
    from . import export, parity

    examples = inputs.examples
    export.check_prompts(
        directory, inputs.tokenizer, examples.split.held_out or examples.split.train[:REHEARSED_ROWS], spec
    )
    base = Path(inputs.base)
    placement = device_map_of(base, inputs.plan.device, spec, spread=job.world.sharded)
    if spec.training.adapter.type == "none":
        served = export.reload(directory, placement, spec)
        export.check_weights(directory, served)
        return served, {"saved_to_reloaded": 0.0}
    rows = examples.held_out.input_ids if examples.held_out else examples.columns["input_ids"]
    trained = export.trained_model(base, checkpoint, placement, spec)
    expected = parity.log_probabilities(trained, rows)
    del trained
    free_memory()
    served = export.reload(directory, placement, spec)
    divergence = parity.check(expected, served, rows)
    if export.shares(spec):
        log("compared the export", stage="train", run=job.run, divergence=divergence)
        return served, {"adapter_to_saved": divergence}
    count = export.check_weights(directory, served)
    log("compared the export", stage="train", run=job.run, divergence=divergence, tensors=count)
    return served, {"adapter_to_merged": divergence, "saved_to_reloaded": 0.0}


def seal_export(spec: JobSpec, job: Job, inputs: Inputs, served: Any, directory: Path, links: dict[str, float]) -> None:
    """Write what an endpoint of the exported model must answer (seal.json)."""
    split = inputs.examples.split
    made = sealing.write_seal(directory, served, inputs.tokenizer, split.held_out or split.train, spec, links)
    if made is None:
        log("no row is short enough for a seal: the model is not sealed", stage="train", run=job.run)
    else:
        log("sealed the model", stage="train", run=job.run, rows=len(made.rows), **made.noise.model_dump())


def is_finished(checkpoint: Path) -> bool:
    """Whether training is complete: resuming such a checkpoint would train one step too many."""
    state = read_state(checkpoint)
    return bool(state["global_step"] >= state["max_steps"])


def training_metrics(checkpoint: Path, notes: dict[str, Any], examples: Examples) -> Metrics:
    """The metrics of training over all attempts, from the last checkpoint."""
    state = read_state(checkpoint)
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    seconds, tokens = float(notes["train_seconds"]), int(state["num_input_tokens_seen"])
    return {
        "train_loss": losses[-1] if losses else None,
        "steps": state["global_step"],
        "tokens": tokens,
        "tokens_per_step": round(tokens / state["global_step"], 1),
        "train_seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "rows_train": len(examples.lengths),
        "rows_eval": len(examples.split.held_out),
        "rows_truncated": examples.truncated,
        "rows_dropped": examples.dropped,
        "answers_given": examples.answers[0],
        "answers_learnt": examples.answers[1],
    }


def read_state(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / "trainer_state.json").read_text()))


def read_notes(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / NOTES).read_text()))


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quiet_libraries() -> None:
    """Turn off progress bars and advice, which would hide the log of one JSON line per stage, and needless imports."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # recommends the `kernels` package on a CPU
    warnings.filterwarnings("ignore", category=FutureWarning)
    import torch

    if not torch.cuda.is_available():
        # bitsandbytes decorates the substitutes of its kernels with torch.compile, whose import takes two seconds.
        # Nothing compiles on a CPU. torch._dynamo.optimize reads the variable.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    exit_now(main())
