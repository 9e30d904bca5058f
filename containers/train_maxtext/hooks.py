"""MaxText's hooks: they give the trainer dropforge's batches, and report its steps. Imports JAX and MaxText."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.input_pipeline.multihost_dataloading import MultiHostDataLoadIterator
from maxtext.trainers.post_train.sft.hooks import SFTDataHooks
from maxtext.utils.sharding import get_input_data_sharding
from tunix.sft.hooks import TrainingHooks

from containers.common.errors import finite

from .batches import Data, part

Report = Callable[..., None]


class BatchHooks(SFTDataHooks):  # type: ignore[misc]
    """Gives batches to the trainer; None ends the training. Raises the errors that MaxText's loader would hide."""

    def __init__(self, config: Any, mesh: Any, source: Iterator[dict[str, Any]]) -> None:
        self.train_data_iterator, self.eval_data_iterator = source, None
        self.train_batch = self.eval_batch = None
        self.train_tokens = 0
        self._local: list[dict[str, Any]] = []  # at most one batch: the loader's next
        # One loader for all batches: when MaxText's loader ends, it looks through every process of the machine.
        self._loader = MultiHostDataLoadIterator(iter(self._local.pop, None), mesh)
        self._shardings = get_input_data_sharding(config, mesh)

    def put(self, batch: dict[str, Any]) -> Any:
        """Put a batch of all hosts on their devices; each host gives its own part of the sequences."""
        self._local.append(part(batch, jax.process_index(), jax.process_count()))
        return jax.device_put(next(self._loader), self._shardings)

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        batch = next(self.train_data_iterator, None)
        self.train_batch = None if batch is None else self.put(batch)
        self.train_tokens = 0 if batch is None else int((batch["inputs_segmentation"] != 0).sum())
        return self.train_batch


class Curve(NamedTuple):
    """The loss on the probe rows while the model trains: `measure` it after each multiple of `every` steps."""

    measure: Callable[[], float]
    every: int


class StepHooks(TrainingHooks):  # type: ignore[misc]
    """Reports each step: loss, tokens, seconds. The trainer ends a step only after the step that follows it has run.

    With a curve, the report of a step may have `held_out_loss`. The time to measure it does not count as training.
    Every host measures at the same steps, because a forward pass needs all of them.
    """

    def __init__(self, report: Report, steps: int, curve: Curve | None = None) -> None:
        self.measured: dict[int, dict[str, float]] = {}  # by step: the loss on the probe rows, and its seconds
        self.tokens: dict[int, int] = {}
        self.total_tokens = 0
        self.losses: list[float] = []
        self.began = 0.0
        self._report = report
        self._steps = steps
        self._curve = curve
        self._first = 0

    def on_train_start(self, train_ctx: Any) -> None:
        self.began = time.monotonic()
        self._first = train_ctx.train_steps

    def on_train_end(self, train_ctx: Any) -> None:
        if train_ctx.train_steps == self._steps:
            self._measure(self._steps)

    def on_train_step_start(self, train_ctx: Any) -> None:
        step = train_ctx.train_steps
        if self._curve is not None and step % self._curve.every == 0:
            self._measure(step)
        self.tokens[step] = self.tokens.get(step, 0) + train_ctx.data_hooks.train_tokens

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: Any) -> None:
        loss = finite(float(train_loss), f"the loss of step {train_step}")
        self.losses.append(loss)
        self.total_tokens += self.tokens.pop(train_step - 1, 0)
        self._report(
            step=train_step,
            total_steps=self._steps,
            loss=loss,
            tokens=self.total_tokens,
            seconds=round(time.monotonic() - self.began, 3),
            **self.measured.get(train_step, {}),
        )

    def on_eval_step_start(self, train_ctx: Any) -> None: ...

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None: ...

    def _measure(self, step: int) -> None:
        """Measure the loss of the model after `step`, once; not of the model that the training begins with."""
        if self._curve is None or step == self._first or step in self.measured:
            return
        began = time.monotonic()
        loss = self._curve.measure()
        seconds = time.monotonic() - began
        self.measured[step] = {"held_out_loss": loss, "held_out_seconds": seconds}
        self.began += seconds

    def summary(self) -> dict[str, Any]:
        return {"train_loss": self.losses[-1] if self.losses else None, "tokens": self.total_tokens}


def probe_loss(trainer: Any, mesh: Any, config: Any, data: Data, hooks: BatchHooks) -> float:
    """The model's current loss per labelled token of the probe rows."""
    total = count = 0.0
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        _, evaluate = trainer.jit_train_and_eval_step(cache_nnx_graph=config.num_experts <= 1)
        for batch in data.probes(config.micro_batch_size_to_eval_on):
            _, sums = evaluate(hooks.put(batch))
            total, count = total + float(sums["xent_sum"]), count + float(sums["total_weights"])
    return total / count


def judge(trainer: Any, mesh: Any, config: Any, data: Data, hooks: BatchHooks) -> dict[str, float | None]:
    """The model's loss on the held-out rows and the share of their answers that it predicts; {} without such rows.

    `exact_match` counts the answers of which every token, and the token that ends it, is the likeliest one given all
    tokens before it: then greedy decoding gives this answer, and none else. It is None for plain texts.
    """
    sums = {"loss": 0.0, "tokens": 0.0, "matches": 0.0}
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        for batch in data.judged(config.micro_batch_size_to_eval_on):
            found = _judge_batch(trainer.model, hooks.put(batch))
            sums = {name: value + float(found[name]) for name, value in sums.items()}
    if not len(data.held_out.input_ids):
        return {}
    return {"loss": sums["loss"] / max(1.0, sums["tokens"]), "exact_match": data.exact_match(sums["matches"])}


@nnx.jit  # type: ignore[untyped-decorator]
def _judge_batch(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Sums over a batch of all hosts; one forward pass, as in MaxText's own loss (trainers/pre_train/train.py)."""
    logits = model(
        decoder_input_tokens=batch["inputs"],
        decoder_positions=batch["inputs_position"],
        decoder_segment_ids=batch["inputs_segmentation"],
        enable_dropout=False,
        decoder_target_tokens=batch["targets"],
        decoder_target_mask=batch["targets_segmentation"],
    )
    nnx.pop(model, nnx.Intermediate)
    labelled, answered = batch["targets_segmentation"] != 0, batch["answers"] != 0
    logarithms = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(logarithms, batch["targets"][..., None], axis=-1)[..., 0]
    is_likeliest = logits.argmax(-1) == batch["targets"]
    return {
        "loss": -jnp.where(labelled, own, 0.0).sum(),
        "tokens": labelled.sum(),
        "matches": ((is_likeliest | ~answered).all(-1) & answered.any(-1)).sum(),
    }
