"""The train stage: MaxText's trainer on dropforge's rows. A Ray worker calls `train` alone.

The methods differ in the rows, and in the weights that training starts with: the base model's, or random weights.

MaxText takes any error of its data loader for the end of the data, saves a checkpoint and ends with 0. Batches come
from dropforge here, so that an error stays an error; the verify stage still asks for the last step.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from containers.common.evaluation import steps_between
from containers.common.watchdog import Watchdog
from dropforge.spec import JobSpec
from dropforge.spec.methods import method_of

from .batches import Data
from .imports import quick_imports
from .maxtext_settings import common
from .prepare import step_size, total_steps
from .stages import stage_main
from .work import Result, Work

Report = Callable[..., None]


def run(work: Work) -> Result:
    """Train in this process. SIGTERM stops with a checkpoint; DIRECTORY/progress.jsonl gets a line per step."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    with work.progress.open("a", buffering=1) as file:

        def report(**fields: Any) -> None:
            file.write(json.dumps(fields) + "\n")

        watchdog = Watchdog("the training", lambda error: work.write_result("train", {"error": error.to_json()}))
        return train(work, report, lambda: bool(signals), watchdog)


def train(work: Work, report: Report, stop: Callable[[], bool], watchdog: Watchdog) -> Result:
    """Train to the last step, or to the next step once `stop` is true; resumes the newest checkpoint.

    The result has the last step, and from before and after: the loss on the probe rows, and the held-out rows' scores.
    """
    with quick_imports():
        import jax
        from maxtext.configs import pyconfig
        from maxtext.trainers.post_train.sft import train_sft

        from .hooks import BatchHooks, Curve, StepHooks, judge, probe_loss

    parse_flags()
    spec, prepared, data = work.spec, work.done("prepare"), Data.load(work.rows)
    steps, size = total_steps(spec, prepared, jax.device_count()), step_size(spec, prepared, jax.device_count())
    settings = [*common(prepared), *arguments(spec, prepared, work, steps, initial_weights(spec, work))]
    config = pyconfig.initialize_pydantic([train_sft.__file__, *settings])
    train_sft.validate_config(config)
    write_no_metrics(train_sft)
    trainer, mesh = train_sft.setup_trainer_state(config)
    accumulate_in_optimizer(trainer)
    resumed = trainer.train_steps
    source = batches(data, config.micro_batch_size_to_train_on, spec, resumed, steps, stop)
    batch_hooks = BatchHooks(config, mesh, source)
    now = (trainer, mesh, config, data, batch_hooks)

    def report_step(**fields: Any) -> None:
        watchdog.step()
        report(**fields)

    curve = None
    if spec.evaluation and prepared["rows_eval"]:
        curve = Curve(lambda: probe_loss(*now), steps_between_probes(config, data, steps))
    step_hooks = StepHooks(report_step, steps, curve)
    trainer.with_data_hooks(batch_hooks)
    trainer.with_training_hooks(step_hooks)
    before, judged_before = (probe_loss(*now), judge(*now)) if resumed == 0 else (None, None)
    report(step=resumed, total_steps=steps, loss_before=before, judged_before=judged_before, **size)
    began = time.monotonic()
    with watchdog:
        train_sft.train_model(config, trainer, mesh)
    seconds = time.monotonic() - began
    reached = int(trainer.train_steps)
    stopped = stop() and reached < steps
    measured = step_hooks.measured.get(reached, {}).get("held_out_loss")
    return {
        "step": reached,
        "total_steps": steps,
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
        "stopped": stopped,
        "loss_before": before,
        "judged_before": judged_before,
        "loss": None if stopped else probe_loss(*now) if measured is None else measured,
        "judged": None if stopped else judge(*now),
        "train_seconds": round(seconds, 3),
        **size,
        **step_hooks.summary(),
    }


def steps_between_probes(config: Any, data: Data, steps: int) -> int:
    """After how many steps the loss on the probe rows is measured again. Every sequence of a batch costs the same."""
    batches = data.probes(config.micro_batch_size_to_eval_on)
    probed = len(batches) * config.micro_batch_size_to_eval_on
    trained = config.micro_batch_size_to_train_on * config.gradient_accumulation_steps
    return steps_between(steps, trained, probed)


def parse_flags() -> None:
    """Parse absl's flags outside of absl's app.run: grain reads flags, and fails if they are not parsed."""
    from absl import flags, logging

    if not flags.FLAGS.is_parsed():
        flags.FLAGS([sys.argv[0]])
    logging.set_verbosity(logging.INFO)


def initial_weights(spec: JobSpec, work: Work) -> str:
    """The imported weights to start with; "" where a checkpoint has all weights, or the seed makes them."""
    if work.checkpoints.exists() or not method_of(spec.training.method).starts_from_base:
        return ""
    return str(work.done("import")["parameters"])


def write_no_metrics(train_sft: Any) -> None:
    """Take the metrics logger out of the settings that MaxText makes for Tunix.

    MaxText 0.2.5 names its `tensorboard_dir` there, whatever enable_tensorboard says. Tunix then writes below the
    output directory, on a Ray cluster the runs bucket, with the account's own credentials instead of the run's token.
    """
    make = train_sft.get_tunix_config
    train_sft.get_tunix_config = lambda config: replace(make(config), metrics_logging_options=None)


def accumulate_in_optimizer(trainer: Any) -> None:
    """Make MaxText's train step work with Tunix 0.1.7's gradient accumulation.

    Tunix 0.1.7 accumulates gradients in the optimizer (optax.MultiSteps): every batch is a step of the optimizer.
    MaxText 0.2.5's train step expects an accumulator that only later versions of Tunix give it. It fails without one,
    unless it is made for a single batch per step.
    """
    create, config = trainer.create_train_step_fn, trainer.config

    def create_for_one_batch() -> Any:
        trainer.config = replace(config, gradient_accumulation_steps=None)
        try:
            return create()
        finally:
            trainer.config = config

    trainer.create_train_step_fn = create_for_one_batch


def arguments(spec: JobSpec, prepared: Result, work: Work, steps: int, parameters: str) -> list[str]:
    """The spec's settings, under MaxText's names."""
    training, tpu = spec.training, bool(prepared["tpu"])
    return [
        f"base_output_directory={work.training}",
        *([f"load_parameters_path={parameters}"] if parameters else []),
        f"hardware={'tpu' if tpu else 'cpu'}",
        # Master weights and Adam's moments in 32 bits: 16 bits lose small updates.
        "weight_dtype=float32",
        f"dtype={'bfloat16' if tpu else 'float32'}",
        f"attention={'autoselected' if tpu else 'dot_product'}",
        f"remat_policy={'minimal' if training.gradient_checkpointing is False else 'full'}",
        "dataset_type=synthetic",  # BatchHooks replace it
        f"packing={str(prepared['packing']).lower()}",
        f"per_device_batch_size={prepared['batch_size']}",
        f"gradient_accumulation_steps={training.gradient_accumulation_steps}",
        f"max_target_length={prepared['length']}",
        f"steps={steps}",
        *schedule(spec, steps),
        f"learning_rate={training.learning_rate}",
        f"gradient_clipping_threshold={training.max_grad_norm}",
        f"adam_weight_decay={training.weight_decay}",
        f"adam_b1={training.adam_beta1}",
        f"adam_b2={training.adam_beta2}",
        f"adam_eps={training.adam_epsilon}",
        f"checkpoint_period={training.checkpoint_steps}",
        "eval_interval=-1",
        f"init_weights_seed={training.seed}",
        "enable_tensorboard=false",
    ]


def schedule(spec: JobSpec, steps: int) -> list[str]:
    """The learning rate's schedule. MaxText has two kinds: cosine, and warm-up, stable, decay."""
    training = spec.training
    kind, warmup = training.lr_scheduler_type, training.warmup_ratio
    if training.warmup_steps is not None:
        # MaxText cuts the product of this share and the steps to a whole number.
        warmup = min(1.0, (training.warmup_steps + 0.5) / steps) if training.warmup_steps else 0.0
    if kind == "cosine":
        return ["lr_schedule_type=cosine", f"warmup_steps_fraction={warmup}", "learning_rate_final_fraction=0"]
    if kind == "linear":
        decay = ["learning_rate_final_fraction=0", f"wsd_decay_steps_fraction={1 - warmup}"]
        return ["lr_schedule_type=wsd", f"warmup_steps_fraction={warmup}", *decay]
    warmup = warmup if kind == "constant_with_warmup" else 0.0
    return ["lr_schedule_type=wsd", f"warmup_steps_fraction={warmup}", "wsd_decay_steps_fraction=0"]


def batches(
    data: Data, size: int, spec: JobSpec, resumed: int, steps: int, stop: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """Batches up to the last step, or up to the end of the current step after a request to stop."""
    accumulation = spec.training.gradient_accumulation_steps
    for step in range(resumed, steps):
        if stop():
            return
        for micro in range(accumulation):
            yield data.batch(step * accumulation + micro, size, spec.training.seed)


if __name__ == "__main__":
    sys.exit(stage_main("train", run))
