"""Checks before a spec is accepted: what it needs exists, fits and is affordable. Seconds now save hours later."""

from __future__ import annotations

import re

from dropforge.base import names
from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.base.settings import Settings
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.fit.configuration import NoConfiguration, find_shape
from dropforge.fit.memory import least_bytes
from dropforge.fit.plan import phase_problems
from dropforge.fit.shape import ModelShape
from dropforge.money.limits import MIN_ATTEMPT_SECONDS, MIN_ENDPOINT_SECONDS, serving_price, training_seconds
from dropforge.platforms import get_target
from dropforge.platforms.prices import SECONDS_PER_HOUR
from dropforge.rows.check import Report
from dropforge.rows.sample import problems_of, samples_of
from dropforge.rows.sources import exists
from dropforge.spec import JobSpec, seconds
from dropforge.spec.machine import GIB
from dropforge.spec.misnamed import file_problems
from dropforge.spec.policy import Policy, policy_of
from dropforge.spec.templates import template_problems
from dropforge.tell.channels import secrets_of

from .ceiling import policy_problems

_OVERHEAD_BYTES = int(1.5 * GIB)  # the CUDA context, and the activations of one short sequence


def check(cloud: Cloud, spec: JobSpec) -> None:
    """Raise InvalidSpec, which lists every problem that would make the spec fail after its acceptance.

    Raises BrokenPolicy if the deployment's policy cannot be read.
    """
    problems = rule_problems(spec, policy_of(cloud.settings.policy), shape_of(cloud, spec))
    problems += [
        *deployment_problems(spec, cloud.settings),
        *_missing_secrets(cloud, spec),
        *_missing_objects(cloud, spec),
    ]
    if problems := problems or problems_of(data_reports(cloud, spec)):
        raise InvalidSpec(problems)


def rule_problems(spec: JobSpec, policy: Policy, shape: ModelShape | None) -> list[SpecProblem]:
    """The problems by the policy and the rules of size, machine, templates, time and money.

    No rule needs an answer of the cloud.
    """
    problems = [*policy_problems(spec, policy), *fit_problems(spec, shape), *machine_problems(spec)]
    return [
        *problems,
        *file_problems(spec.sources),
        *template_problems(spec),
        *time_problems(spec),
        *budget_problems(spec),
        *endpoint_budget_problems(spec),
    ]


def shape_of(cloud: Cloud, spec: JobSpec) -> ModelShape | None:
    """The shape of the model; None if its configuration cannot be read now. The container then decides."""
    try:
        return find_shape(spec.model, cloud.clients)
    except NoConfiguration as error:
        cloud.log(str(error), stage="submit")
        return None


def fit_problems(spec: JobSpec, shape: ModelShape | None) -> list[SpecProblem]:
    """The problems of phases that do not fit their machines, and of an endpoint that is too short for the rows.

    Without a shape, the size in the model's name (`gemma-2b`, `Qwen3-4B`) decides, if the name has one.
    """
    phases = phase_problems(spec, shape) if shape else _size_problems(spec)
    return [*phases, *_length_problems(spec)]


def _length_problems(spec: JobSpec) -> list[SpecProblem]:
    """A problem if the endpoint refuses requests as long as the rows of the training."""
    if spec.serve is None or spec.serve.max_model_len >= spec.training.max_length:
        return []
    message = "the endpoint takes fewer tokens than a row of the training may have"
    expected = f"at least training.max_length, {spec.training.max_length}"
    return [SpecProblem("/serve/max_model_len", message, str(spec.serve.max_model_len), expected)]


def _size_problems(spec: JobSpec) -> list[SpecProblem]:
    """A problem if the model, by the size in its name, does not fit the accelerators."""
    parameters = parameters_of(spec.model.source)
    if parameters is None:
        return []  # the container checks the configuration before it downloads the weights
    adapter = spec.training.adapter.type
    needed = (least_bytes(parameters, spec.training) + _OVERHEAD_BYTES) / GIB
    trains_on = spec.target.accelerators
    if needed <= trains_on.memory_gib:
        return []
    needs = f"about {needed:.0f} GiB for {parameters / 1e9:.3g}B parameters with adapter {adapter!r}"
    has = f"{trains_on.memory_gib:.0f} GiB on {trains_on.count} {trains_on.name}"
    expected = f"at most {has}; try a smaller adapter (qlora) or another target"
    return [SpecProblem("/model/source", "the model does not fit the accelerator", needs, expected)]


def machine_problems(spec: JobSpec) -> list[SpecProblem]:
    """Problems of images that cannot start on their machines or lack what the spec asks, and of slow networks."""
    serving = spec.serve.machine_problems(spec) if spec.serve else ()
    return [*spec.target.machine_problems(spec), *serving]


def parameters_of(source: str) -> int | None:
    """The number of parameters in a model's name; None if the name does not state it."""
    last = source.rstrip("/").rsplit("/", 1)[-1]
    match = re.search(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)(b|m)(?![A-Za-z0-9])", last, re.I)
    if not match:
        return None
    return int(float(match[1]) * (1e9 if match[2].lower() == "b" else 1e6))


def time_problems(spec: JobSpec) -> list[SpecProblem]:
    """A problem if max_duration ends before an attempt can start and train a little."""
    start = spec.target.start_seconds
    if seconds(spec.limits.max_duration) >= start + MIN_ATTEMPT_SECONDS:
        return []
    expected = (
        f"at least {start + MIN_ATTEMPT_SECONDS}s: target {spec.target.type} takes {start} s or more until it trains, "
        f"and {MIN_ATTEMPT_SECONDS} s of training are the least"
    )
    return [SpecProblem("/limits/max_duration", "too short for an attempt", repr(spec.limits.max_duration), expected)]


def budget_problems(spec: JobSpec) -> list[SpecProblem]:
    """A problem if a price is unknown, or if the budget pays for less than the shortest attempt and endpoint."""
    budget = spec.limits.max_cost_usd
    if budget is None:
        return []
    pointer, where = "/limits/max_cost_usd", get_target(spec.target.type).regions(spec)
    prices = [get_target(spec.target.type).price(spec, index) for index in range(len(where))]
    serving = [serving_price(spec)] if spec.serve else []
    for part, price in [*(("target", price) for price in prices), *(("serve", price) for price in serving)]:
        if price.usd_per_hour is None:
            expected = f"a known price: set {part}.price_usd_per_hour, or leave the budget out"
            return [SpecProblem(pointer, "the budget cannot be enforced", price.source, expected)]
    for region, price in zip(where, prices, strict=True):
        if training_seconds(spec, price) < MIN_ATTEMPT_SECONDS:
            offered, expected = f"{budget} USD at {price.usd_per_hour} USD per hour in {region}", "a minute of training"
            if serving:
                offered += f" and {serving[0].usd_per_hour} for the endpoint"
                expected += f" and {MIN_ENDPOINT_SECONDS // 60} minutes of the endpoint"
            return [SpecProblem(pointer, "the budget is too small", offered, f"at least {expected}")]
    return []


def endpoint_budget_problems(spec: JobSpec) -> list[SpecProblem]:
    """A problem if the price of a named endpoint is unknown, or if its budget pays for less than the shortest one."""
    if spec.serve is None or spec.serve.budget is None:
        return []
    budget, price = spec.serve.budget, serving_price(spec)
    if price.usd_per_hour is None:
        expected = "a known price: set serve.price_usd_per_hour, or leave the budget out"
        return [SpecProblem("/serve/budget", "the budget cannot be enforced", price.source, expected)]
    least = price.usd_per_hour * MIN_ENDPOINT_SECONDS / SECONDS_PER_HOUR
    if budget.usd >= least:
        return []
    offered = f"{budget.usd:g} USD at {price.usd_per_hour} USD per hour"
    expected = f"at least {least:.2f} USD, for {MIN_ENDPOINT_SECONDS // 60} minutes of the endpoint"
    return [SpecProblem("/serve/budget/usd", "the budget is too small", offered, expected)]


def deployment_problems(spec: JobSpec, settings: Settings) -> list[SpecProblem]:
    """What the deployment lacks for the spec's target and endpoint: images, clusters, rights."""
    serving = spec.serve.missing(spec, settings) if spec.serve else ()
    return [*spec.target.missing(spec, settings), *serving]


def _missing_secrets(cloud: Cloud, spec: JobSpec) -> list[SpecProblem]:
    """Problems of secrets that do not exist or are disabled. Only the metadata is read, never a value."""
    wanted = {f"/secrets/{name}": secret for name, secret in spec.secrets.items()} | secrets_of(spec)
    if spec.serve is not None and spec.serve.has_key and cloud.settings.endpoint_key_secret:
        wanted["/serve"] = cloud.settings.endpoint_key_secret  # `make deploy` creates it; its value is the operator's
    return [problem for pointer, secret in wanted.items() if (problem := _secret_problem(cloud, pointer, secret))]


def _secret_problem(cloud: Cloud, pointer: str, secret: str) -> SpecProblem | None:
    from google.api_core.exceptions import BadRequest, Forbidden, NotFound

    name = names.secret_version(cloud.settings.project, secret)
    try:
        version = cloud.clients.secrets().get_secret_version(name=name, timeout=TIMEOUT_SECONDS)
    except (BadRequest, NotFound):
        expected = f"a secret of project {cloud.settings.project}"
        return SpecProblem(pointer, "the secret does not exist", repr(secret), expected)
    except Forbidden:
        expected = "a secret on which dropforge has secretmanager.versions.get"
        return SpecProblem(pointer, "the secret may not be looked at", repr(secret), expected)
    if version.state.name != "ENABLED":  # only an enabled version can be read later
        return SpecProblem(pointer, f"the secret's version is {version.state.name}", repr(secret), "an enabled version")
    return None


def _missing_objects(cloud: Cloud, spec: JobSpec) -> list[SpecProblem]:
    """Problems of gs:// sources without an object."""
    problems = []
    for pointer, uri in spec.sources.items():
        if uri.startswith("gs://"):
            problem = _object_problem(cloud, pointer, uri)
            problems += [problem] if problem else []
    return problems


def data_reports(cloud: Cloud, spec: JobSpec) -> list[Report]:
    """The checks of the first rows of the data, if the caller may read them.

    They name columns. So nothing is read for a spec that is refused otherwise, such as by the policy, or from the
    buckets of specs and runs: a container may read only its own run there.
    """
    return samples_of(spec, cloud.clients, (cloud.settings.specs_bucket, cloud.settings.runs_bucket))


def _object_problem(cloud: Cloud, pointer: str, uri: str) -> SpecProblem | None:
    from google.api_core.exceptions import BadRequest, Forbidden, NotFound

    storage, bucket = cloud.clients.storage(), uri.split("/")[2]
    try:
        if exists(storage, uri, is_model=pointer == "/model/source", timeout=TIMEOUT_SECONDS):
            return None
    except (BadRequest, NotFound):  # a name that is invalid for a bucket is a bad request
        return SpecProblem(pointer, "the bucket does not exist", f"gs://{bucket}", "a bucket of this project")
    except Forbidden:
        return SpecProblem(pointer, "the bucket may not be read", f"gs://{bucket}", "a bucket that dropforge may read")
    expected = "a prefix with objects" if pointer == "/model/source" else "an object, a folder/ or a glob with objects"
    return SpecProblem(pointer, "the object does not exist", uri, expected)
