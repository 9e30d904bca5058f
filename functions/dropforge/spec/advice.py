"""Notes about a valid spec that probably does not do what its author wants."""

from __future__ import annotations

from collections.abc import Iterator

from .job_spec import JobSpec

# Usual rates: 1e-4 to 5e-4 for adapters, 1e-6 to 5e-5 for all weights (the defaults and examples of TRL and Axolotl).
# Models with some thousand parameters take ten times as much, so the limits are far away.
HIGHEST_ADAPTER_RATE, HIGHEST_FULL_RATE, LOWEST_ADAPTER_RATE = 1e-2, 5e-3, 2e-5
# Models whose licence must be accepted on the Hub before a token can download them.
GATED = ("meta-llama/", "google/gemma", "google/medgemma", "CohereLabs/")


def advice(spec: JobSpec) -> list[str]:
    """One sentence for each doubtful setting."""
    return [*_learning_rate(spec), *_gated_model(spec)]


def _learning_rate(spec: JobSpec) -> Iterator[str]:
    rate, full = spec.training.learning_rate, spec.training.adapter.type == "none"
    highest = HIGHEST_FULL_RATE if full else HIGHEST_ADAPTER_RATE
    usual = "1e-6 to 5e-5 for all weights" if full else "1e-4 to 5e-4 for an adapter"
    if rate > highest:
        yield f"training.learning_rate {rate:g} is so high that training may diverge; usual are {usual}"
    if not full and rate < LOWEST_ADAPTER_RATE:
        yield f"training.learning_rate {rate:g} is so low that the adapter may learn nothing; usual are {usual}"


def _gated_model(spec: JobSpec) -> Iterator[str]:
    source = spec.model.source
    if source.startswith(GATED) and "HF_TOKEN" not in spec.secrets:
        yield (
            f"model.source {source!r} is gated on the Hugging Face Hub; accept its licence there, and name a token in "
            "`secrets`: HF_TOKEN"
        )
