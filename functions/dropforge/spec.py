"""The job spec, version 1: the contract with users, and the source of schemas/job_spec.schema.json.

`parse_spec` is the way in. Rules that JSON Schema cannot say are the validators at the end of each class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from .catalog import ACCELERATORS, CLOUD_RUN_MAX_TASK_SECONDS
from .errors import InvalidSpec, SpecProblem

MAX_SPEC_BYTES = 256 * 1024
MAX_PROBLEMS = 50  # listed for one spec: all of them must fit a run event, and be found within a function's time-out
SCHEMA_ID = "https://dropforge.dev/schemas/job_spec.schema.json"

_DURATION = r"^[1-9][0-9]{0,5}(s|m|h|d)$"
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Duration = Annotated[str, Field(pattern=_DURATION, examples=["90s", "45m", "2h", "7d"])]
Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
# Resource labels: lower case, digits, - and _; at most 63 characters; the key starts with a letter.
LabelKey = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
LabelValue = Annotated[str, Field(pattern=r"^[a-z0-9_-]{0,63}$")]
SecretName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,255}(:([1-9][0-9]*|latest))?$")]
EnvName = Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]{0,127}$")]
Region = Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+[0-9]$")]


class Wrong(ValueError):
    """A rule that JSON Schema cannot say was broken, at `pointer` below the part whose validator raises it."""

    def __init__(self, pointer: str, message: str, found: object, expected: str) -> None:
        super().__init__(message)
        self.problem = SpecProblem(pointer, message, _shown(found), expected)


def seconds(duration: str) -> int:
    """`"2h"` as 7200."""
    return int(duration[:-1]) * _UNIT_SECONDS[duration[-1]]


class Part(BaseModel):
    """Base of every part of a spec: immutable, unknown fields refused, numbers finite and not strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Part):
    """The base model: a Hugging Face Hub id, or a gs:// prefix that holds what `save_pretrained` writes."""

    source: str = Field(min_length=1, max_length=1024, examples=["google/gemma-2b", "gs://bucket/models/tiny"])
    revision: str = Field(default="main", min_length=1, max_length=255)
    trust_remote_code: bool = False
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"

    @field_validator("source")
    @classmethod
    def _is_a_source(cls, value: str) -> str:
        return check_source(value)


class Columns(Part):
    """How a row becomes a prompt and a completion: templates over the row's columns, as in `"Question: {question}"`."""

    prompt: str = Field(min_length=1, max_length=8192)
    completion: str = Field(min_length=1, max_length=8192)
    system: str | None = Field(default=None, max_length=8192)


class Dataset(Part):
    """The training data: a Hugging Face Hub id, or a gs:// URI of a .jsonl, .json, .csv or .parquet object."""

    source: str = Field(min_length=1, max_length=1024, examples=["b-mc2/sql-create-context", "gs://bucket/data.jsonl"])
    config: str | None = None
    revision: str = Field(default="main", min_length=1, max_length=255)
    split: str = Field(default="train", min_length=1, max_length=255)
    limit: int | None = Field(default=None, ge=2, description="Rows used, after a seeded shuffle.")
    format: Literal["auto", "messages", "prompt_completion", "text", "columns"] = "auto"
    columns: Columns | None = None

    @field_validator("source")
    @classmethod
    def _is_a_source(cls, value: str) -> str:
        return check_source(value)

    @model_validator(mode="after")
    def _columns_go_with_their_format(self) -> Dataset:
        if self.format == "columns" and self.columns is None:
            raise Wrong(
                "/columns", "format 'columns' needs templates", None, "an object with `prompt` and `completion`"
            )
        if self.columns is not None and self.format not in ("auto", "columns"):
            raise Wrong("/format", "`columns` goes with another format", self.format, "'auto' or 'columns'")
        return self


class NoAdapter(Part):
    """Full fine-tuning: every weight is trained."""

    type: Literal["none"]


class LoraAdapter(Part):
    """Low-rank adapters on a frozen base (PEFT LoraConfig)."""

    type: Literal["lora"]
    r: int = Field(default=16, ge=1, le=512)
    alpha: int = Field(default=32, ge=1, le=2048)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"


class QloraAdapter(Part):
    """LoRA on a base quantised to 4 bits (bitsandbytes NF4, double quantisation)."""

    type: Literal["qlora"]
    r: int = Field(default=16, ge=1, le=512)
    alpha: int = Field(default=32, ge=1, le=2048)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"


Adapter = Annotated[NoAdapter | LoraAdapter | QloraAdapter, Field(discriminator="type")]


class Training(Part):
    """How to train; the names are TRL's SFTConfig names, with units where they were missing."""

    method: Literal["sft"] = "sft"
    adapter: Adapter = LoraAdapter(type="lora")
    epochs: float = Field(default=1, gt=0, le=1000)
    max_steps: int | None = Field(default=None, ge=1, description="Optimiser steps; overrides epochs.")
    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    per_device_train_batch_size: int | None = Field(default=None, ge=1, le=4096, description="Default: by device.")
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=4096)
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    max_length: int = Field(default=1024, ge=16, le=1_048_576, description="Tokens per sequence; longer rows are cut.")
    packing: Literal["auto"] | bool = "auto"
    checkpoint_steps: int = Field(default=100, ge=1, description="Optimiser steps between checkpoints.")
    seed: int = Field(default=42, ge=0, lt=2**32)


class Placement(Part):
    """Where an attempt may run; tried in the order given."""

    region: Region


class CloudRunTarget(Part):
    """A Cloud Run job with one GPU (https://cloud.google.com/run/docs/configuring/jobs/gpu)."""

    type: Literal["cloud_run"]
    accelerator: str = "nvidia-l4"
    cpu: int = Field(default=8, ge=1, le=64)
    memory_gib: int = Field(default=32, ge=1, le=512)
    zonal_redundancy: bool = False
    placements: list[Placement] = Field(min_length=1, max_length=20)
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Your price, where ours is unknown.")

    @model_validator(mode="after")
    def _cloud_run_offers_it(self) -> CloudRunTarget:
        check_cloud_run_machine(self.accelerator, self.cpu, self.memory_gib)
        for index, placement in enumerate(self.placements):
            check_cloud_run_region(self.accelerator, placement.region, f"/placements/{index}/region")
        return self


class CloudRunServe(Part):
    """A vLLM endpoint on a Cloud Run service with one GPU, scaling to zero."""

    type: Literal["cloud_run"]
    accelerator: str = "nvidia-l4"
    cpu: int = Field(default=8, ge=1, le=64)
    memory_gib: int = Field(default=32, ge=1, le=512)
    region: Region | None = Field(default=None, description="Default: the first placement of the target.")
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once by one instance.")
    min_instances: int = Field(default=0, ge=0, le=100)
    max_instances: int = Field(default=1, ge=1, le=100)
    startup_timeout: Duration = "20m"
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")

    @model_validator(mode="after")
    def _cloud_run_offers_it(self) -> CloudRunServe:
        check_cloud_run_machine(self.accelerator, self.cpu, self.memory_gib)
        if self.region is not None:
            check_cloud_run_region(self.accelerator, self.region, "/region")
        if self.min_instances > self.max_instances:
            expected = f"at most max_instances, {self.max_instances}"
            raise Wrong("/min_instances", "min_instances is above max_instances", self.min_instances, expected)
        return self


class Gate(Part):
    """What the model must reach on the held-out rows before it is served."""

    metric: Literal["exact_match", "loss"] = "exact_match"
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _has_a_bound(self) -> Gate:
        if (self.min is None) == (self.max is None):
            raise Wrong("", "a gate has one bound", {"min": self.min, "max": self.max}, "either `min` or `max`")
        return self

    def passes(self, value: float | None) -> bool:
        """Whether `value` is good enough; a missing or NaN value never is."""
        if value is None or value != value:
            return False
        return value >= self.min if self.min is not None else value <= self.max  # type: ignore[operator]


class Evaluation(Part):
    """Evaluation on rows that training never sees, before and after; with a gate, it decides about serving."""

    holdout_fraction: float = Field(default=0.05, gt=0, le=0.5)
    max_rows: int = Field(default=200, ge=1, le=10_000)
    max_new_tokens: int = Field(default=128, ge=1, le=8192)
    gate: Gate | None = None


class Limits(Part):
    """What the run may use; enforced on the resources themselves as well."""

    max_duration: Duration = "2h"
    max_cost_usd: float | None = Field(default=None, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=20)


class SlackNotify(Part):
    """A Slack incoming webhook, by the name of the Secret Manager secret that holds its URL."""

    webhook_secret: SecretName


class Notify(Part):
    slack: SlackNotify | None = None


class JobSpec(Part):
    """One fine-tuning job: what to train, on what, where, and what to do with the result."""

    model_config = ConfigDict(title="dropforge job spec")

    schema_uri: str | None = Field(default=None, alias="$schema")
    api_version: Literal["dropforge/v1"]
    name: Name
    model: Model
    dataset: Dataset
    training: Training = Training()
    target: CloudRunTarget
    evaluation: Evaluation | None = None
    serve: CloudRunServe | None
    limits: Limits = Limits()
    notify: Notify = Notify()
    secrets: dict[EnvName, SecretName] = Field(default={}, max_length=32)
    labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if seconds(self.limits.max_duration) > CLOUD_RUN_MAX_TASK_SECONDS:
            message = "longer than a Cloud Run task with a GPU may run"
            raise Wrong("/limits/max_duration", message, self.limits.max_duration, "at most 12h")
        if taken := [name for name in self.secrets if name.startswith("DROPFORGE_")]:
            message, expected = "a variable that dropforge sets itself", "a name that does not start with DROPFORGE_"
            raise Wrong(f"/secrets/{taken[0]}", message, taken[0], expected)
        if self.serve is not None and self.serve.region is None:
            region = self.target.placements[0].region
            check_cloud_run_region(self.serve.accelerator, region, "/serve/region")
        return self


def job_spec_schema() -> dict[str, Any]:
    """The JSON Schema of a job spec, for schemas/ and for editors."""
    return {"$id": SCHEMA_ID, **JobSpec.model_json_schema(by_alias=True)}


def check_source(value: str) -> str:
    """Accept `owner/name`, `name` or `gs://bucket/path`; raise Wrong for anything else."""
    if value.startswith("gs://"):
        if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]/[^\x00-\x1f]+", value):
            raise Wrong("", "not a gs:// URI", value, "gs://bucket/path")
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", value):
        raise Wrong("", "not a source", value, "a Hugging Face Hub id (owner/name) or gs://bucket/path")
    return value


def check_cloud_run_machine(accelerator: str, cpu: int, memory_gib: int) -> None:
    """Raise Wrong unless Cloud Run offers `accelerator` with that much CPU and memory."""
    known = ACCELERATORS.get(accelerator)
    if known is None:
        expected = f"one of {', '.join(sorted(ACCELERATORS))}"
        raise Wrong("/accelerator", "Cloud Run does not offer this accelerator", accelerator, expected)
    if cpu < known.cloud_run_min_cpu:
        raise Wrong("/cpu", f"too little for {accelerator}", cpu, f"at least {known.cloud_run_min_cpu}")
    if memory_gib < known.cloud_run_min_memory_gib:
        raise Wrong(
            "/memory_gib", f"too little for {accelerator}", memory_gib, f"at least {known.cloud_run_min_memory_gib}"
        )


def check_cloud_run_region(accelerator: str, region: str, pointer: str) -> None:
    """Raise Wrong, at `pointer`, unless Cloud Run has `accelerator` in `region`."""
    regions = ACCELERATORS[accelerator].cloud_run_regions
    if region not in regions:
        raise Wrong(pointer, f"Cloud Run does not offer {accelerator} there", region, f"one of {', '.join(regions)}")


def parse_spec(data: bytes) -> JobSpec:
    """A valid spec from the bytes of a JSON document. Raises InvalidSpec that lists every problem."""
    document = _parse_json(data)
    if not isinstance(document, dict):
        raise InvalidSpec([SpecProblem("", "a job spec is a JSON object", _shown(document), "an object")])
    if literal := [*islice(_literal_secrets("", document), MAX_PROBLEMS)]:
        raise InvalidSpec(literal)
    try:
        # Validated as JSON, so that strict mode accepts what JSON has (1 for a float, lists) and nothing else.
        return JobSpec.model_validate_json(json.dumps(document))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = _merged([_problem(dict(e), document) for e in errors[:MAX_PROBLEMS]])
        if len(errors) > MAX_PROBLEMS:
            problems.append(SpecProblem("", f"{len(errors) - MAX_PROBLEMS} more problems, which are not listed"))
        raise InvalidSpec(problems) from None


def _parse_json(data: bytes) -> JsonValue:
    if len(data) > MAX_SPEC_BYTES:
        raise InvalidSpec(
            [SpecProblem("", "the spec is too large", f"{len(data)} bytes", f"at most {MAX_SPEC_BYTES} bytes")]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InvalidSpec([SpecProblem("", "the spec is not UTF-8 text", found, "JSON encoded as UTF-8")]) from None
    try:
        document: JsonValue = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        json.dumps(document, ensure_ascii=False).encode()  # what "\ud800" alone stands for is no text
        return document
    except UnicodeEncodeError as error:
        found = f"\\u{ord(error.object[error.start]):04x}"
        raise InvalidSpec([SpecProblem("", "half of a surrogate pair", found, "whole characters")]) from None
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidSpec([SpecProblem("", "the spec is not JSON", where, "a JSON object")]) from None
    except RecursionError:
        raise InvalidSpec([SpecProblem("", "the spec is nested too deeply", None, "a job spec")]) from None
    except ValueError as error:
        raise InvalidSpec([SpecProblem("", redact(str(error))[:300], None, "plain JSON")]) from None


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Prefixes that providers give to credentials, so that they can be found where they should not be.
_TOKEN = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|https://hooks\.slack\.com/services/\S+|AKIA[A-Z0-9]{16})"
)


def _literal_secrets(pointer: str, value: JsonValue) -> Iterator[SpecProblem]:
    """Every string that looks like a credential; the credential itself is never repeated."""
    if isinstance(value, dict):
        for key, item in value.items():
            if _TOKEN.search(key):
                yield SpecProblem(pointer, "a field name looks like a credential; a spec never holds one")
            else:
                yield from _literal_secrets(f"{pointer}/{_escape(key)}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _literal_secrets(f"{pointer}/{index}", item)
    elif isinstance(value, str) and _TOKEN.search(value):
        yield SpecProblem(
            pointer,
            "this looks like a credential; a spec never holds one",
            f"a secret-like string of {len(value)} characters",
            "the name of a Secret Manager secret (see `secrets`); revoke the credential, it has been stored",
        )


def redact(text: str) -> str:
    """`text` with everything that looks like a credential replaced."""
    return _TOKEN.sub("[redacted]", text)


def _problem(error: dict[str, Any], document: JsonValue) -> SpecProblem:
    """A pydantic error as a problem: where, what was found there, what was expected."""
    kind, context = error["type"], error.get("ctx", {})
    steps = _document_path(error["loc"], document, missing=kind == "missing")
    pointer = "".join(f"/{_escape(str(step))}" for step in steps)
    if kind == "extra_forbidden":
        return SpecProblem(pointer, "unknown field", _shown(error["input"]), _field_names(steps))
    if kind == "missing":
        return SpecProblem(pointer, "a required field is missing", "nothing", "a value")
    if kind in ("union_tag_invalid", "literal_error"):
        found = context.get("tag", error["input"])
        pointer += f"/{context['discriminator'].strip(chr(39))}" if "discriminator" in context else ""
        return SpecProblem(
            pointer, "unknown value", _shown(found), context.get("expected_tags") or context.get("expected")
        )
    if kind == "union_tag_not_found":
        return SpecProblem(f"{pointer}/type", "a required field is missing", "nothing", "a type")
    if kind == "value_error" and isinstance(wrong := context["error"], Wrong):
        return wrong.problem._replace(pointer=pointer + wrong.problem.pointer)
    if kind == "string_pattern_mismatch":
        return SpecProblem(pointer, "malformed value", _shown(error["input"]), f"text matching {context['pattern']}")
    if error["msg"].startswith("Input should be "):
        message = "wrong type" if kind.endswith("_type") else "wrong value"
        return SpecProblem(pointer, message, _shown(error["input"]), error["msg"].removeprefix("Input should be "))
    return SpecProblem(pointer, error["msg"], _shown(error["input"]), None)


def _merged(problems: list[SpecProblem]) -> list[SpecProblem]:
    """One problem per place: a value that fits no branch of a union is reported once for each."""
    merged: dict[tuple[str, str | None], SpecProblem] = {}
    for problem in problems:
        first = merged.setdefault((problem.pointer, problem.found), problem)
        if first is not problem and first.expected and problem.expected:
            merged[problem.pointer, problem.found] = first._replace(expected=f"{first.expected} or {problem.expected}")
    return list(merged.values())


def _document_path(loc: tuple[str | int, ...], document: JsonValue, missing: bool) -> list[str | int]:
    """pydantic's location without the union tags that it adds (`lora`, `list[str]`), i.e. a path in the document.

    Only the last step of a missing field is not there.
    """
    path: list[str | int] = []
    here: Any = document
    for step in loc[:-1] if missing else loc:
        if (isinstance(here, dict) and step in here) or (isinstance(here, list) and isinstance(step, int)):
            here = here[step]  # type: ignore[index]
            path.append(step)
    return [*path, loc[-1]] if missing else path


def _field_names(path: list[str | int]) -> str:
    """The names allowed beside an unknown field, the likeliest first."""
    allowed = _allowed(_schema(), path[:-1])
    close = get_close_matches(str(path[-1])[:64], allowed, n=1)
    listing = ", ".join(allowed)
    return f"{close[0]!r}? The fields here are {listing}" if close else f"one of {listing}"


@cache
def _schema() -> dict[str, Any]:
    return JobSpec.model_json_schema(by_alias=True)


def _allowed(schema: dict[str, Any], path: list[str | int]) -> list[str]:
    nodes = [schema]
    for step in [*path, None]:
        nodes = [resolved for node in nodes for resolved in _resolve(schema, node)]
        if step is not None:
            nodes = [
                node["items"] if isinstance(step, int) else node["properties"][step]
                for node in nodes
                if ("items" in node if isinstance(step, int) else step in node.get("properties", {}))
            ]
    return sorted({name for node in nodes for name in node.get("properties", {})})


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _resolve(schema, schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
    branches = node.get("anyOf") or node.get("oneOf")
    return [r for branch in branches for r in _resolve(schema, branch)] if branches else [node]


def _escape(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    """A value as a reader should see it: JSON, short, without credentials."""
    text = redact(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 120 else f"{text[:117]}..."
