"""The publish stage: writes the model card, uploads the model and commits the manifest."""

from __future__ import annotations

import sys
from datetime import date

from containers.common.job import Job
from containers.common.publish import Metrics, Provenance, publish, write_card
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import Source

from .methods import load_method
from .stages import stage_main
from .work import Result, Work

PACKAGES = ("maxtext", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "google-tunix", "transformers")


def run(work: Work) -> Result:
    """Commit DIRECTORY/export. The result is the run's manifest, which may be another attempt's."""
    prepared, spec = work.done("prepare"), work.spec
    metrics = all_metrics(work)
    sources = Source(**prepared["base_source"]), Source(**prepared["data_source"])
    shown = prepared["template_date"]
    provenance = Provenance(*sources, tuple(prepared["unused_fields"]), date.fromisoformat(shown) if shown else None)
    write_card(work.exported, spec, load_method(spec.training.method).describe(spec), provenance, metrics)
    job, client = Job.from_environment(), Clients().storage()
    manifest = publish(client, job, work.exported, spec, provenance, metrics, PACKAGES)
    return {"manifest": manifest.model_dump(mode="json")}


def all_metrics(work: Work) -> Metrics:
    """The metrics of training, over all attempts, and of the check stage."""
    prepared, trained, checked, notes = work.done("prepare"), work.done("train"), work.done("check"), work.notes
    seconds = float(trained["train_seconds"]) + float(notes.get("train_seconds", 0.0))
    tokens = int(trained["tokens"]) + int(notes.get("tokens", 0))
    metrics: Metrics = {
        "train_loss": trained["train_loss"] if trained["train_loss"] is not None else notes.get("train_loss"),
        "steps": trained["step"],
        "tokens": tokens,
        "rows_per_step": trained["rows_per_step"],
        "tokens_per_step": round(tokens / trained["step"], 1),
        "train_seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "rows_train": prepared["rows_train"],
        "rows_eval": prepared["rows_eval"],
        "rows_truncated": prepared["rows_truncated"],
        "rows_dropped": prepared["rows_dropped"],
        "answers_given": prepared["answers_given"],
        "answers_learnt": prepared["answers_learnt"],
        "probe_loss_before": trained["loss_before"] if trained["loss_before"] is not None else notes.get("loss_before"),
        "probe_loss": trained["loss"],
        "probe_loss_exported": checked["loss_exported"],
        **checked["links"],
    }
    judged_before = trained["judged_before"] if trained["judged_before"] is not None else notes.get("judged_before")
    metrics |= trained["judged"]
    if trained["judged"]:
        metrics |= {name: prepared[name] for name in ("max_new_tokens", "answers_beyond")}
    return metrics | {f"{name}_before": value for name, value in (judged_before or {}).items()}


if __name__ == "__main__":
    sys.exit(stage_main("publish", run))
