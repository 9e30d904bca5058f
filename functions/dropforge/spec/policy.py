"""The policy of a deployment: what its operator allows every spec. Source of schemas/policy.schema.json.

Operators write terraform/policy.yaml. Terraform passes it to the functions as JSON in DROPFORGE_POLICY, so only users
who can deploy can change it. `stages/ceiling.py` compares specs with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from dropforge.base.errors import DropforgeError

from .parts import NAMED_KEYS, Duration, LabelKey, LabelValue, Part

SCHEMA_ID = "https://dropforge.dev/schemas/policy.schema.json"
VARIABLE = "DROPFORGE_POLICY"
# Of the JSON text. All environment variables of a function hold 32 KiB together:
# https://cloud.google.com/run/docs/configuring/services/overview-environment-variables
MAX_POLICY_BYTES = 16 * 1024
_LISTED = 200

Usd = Annotated[float, Field(gt=0, le=1_000_000_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Retries = Annotated[int, Field(ge=0, le=50)]
Pattern = Annotated[str, Field(min_length=1, max_length=255)]
Patterns = Annotated[list[Pattern], Field(max_length=_LISTED)]


class Ceiling(Part):
    """Limits that a spec must meet. A field that is null sets no limit."""

    max_cost_usd: Usd | None = Field(default=None, description="Of a run: its budget, or its maximum cost if lower.")
    max_usd_per_hour: Usd | None = Field(default=None, description="Of an attempt, and of an endpoint's instances.")
    max_runs: Count | None = Field(default=None, description="Runs at the same time; further runs wait in order.")
    max_usd_per_day: Usd | None = Field(
        default=None, description="Maximum cost of all runs that begin on one day (UTC); further runs wait."
    )
    max_duration: Duration | None = Field(default=None, description="The longest limits.max_duration.")
    max_attempts: Count | None = Field(default=None, description="The highest limits.max_attempts.")
    max_retries: Retries | None = Field(default=None, description="The highest number in limits.retry.")
    max_ttl: Duration | None = Field(default=None, description="The longest serve.ttl.")
    max_startup_timeout: Duration | None = Field(default=None, description="The longest serve.startup_timeout.")
    max_accelerators: Count | None = Field(
        default=None, description="GPUs or TPU chips of an attempt, and of an endpoint's instances."
    )
    max_nodes: Count | None = Field(default=None, description="Machines with accelerators of an attempt.")
    max_instances: Count | None = Field(default=None, description="The highest serve.max_instances.")
    max_disk_gib: Count | None = Field(default=None, description="Disks of an attempt, and of an endpoint's instances.")
    require_budget: bool | None = Field(default=None, description="Whether limits.max_cost_usd must be set.")
    require_price: bool | None = Field(default=None, description="Whether every hourly price must be known.")
    trust_remote_code: bool | None = Field(default=None, description="Whether a model may bring its own code.")
    targets: Patterns | None = Field(default=None, description="Allowed types of target.")
    endpoints: Patterns | None = Field(default=None, description="Allowed types of endpoint.")
    endpoint_names: Patterns | None = Field(default=None, description="Allowed serve.endpoint, such as search-*.")
    accelerators: Patterns | None = Field(default=None, description="Allowed accelerators, such as nvidia-*.")
    regions: Patterns | None = Field(default=None, description="Allowed regions, such as europe-*.")
    models: Patterns | None = Field(default=None, description="Allowed model.source, such as google/*.")
    datasets: Patterns | None = Field(default=None, description="Allowed dataset.source, such as gs://team-data/*.")
    notify_hosts: Patterns | None = Field(
        default=None, description="Allowed hosts of notify.webhook.url and of addresses in notify.email.to."
    )
    required_labels: Annotated[dict[LabelKey, Patterns], NAMED_KEYS] = Field(
        default={}, max_length=32, description="Labels that a spec must have, each with its allowed values."
    )


class ByLabel(Ceiling):
    """More limits, for specs with all of these labels. They add to the other limits and never lift a limit."""

    labels: Annotated[dict[LabelKey, LabelValue], NAMED_KEYS] = Field(min_length=1, max_length=32)


class Defaults(Part):
    """Values for specs that leave them out. A default budget also applies where limits.max_cost_usd is null."""

    max_cost_usd: Usd | None = None
    max_duration: Duration | None = None
    max_attempts: Annotated[int, Field(ge=1, le=50)] | None = None
    ttl: Duration | None = None


class Policy(Ceiling):
    """The policy of a deployment. A field that is left out has its default; null lifts that limit."""

    model_config = ConfigDict(title="dropforge policy")

    api_version: Literal["dropforge/v1"]
    max_cost_usd: Usd | None = Field(default=1000, description="Of a run: its budget, or its maximum cost if lower.")
    max_usd_per_hour: Usd | None = Field(default=200, description="Of an attempt, and of an endpoint's instances.")
    max_duration: Duration | None = Field(default="3d", description="The longest limits.max_duration.")
    max_attempts: Count | None = Field(default=20, description="The highest limits.max_attempts.")
    max_retries: Retries | None = Field(default=20, description="The highest number in limits.retry.")
    max_ttl: Duration | None = Field(default="7d", description="The longest serve.ttl.")
    max_startup_timeout: Duration | None = Field(default="2h", description="The longest serve.startup_timeout.")
    max_accelerators: Count | None = Field(
        default=16, description="GPUs or TPU chips of an attempt, and of an endpoint's instances."
    )
    max_nodes: Count | None = Field(default=8, description="Machines with accelerators of an attempt.")
    max_instances: Count | None = Field(default=4, description="The highest serve.max_instances.")
    max_disk_gib: Count | None = Field(default=4000, description="Disks of an attempt, and of an endpoint's instances.")
    trust_remote_code: bool | None = Field(default=False, description="Whether a model may bring its own code.")
    by_label: Annotated[list[ByLabel], Field(max_length=_LISTED)] = []
    defaults: Defaults = Defaults()

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """Every set of limits by its place in the policy: "" for all specs, `by_label[0].` and so on."""
        return {"": self, **{f"by_label[{index}].": ceiling for index, ceiling in enumerate(self.by_label)}}


class BrokenPolicy(DropforgeError):
    """The deployment's policy cannot be read, so nothing can be accepted until an operator repairs it."""


@lru_cache(8)
def policy_of(text: str) -> Policy:
    """The policy in the value of DROPFORGE_POLICY; the default policy for "". Raises BrokenPolicy."""
    if not text:
        return Policy(api_version="dropforge/v1")
    try:
        return Policy.model_validate_json(text)
    except ValidationError as error:
        listed = "; ".join(f"{place_of(e['loc'])}: {e['msg']}" for e in error.errors(include_url=False)[:5])
        repair = "repair terraform/policy.yaml (`dropforge policy check`) and deploy again"
        raise BrokenPolicy(f"the policy in {VARIABLE} cannot be read: {listed}; {repair}") from None


def place_of(steps: tuple[int | str, ...]) -> str:
    """pydantic's location as a place in a policy: `by_label[0].max_cost_usd`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".") or "the document"


def policy_schema() -> dict[str, Any]:
    """The JSON Schema of a policy, for schemas/ and for editors."""
    return {"$id": SCHEMA_ID, **Policy.model_json_schema()}
