"""The train stage: MaxText's trainer on rows of ours. `train` is all that a Ray worker needs.

The methods differ in the weights that they begin with: "sft" with the base model's, "pretrain" with random ones.

MaxText takes any error of its data loader for the end of the data, saves a checkpoint and ends with 0. Batches are ours
here, so that an error stays one; the verify stage asks for the last step all the same.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from batches import Data, part
from job import INTERNAL, JobError
from maxtext_settings import common
from prepare import total_steps
from stages import Result, Work, stage_main

from dropforge.base.errors import ErrorClass
from dropforge.spec import JobSpec

Tell = Callable[..., None]


def run(work: Work) -> Result:
    """Train in this process: stop with a checkpoint at SIGTERM, tell of each step in DIRECTORY/progress.jsonl."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    with work.progress.open("a", buffering=1) as file:

        def tell(**fields: Any) -> None:
            file.write(json.dumps(fields) + "\n")

        return train(work, tell, lambda: bool(asked))


def train(work: Work, tell: Tell, stop: Callable[[], bool]) -> Result:
    """Train up to the last step, or to the next one once `stop` says so; goes on from the newest checkpoint there.

    The result has the step reached, and the loss on the probe rows before and after.
    """
    import jax
    from absl import flags, logging
    from maxtext.configs import pyconfig
    from maxtext.trainers.post_train.sft import train_sft

    if not flags.FLAGS.is_parsed():  # outside of absl's app.run: grain reads flags, and fails where they are not parsed
        flags.FLAGS([sys.argv[0]])
    logging.set_verbosity(logging.INFO)
    spec, prepared, data = work.spec, work.done("prepare"), Data.load(work.rows)
    steps = total_steps(spec, prepared, jax.device_count())
    # A checkpoint has all weights; without one, and without parameters, the seed makes them.
    imported = spec.training.method != "pretrain" and not work.checkpoints.exists()
    parameters = work.done("import")["parameters"] if imported else ""
    config = pyconfig.initialize_pydantic(
        [train_sft.__file__, *common(prepared), *arguments(spec, prepared, work, steps, parameters)]
    )
    train_sft.validate_config(config)
    trainer, mesh = train_sft.setup_trainer_state(config)
    accumulate_in_optimizer(trainer)
    resumed = trainer.train_steps
    size = config.micro_batch_size_to_train_on
    source = batches(data, size, spec, resumed, steps, stop)
    hooks = make_hooks(config, mesh, source, tell, steps)
    trainer.with_data_hooks(hooks[0])
    trainer.with_training_hooks(hooks[1])
    probe = make_probe(trainer, mesh, config, data, hooks[0])
    before = probe() if resumed == 0 else None
    tell(step=resumed, total_steps=steps, loss_before=before)
    began = time.monotonic()
    train_sft.train_model(config, trainer, mesh)
    seconds = time.monotonic() - began
    reached = int(trainer.train_steps)
    stopped = stop() and reached < steps
    return {
        "step": reached,
        "total_steps": steps,
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
        "stopped": stopped,
        "loss_before": before,
        "loss": None if stopped else probe(),
        "train_seconds": round(seconds, 3),
        **hooks[1].summary(),
    }


def accumulate_in_optimizer(trainer: Any) -> None:
    """Tunix 0.1.7 accumulates gradients by the optimizer (optax.MultiSteps): every batch is a step of it.

    MaxText 0.2.5's train step expects an accumulator that only later versions give it, and fails without one, unless it
    is made for a single batch per step.
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
    """The spec's settings, by MaxText's names."""
    training, tpu = spec.training, bool(prepared["tpu"])
    return [
        f"base_output_directory={work.training}",
        *([f"load_parameters_path={parameters}"] if parameters else []),
        f"hardware={'tpu' if tpu else 'cpu'}",
        # Master weights and Adam's moments in 32 bits: 16 lose small updates.
        "weight_dtype=float32",
        f"dtype={'bfloat16' if tpu else 'float32'}",
        f"attention={'autoselected' if tpu else 'dot_product'}",
        f"remat_policy={'minimal' if training.gradient_checkpointing is False else 'full'}",
        "dataset_type=synthetic",  # replaced by our own batches
        f"packing={str(prepared['packing']).lower()}",
        f"per_device_batch_size={prepared['batch_size']}",
        f"gradient_accumulation_steps={training.gradient_accumulation_steps}",
        f"max_target_length={prepared['length']}",
        f"steps={steps}",
        *schedule(spec),
        f"learning_rate={training.learning_rate}",
        f"gradient_clipping_threshold={training.max_grad_norm}",
        f"adam_weight_decay={training.weight_decay}",
        "adam_b2=0.999",
        f"checkpoint_period={training.checkpoint_steps}",
        "eval_interval=-1",
        f"init_weights_seed={training.seed}",
        "enable_tensorboard=false",
    ]


def schedule(spec: JobSpec) -> list[str]:
    """The learning rate's course. MaxText knows two: cosine, and warm-up, stable, decay."""
    training = spec.training
    kind, warmup = training.lr_scheduler_type, training.warmup_ratio
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
    """Batches up to the last step, or to the end of the step under way when asked to stop."""
    accumulation = spec.training.gradient_accumulation_steps
    for step in range(resumed, steps):
        if stop():
            return
        for micro in range(accumulation):
            yield data.batch(step * accumulation + micro, size, spec.training.seed)


def make_hooks(config: Any, mesh: Any, source: Iterator[dict[str, Any]], tell: Tell, steps: int) -> tuple[Any, Any]:
    """MaxText's hooks: one gives the trainer our batches, the other tells what came of them."""
    import jax
    from maxtext.input_pipeline.multihost_dataloading import MultiHostDataLoadIterator
    from maxtext.trainers.post_train.sft.hooks import SFTDataHooks
    from maxtext.utils.sharding import get_input_data_sharding
    from tunix.sft.hooks import TrainingHooks

    shardings = get_input_data_sharding(config, mesh)

    class OurRows(SFTDataHooks):  # type: ignore[misc]
        """Gives batches to the trainer; None, once there are no more, ends it. Errors are raised."""

        def __init__(self) -> None:
            self.train_data_iterator, self.eval_data_iterator = source, None
            self.train_batch = self.eval_batch = None
            self.train_tokens = 0

        def put(self, batch: dict[str, Any]) -> Any:
            """A batch of all hosts on their devices; each host gives its share of the sequences."""
            local = part(batch, jax.process_index(), jax.process_count())
            return jax.device_put(next(MultiHostDataLoadIterator([local], mesh)), shardings)

        def load_next_train_batch(self, train_ctx: Any) -> Any:
            batch = next(source, None)
            self.train_batch = None if batch is None else self.put(batch)
            self.train_tokens = 0 if batch is None else int((batch["inputs_segmentation"] != 0).sum())
            return self.train_batch

    class TellSteps(TrainingHooks):  # type: ignore[misc]
        """Tells of the steps: loss, tokens, seconds. The trainer ends a step when the next one has run."""

        def __init__(self) -> None:
            self.tokens: dict[int, int] = {}
            self.total_tokens = 0
            self.losses: list[float] = []
            self.began = 0.0

        def on_train_start(self, train_ctx: Any) -> None:
            self.began = time.monotonic()

        def on_train_end(self, train_ctx: Any) -> None: ...

        def on_train_step_start(self, train_ctx: Any) -> None:
            step = train_ctx.train_steps
            self.tokens[step] = self.tokens.get(step, 0) + train_ctx.data_hooks.train_tokens

        def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: Any) -> None:
            loss = float(train_loss)
            if not math.isfinite(loss):
                raise JobError(
                    ErrorClass.CODE,
                    INTERNAL,
                    f"the loss of step {train_step} is {loss}; expected a finite number",
                    "lower training.learning_rate, or look for rows that are not what they should be",
                )
            self.losses.append(loss)
            self.total_tokens += self.tokens.pop(train_step - 1, 0)
            tell(
                step=train_step,
                total_steps=steps,
                loss=loss,
                tokens=self.total_tokens,
                seconds=round(time.monotonic() - self.began, 3),
            )

        def on_eval_step_start(self, train_ctx: Any) -> None: ...

        def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None: ...

        def summary(self) -> dict[str, Any]:
            return {"train_loss": self.losses[-1] if self.losses else None, "tokens": self.total_tokens}

    return OurRows(), TellSteps()


def make_probe(trainer: Any, mesh: Any, config: Any, data: Data, hooks: Any) -> Callable[[], float]:
    """A function for the model's loss now, per learnt token of the probe rows."""
    import jax
    from flax.core.spmd import logical_axis_rules

    def probe() -> float:
        total = count = 0.0
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            _, evaluate = trainer.jit_train_and_eval_step(cache_nnx_graph=config.num_experts <= 1)
            for batch in data.probes(config.micro_batch_size_to_eval_on):
                _, found = evaluate(hooks.put(batch))
                total, count = total + float(found["xent_sum"]), count + float(found["total_weights"])
        return total / count

    return probe


if __name__ == "__main__":
    sys.exit(stage_main("train", run))
