"""The sections of a job spec that are the same wherever a run trains and serves.

Validators at the end of each class check the rules that JSON Schema cannot express.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from .chat_template import problem_of
from .methods import OneOfMethods
from .metrics import METRICS, MetricName
from .parts import (
    Duration,
    Part,
    SecretName,
    Wrong,
    check_files,
    check_source,
    ruled,
)

# Names that no public server has, and IP addresses. The resolved address is checked again before each call.
_LOCAL_HOST = re.compile(
    r"(^|\.)(local|localhost|internal|intranet|lan|home|corp|test|invalid|[0-9]+|0x[0-9a-f]*)$", re.I
)
_ChannelId = Annotated[str, ruled(r"^[CDG][A-Z0-9]{5,20}$", "the id of a channel, such as C0123456789")]
_Url = Annotated[
    str,
    ruled(
        r"^https://[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?(/[!-~]{0,1024})?$",
        "an https:// URL without spaces, user or password, such as https://hooks.example.com/dropforge",
    ),
]
_Address = Annotated[
    str,
    ruled(
        r"^[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}$",
        "an e-mail address, such as team@example.com",
        max_length=254,
    ),
]
_Repository = Annotated[
    str,
    ruled(
        r"^[A-Za-z0-9][A-Za-z0-9-]{0,38}/[.]{0,2}[A-Za-z0-9_-][A-Za-z0-9._-]{0,96}$",
        "a repository on github.com, as OWNER/NAME",
    ),
]
_Commit = Annotated[str, ruled(r"^[0-9a-f]{40}$", "the whole SHA-1 of a commit: 40 of the characters 0-9 and a-f")]


class Model(Part):
    """The base model: a Hugging Face Hub id, or a gs:// prefix with the files that `save_pretrained` writes."""

    source: str = Field(
        min_length=1,
        max_length=1024,
        examples=["google/gemma-2b", "gs://bucket/models/tiny"],
        description="A Hugging Face Hub id (`owner/name`), or a `gs://` prefix.",
    )
    revision: str = Field(
        default="main",
        min_length=1,
        max_length=255,
        description="Branch, tag or commit of the Hub; the run records the commit.",
    )
    trust_remote_code: bool = Field(default=False, description="Run the Python code that the model's repository ships.")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="The attention kernel, by its name in transformers; auto: the image's fastest.",
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        max_length=65_536,
        description="A chat template of your own in place of the model's, as text of Jinja (docs/training.md).",
    )

    @field_validator("source")
    @classmethod
    def _is_a_source(cls, value: str) -> str:
        return check_source(value)

    @field_validator("chat_template")
    @classmethod
    def _is_a_template(cls, value: str | None) -> str | None:
        if value is not None and (problem := problem_of(value)):
            raise Wrong("", f"not a chat template: {problem}", value, "Jinja that transformers renders")
        return value


class Columns(Part):
    """How a row becomes a prompt and a completion: templates over the row's columns, as in `"Question: {question}"`."""

    prompt: str = Field(
        min_length=1, max_length=8192, description="The user's message; `{column}` stands for the value of a column."
    )
    completion: str = Field(min_length=1, max_length=8192, description="The answer to learn.")
    system: str | None = Field(default=None, max_length=8192, description="The system message of every row.")


MAX_SOURCES = 32  # of a list: access.py names each in the rules of a run's token. A folder or a glob names more files.
SourceUri = Annotated[str, Field(min_length=1, max_length=1024)]


class Dataset(Part):
    """The training data: a Hugging Face Hub id, or files in buckets (docs/data-formats.md)."""

    source: SourceUri | Annotated[list[SourceUri], Field(min_length=1, max_length=MAX_SOURCES)] = Field(
        examples=["b-mc2/sql-create-context", "gs://bucket/data.jsonl", "gs://bucket/folder/*.jsonl.gz"],
        description="A Hugging Face Hub id (`owner/name`), or `gs://` URIs: a file, a folder (`gs://bucket/folder/`), "
        "a glob, or a list of them.",
    )
    config: str | None = Field(default=None, description="The configuration of a Hub data set that has several.")
    revision: str = Field(default="main", min_length=1, max_length=255, description="Branch, tag or commit of the Hub.")
    split: str = Field(default="train", min_length=1, max_length=255, description="The split of a Hub data set.")
    limit: int | None = Field(default=None, ge=2, le=1_000_000_000, description="Rows used, after a seeded shuffle.")
    format: Literal[
        "auto",
        "messages",
        "conversations",
        "contents",
        "prompt_completion",
        "prompt_response",
        "query_response",
        "instruction_output",
        "instruction_response",
        "input_output",
        "question_answer",
        "text",
        "completion",
        "columns",
    ] = Field(
        default="auto",
        description="The form of a row. auto: the templates of `columns`, else the first form that fits the first row.",
    )
    columns: Columns | None = Field(
        default=None, description="Templates that make a prompt and a completion from each row."
    )
    ignore: list[Annotated[str, Field(min_length=1, max_length=255)]] = Field(
        default=[],
        max_length=100,
        description="Fields of rows and messages that mean nothing for the training, although their names suggest it.",
    )

    @field_validator("source")
    @classmethod
    def _is_a_source(cls, value: str | list[str]) -> str | list[str]:
        return check_source(value) if isinstance(value, str) else check_files(value)

    @property
    def sources(self) -> list[str]:
        """The Hub id, or the URIs."""
        return [self.source] if isinstance(self.source, str) else self.source

    @property
    def title(self) -> str:
        """The source in one line of a message."""
        first, *others = self.sources
        return f"{first} and {len(others)} more" if others else first

    @model_validator(mode="after")
    def _columns_match_format(self) -> Dataset:
        if self.format == "columns" and self.columns is None:
            raise Wrong(
                "/columns", "format 'columns' needs templates", None, "an object with `prompt` and `completion`"
            )
        if self.columns is not None and self.format not in ("auto", "columns"):
            raise Wrong("/format", "`columns` needs another format", self.format, "'auto' or 'columns'")
        return self


class SyntheticDataset(Part):
    """Random tokens, as in MaxText's `dataset_type: synthetic`. They measure machines and teach the model nothing."""

    type: Literal["synthetic"] = Field(description="Random tokens.")
    rows: int = Field(default=1024, ge=1, le=100_000, description="Sequences of training.max_length tokens.")

    @property
    def source(self) -> str:
        """The type, in place of the source that other data sets have."""
        return self.type

    @property
    def title(self) -> str:
        return self.type


def _dataset_tag(dataset: object) -> str:
    typed = "type" in dataset if isinstance(dataset, dict) else isinstance(dataset, SyntheticDataset)
    return "synthetic" if typed else "sourced"


AnyDataset = Annotated[
    Annotated[Dataset, Tag("sourced")] | Annotated[SyntheticDataset, Tag("synthetic")], Discriminator(_dataset_tag)
]


class NoAdapter(Part):
    """Full fine-tuning: every weight is trained."""

    type: Literal["none"] = Field(description="Full fine-tuning.")


class _LowRank(Part):
    """The fields of both adapters."""

    type: str
    r: int = Field(default=16, ge=1, le=512, description="Rank of the adapter's matrices.")
    alpha: int = Field(
        default=32, ge=1, le=2048, description="Scale of the adapter: its output is multiplied by alpha / r."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the adapter's inputs that a training step drops."
    )
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="all-linear",
        description="Linear layers with an adapter. all-linear: all linear layers of the language model except the "
        "output.",
    )
    use_rslora: bool = Field(
        default=False, description="Multiply the output by alpha / sqrt(r) instead (rank-stabilised LoRA)."
    )


class LoraAdapter(_LowRank):
    """Low-rank adapters on a frozen base (PEFT LoraConfig)."""

    type: Literal["lora"] = Field(description="LoRA on an unquantised base.")


class QloraAdapter(_LowRank):
    """LoRA on a base quantised to 4 bits (bitsandbytes NF4, double quantisation)."""

    type: Literal["qlora"] = Field(description="LoRA on a base of 4 bits.")


Adapter = Annotated[NoAdapter | LoraAdapter | QloraAdapter, Field(discriminator="type")]
# TRL 1.16: SFTConfig.learning_rate is 2e-5 for every weight, and its guide to PEFT has ten times as much for adapters.
FULL_RATE, ADAPTER_RATE = 2e-5, 2e-4
SCHEDULER_KWARGS = {"cosine_with_restarts": ("num_cycles",), "polynomial": ("power", "lr_end")}


def usual_rate(adapter: NoAdapter | LoraAdapter | QloraAdapter | None) -> float:
    """The learning rate of a spec that has none."""
    return FULL_RATE if isinstance(adapter, NoAdapter) else ADAPTER_RATE


class SchedulerKwargs(Part):
    """Settings of a schedule, under transformers' names."""

    num_cycles: int | None = Field(
        default=None, ge=1, le=1000, description="cosine_with_restarts: how often the rate falls to 0. Default: 1."
    )
    power: float | None = Field(
        default=None, gt=0, le=10, description="polynomial: the exponent of the falling rate. Default: 1."
    )
    lr_end: float | None = Field(
        default=None, ge=0, le=0.1, description="polynomial: the rate of the last step. Default: 1e-7."
    )


class Training(Part):
    """How to train. The fields have the names of TRL's SFTConfig, with units where TRL's names have none.

    sft starts with the model's weights. pretrain starts with random weights; the model gives shapes and tokenizer.
    """

    method: Annotated[str, OneOfMethods()] = Field(
        default="sft",
        description="sft: supervised fine-tuning of the model. pretrain: random weights learn synthetic data.",
    )
    adapter: Adapter = Field(
        default=LoraAdapter(type="lora"), description="What the training changes: an adapter, or every weight (none)."
    )
    epochs: float = Field(default=1, gt=0, le=1000, description="How often the training uses each row.")
    max_steps: int | None = Field(
        default=None, ge=1, le=1_000_000_000, description="Optimiser steps; overrides epochs."
    )
    learning_rate: float = Field(
        default_factory=lambda known: usual_rate(known.get("adapter")),
        gt=0,
        le=0.1,
        description="The highest learning rate of the schedule. Default: 2e-4 for an adapter, 2e-5 for every weight.",
    )
    lr_scheduler_type: Literal[
        "cosine",
        "linear",
        "constant",
        "constant_with_warmup",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
    ] = Field(default="cosine", description="How the learning rate changes after the warm-up.")
    lr_scheduler_kwargs: SchedulerKwargs = Field(
        default=SchedulerKwargs(), description="Settings of cosine_with_restarts and polynomial."
    )
    warmup_ratio: float = Field(
        default=0.03, ge=0, lt=1, description="Share of the steps in which the learning rate rises from 0."
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, le=1_000_000_000, description="The warm-up as a number of steps; overrides warmup_ratio."
    )
    optim: Literal["adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "adafactor"] = Field(
        default="adamw_torch_fused",
        description="The optimiser. adamw_8bit: bitsandbytes' AdamW with moments of 8 bits. paged: its moments leave "
        "the accelerator's memory when there is no room.",
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean of the gradients.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's decay of the mean of their squares.")
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1, description="What AdamW adds to a divisor near 0.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="The optimiser's weight decay.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, le=1_000_000_000, description="Longer gradients are scaled down to this norm."
    )
    per_device_train_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Rows of a batch on each device; with packing true, blocks of max_length tokens. Default: by the "
        "device.",
    )
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, le=4096, description="Batches of each device in one optimiser step."
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto", description="Recompute activations to save memory. auto: only if they would not fit otherwise."
    )
    neftune_noise_alpha: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Noise on the embeddings of a training step (NEFTune); its range is alpha / sqrt(tokens * width).",
    )
    learn: Literal["answers", "last_answer", "all"] = Field(
        default="answers",
        description="The tokens with a loss: every answer of the assistant, the last answer of each conversation, or "
        "the prompts, too.",
    )
    max_length: int = Field(default=1024, ge=16, le=1_048_576, description="Tokens per sequence; longer rows are cut.")
    packing: Literal["auto"] | bool = Field(
        default="auto",
        description="Put several short rows into one sequence. auto: on a GPU. With true, a batch counts sequences.",
    )
    checkpoint_steps: int = Field(
        default=100, ge=1, le=1_000_000_000, description="Optimiser steps between checkpoints."
    )
    seed: int = Field(
        default=42,
        ge=0,
        lt=2**32,
        description="The seed for the order of the rows, the held-out rows, new weights and dropout.",
    )

    @model_validator(mode="after")
    def _settings_match(self) -> Training:
        for name, value in self.lr_scheduler_kwargs:
            if value is not None and name not in SCHEDULER_KWARGS.get(self.lr_scheduler_type, ()):
                able = next(kind for kind, names in SCHEDULER_KWARGS.items() if name in names)
                message, expected = f"only the schedule {able} has this setting", f"lr_scheduler_type {able!r}, or none"
                raise Wrong(f"/lr_scheduler_kwargs/{name}", message, value, expected)
        if (end := self.lr_scheduler_kwargs.lr_end) is not None and end >= self.learning_rate:
            message, expected = "the schedule must end below its highest rate", f"less than {self.learning_rate:g}"
            raise Wrong("/lr_scheduler_kwargs/lr_end", message, end, expected)
        if self.optim == "adafactor":
            for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise Wrong(f"/{name}", "adafactor has no such setting", value, f"no {name}, or another optim")
        return self

    def unsharded(self) -> tuple[str, object, str, str] | None:
        """A setting that several processes cannot train: its field, value, reason and cure; None if there is none."""
        if self.adapter.type == "qlora":
            return "adapter/type", "qlora", "4-bit weights cannot be sharded", "'lora' or 'none'"
        if self.optim != "adamw_torch_fused":
            return "optim", self.optim, "the state of this optimiser cannot be sharded", "'adamw_torch_fused'"
        if self.neftune_noise_alpha is not None:
            found = self.neftune_noise_alpha
            return "neftune_noise_alpha", found, "its noise would not be the same", "no noise"
        return None


Bound = Annotated[float, Field(ge=-1_000_000_000, le=1_000_000_000)]


class Gate(Part):
    """The metric that the model must reach on the held-out rows before it is served."""

    metric: MetricName = Field(default="exact_match", description="The metric on the held-out rows after training.")
    min: Bound | None = Field(
        default=None, description="The least value that passes, for exact_match: a share, from 0 to 1."
    )
    max: Bound | None = Field(default=None, description="The greatest value that passes, for loss: above 0.")

    @model_validator(mode="after")
    def _has_a_bound(self) -> Gate:
        if (self.min is None) == (self.max is None):
            raise Wrong(
                "", "a gate needs exactly one bound", {"min": self.min, "max": self.max}, "either `min` or `max`"
            )
        field, value = ("min", self.min) if self.min is not None else ("max", self.max or 0.0)
        metric = METRICS[self.metric]
        if field != metric.bound:
            better = "higher" if metric.is_higher_better else "lower"
            message = f"{self.metric} is better the {better} it is, so this gate keeps the good models out"
            raise Wrong(f"/{field}", message, value, f"`{metric.bound}`: {metric.range(value)}")
        if not metric.is_possible(value):
            message = f"no model has this value: {self.metric} is {metric.what}"
            raise Wrong(f"/{field}", message, value, metric.range(value))
        return self

    def passes(self, value: float | None) -> bool:
        """Whether `value` is good enough; a missing value, NaN and the infinities never are."""
        if value is None or not math.isfinite(value):
            return False
        return value >= self.min if self.min is not None else value <= self.max  # type: ignore[operator]


class Evaluation(Part):
    """Evaluation before and after training, on rows that training never sees. A gate decides whether to serve.

    The rows come from `source` or `split` in the form of the training rows, else from the training rows themselves.
    """

    source: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Another data set. Default: the data set of the training.",
    )
    split: str | None = Field(
        default=None, min_length=1, max_length=255, description="Another split of a Hub data set, such as 'test'."
    )
    holdout_fraction: float = Field(
        default=0.05,
        gt=0,
        le=0.5,
        description="The held-out share of the training rows; unused with `source` or `split`.",
    )
    max_rows: int = Field(
        default=200, ge=1, le=10_000, description="The largest number of held-out rows that are evaluated."
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="The largest number of tokens of a judged answer. Default: those of the longest held-out answer, "
        "at most 1024.",
    )
    gate: Gate | None = Field(
        default=None, description="The bound that the model must reach; without it, the run serves every model."
    )

    @field_validator("source")
    @classmethod
    def _is_a_source(cls, value: str | None) -> str | None:
        return value if value is None else check_source(value)


Retries = Annotated[int, Field(ge=0, le=50)]


class Retry(Part):
    """How often a new attempt follows each class of failure. The new attempt resumes from the last checkpoint.

    Every other class ends the run at once, because a new attempt could not help.
    """

    preempted: Retries = Field(default=10, description="The cloud took the machine back.")
    infrastructure: Retries = Field(default=3, description="The machine was lost without notice.")
    stockout: Retries = Field(
        default=10,
        description="The next attempt uses the next placement. After the last placement, the run pauses and begins "
        "with the first.",
    )
    quota: Retries = Field(
        default=10,
        description="The next attempt uses the next placement. After the last placement, the run pauses and begins "
        "with the first.",
    )
    transient: Retries = Field(default=3, description="A service failed for a moment.")
    stuck: Retries = Field(default=1, description="The attempt was stuck, and on_stuck is 'restart'.")
    out_of_memory: Retries = Field(default=0, description="The container needed more memory than the machine has.")
    code: Retries = Field(default=0, description="The training failed for another reason.")


class Limits(Part):
    """The time and the money that the run may use. The resources also have these limits as their own."""

    max_duration: Duration = Field(default="2h", description="From the acceptance to the end of the training.")
    max_cost_usd: float | None = Field(
        default=None, gt=0, le=1_000_000_000, description="The budget for training and endpoint together."
    )
    max_attempts: int = Field(
        default=20, ge=1, le=50, description="The largest number of attempts, for all classes of `retry` together."
    )
    retry: Retry = Field(default=Retry(), description="How often a new attempt follows each class of failure.")
    stuck_after: Duration = Field(
        default="1h",
        description="The longest time without progress. It must be longer than the loading of model and data, and than "
        "evaluation and export after the last step. Between two steps, an attempt is stuck earlier: after four times "
        "the longest time between two of its reports, but at least 10 minutes and a sixth of `stuck_after`.",
    )
    on_stuck: Literal["notify", "restart", "fail"] = Field(
        default="restart",
        description="What follows for a stuck attempt: a notice, a new attempt as `retry.stuck` allows, or the end of "
        "the run. Every case sends the notice.",
    )


class SlackNotify(Part):
    """Slack: a webhook, or a bot that keeps a run's messages in one thread. The fields name their secrets."""

    webhook_secret: SecretName | None = Field(default=None, description="Holds the URL of an incoming webhook.")
    token_secret: SecretName | None = Field(default=None, description="Holds the token of a bot with chat:write.")
    channel: _ChannelId | None = Field(
        default=None, description="The id of the bot's channel, from the channel's details in Slack."
    )

    @model_validator(mode="after")
    def _has_one_way(self) -> SlackNotify:
        if (self.webhook_secret is None) == (self.token_secret is None):
            found = {"webhook_secret": self.webhook_secret, "token_secret": self.token_secret}
            raise Wrong("", "Slack needs exactly one secret", found, "either `webhook_secret` or `token_secret`")
        if (self.token_secret is None) != (self.channel is None):
            expected = "`channel` with `token_secret`; a webhook has its own channel"
            raise Wrong("/channel", "a bot needs a channel, and only a bot", self.channel, expected)
        return self


class WebhookNotify(Part):
    """Your own server. It gets run events by POST, with a signature by the rules of Standard Webhooks."""

    url: _Url | None = Field(
        default=None, description="The URL of a server on the internet. Use `url_secret` if the URL is a secret."
    )
    url_secret: SecretName | None = Field(default=None, description="Holds the URL.")
    signing_secret: SecretName = Field(description="Holds the key: whsec_ and the base64 of 24 to 64 random bytes.")

    @model_validator(mode="after")
    def _has_one_url(self) -> WebhookNotify:
        if (self.url is None) == (self.url_secret is None):
            found = {"url": self.url, "url_secret": self.url_secret}
            raise Wrong("", "a webhook needs exactly one URL", found, "either `url` or `url_secret`")
        if self.url and (_LOCAL_HOST.search(self.host) or "." not in self.host):
            expected = "the name of a server on the internet, such as hooks.example.com"
            raise Wrong("/url", "not a server on the internet", self.host, expected)
        return self

    @property
    def host(self) -> str:
        """The host of `url`; "" if a secret holds the URL."""
        return (urlsplit(self.url).hostname or "").rstrip(".") if self.url else ""


class TeamsNotify(Part):
    """Microsoft Teams: a workflow that posts to a channel when its webhook receives a request."""

    webhook_secret: SecretName = Field(description="Holds the URL of the workflow's webhook.")


class EmailNotify(Part):
    """E-mail through your own mail server."""

    server_secret: SecretName = Field(description="Holds smtps://USER:PASSWORD@HOST or smtp+starttls://…")
    to: list[_Address] = Field(min_length=1, max_length=20, description="Who gets the messages.")


class GitHubNotify(Part):
    """The status of a commit on GitHub: pending until the run ends, then success, failure or error."""

    repository: _Repository = Field(examples=["owner/name"], description="OWNER/NAME on github.com.")
    sha: _Commit = Field(description="The commit, by its whole SHA-1.")
    token_secret: SecretName = Field(description="Holds a token with the permission `Commit statuses: write`.")


class Notify(Part):
    """Where a run's messages go (docs/notifications.md)."""

    slack: SlackNotify | None = Field(
        default=None, description="Slack. Default: the deployment's webhook, if it has one."
    )
    webhook: WebhookNotify | None = Field(default=None, description="Your own server.")
    teams: TeamsNotify | None = Field(default=None, description="Microsoft Teams.")
    email: EmailNotify | None = Field(default=None, description="E-mail.")
    github: GitHubNotify | None = Field(default=None, description="The status of a commit on GitHub.")

    @property
    def hosts(self) -> list[tuple[str, str]]:
        """The hosts that the spec itself chooses, each after its place: operators choose what secrets hold."""
        hosts = [("/notify/webhook/url", self.webhook.host)] if self.webhook and self.webhook.url else []
        people = enumerate(self.email.to) if self.email else ()
        return hosts + [(f"/notify/email/to/{i}", address.rpartition("@")[2].lower()) for i, address in people]
