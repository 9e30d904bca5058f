"""The publish stage: model card, upload, and the manifest that makes it the run's model."""

from __future__ import annotations

import sys

from export import Provenance, publish, write_card
from job import Job
from stages import Result, Work, stage_main

from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import Source

PACKAGES = ("maxtext", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "google-tunix", "transformers")


def run(work: Work) -> Result:
    """Commit DIRECTORY/export. The result is the manifest that counts, which may be another attempt's."""
    prepared, trained, checked = work.done("prepare"), work.done("train"), work.done("check")
    work.done("export")
    spec, notes = work.spec, work.notes
    seconds = float(trained["train_seconds"]) + float(notes.get("train_seconds", 0.0))
    tokens = int(trained["tokens"]) + int(notes.get("tokens", 0))
    metrics: dict[str, float | None] = {
        "train_loss": trained["train_loss"] if trained["train_loss"] is not None else notes.get("train_loss"),
        "steps": trained["step"],
        "tokens": tokens,
        "train_seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "rows_train": prepared["rows_train"],
        "rows_eval": prepared["rows_eval"],
        "probe_loss_before": trained["loss_before"] if trained["loss_before"] is not None else notes.get("loss_before"),
        "probe_loss": trained["loss"],
        "probe_loss_exported": checked["loss_exported"],
    }
    metrics |= {name: value for name, value in checked.items() if name.startswith(("loss", "exact_match"))}
    for name in ("loss_exported", "loss_trained"):
        metrics.pop(name)
    provenance = Provenance(Source(**prepared["base_source"]), Source(**prepared["data_source"]))
    write_card(work.exported, spec, provenance, metrics)
    manifest = publish(
        Clients().storage(), Job.from_environment(), work.exported, spec, provenance, metrics, packages=PACKAGES
    )
    return {"manifest": manifest.model_dump(mode="json")}


if __name__ == "__main__":
    sys.exit(stage_main("publish", run))
