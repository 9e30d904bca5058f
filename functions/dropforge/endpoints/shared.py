"""Shared endpoints: the adapters of many runs beside one base model. Pure planning of what a revision serves.

A revision of a shared endpoint is a list of adapters. An adapter is added or taken away by a rollout to a revision with
another list: Cloud Run cannot tell each instance to load one, and an instance that starts later must have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from pydantic import JsonValue

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.run.artifacts import Manifest, attempt_directory, files_digest
from dropforge.run.events import dumps
from dropforge.run.record import Parity, Stored
from dropforge.run.seal import SEAL
from dropforge.spec.job_spec import MOST_ADAPTERS, ServeSpec

# What must be equal in two bases. The seal of each adapter covers the rest: other files name versions of libraries.
BASE_FILES = (".safetensors", "config.json", "tokenizer.json", "chat_template.jinja")
OTHERS = ("generation_config.json", "tokenizer_config.json")
# Of `serve`: what belongs to one run or to the endpoint's record, and does not change an answer.
OWN_FIELDS = {"budget", "canary", "endpoint", "price_usd_per_hour", "region", "share", "startup_timeout", "ttl"}
ROWS_AGAIN = 4  # of the seal of an adapter that has passed its whole seal in an earlier revision


class Base(Stored):
    """What all adapters of a shared endpoint have in common: the base model's files, and how they are served."""

    uri: str
    digest: str
    serving: dict[str, JsonValue]


class Adapter(Stored):
    """An adapter in a revision. Requests select it by `name`.

    `digest` is that of its files, `source` that of its run. `parity` is the comparison in this revision; `sealed`: all
    rows of its seal were compared in an earlier one. `expires` None: it serves until it is retired.
    """

    name: str
    run: str
    digest: str
    source: str
    parity: Parity | None = None
    sealed: bool = False
    expires: datetime | None = None


def base_of(manifest: Manifest, serve: ServeSpec) -> Base:
    """The base of a model whose adapter was not merged."""
    digest = files_digest(manifest, manifest.serve_path, lambda path: path.endswith(BASE_FILES) and path not in OTHERS)
    return Base(uri=manifest.base.uri, digest=digest, serving=serving_of(serve))


def serving_of(serve: ServeSpec) -> dict[str, Any]:
    """The fields of `serve` that all runs of a shared endpoint must have in common."""
    return serve.model_dump(mode="json", exclude=OWN_FIELDS)


def name_of(base: Base, source: str, region: str, number: int) -> str:
    """The name of the endpoint of a base, for specs without `serve.endpoint`. Sources never share one.

    `number` counts the endpoints of the base that were retired before: their names stay taken.
    """
    return names.shared_endpoint(source, region, base.digest, dumps(base.serving).decode(), str(number))


def why_unfit(manifest: Manifest) -> str:
    """Why a committed model cannot be served as an adapter; "" if it can."""
    if manifest.adapter_path is None:
        return "it has no adapter: the run trained every weight"
    if not manifest.serve_path.endswith("/base"):
        return "its adapter was merged into the model: the spec of the run had no serve.share"
    seal = f"{attempt_directory(manifest.attempt)}/{SEAL}"
    if all(file.path != seal for file in manifest.files):
        return "it has no parity seal, and that an adapter was loaded does not show that it answers"
    return ""


def why_differs(known: Base, other: Base) -> str:
    """Why a model with the base `other` cannot be served beside those of `known`; "" if it can."""
    if known.digest != other.digest:
        return (
            f"its base is {other.uri} ({other.digest[:12]}…), and the endpoint's is {known.uri} ({known.digest[:12]}…)"
        )
    return why_served_otherwise(known, other.serving)


def why_served_otherwise(known: Base, serving: dict[str, Any]) -> str:
    """Which field of `serve` differs from that of the endpoint; "" if none does."""
    for field in sorted({*known.serving, *serving}):
        if known.serving.get(field) != serving.get(field):
            return f"serve.{field} is {serving.get(field)!r}, and the endpoint's is {known.serving.get(field)!r}"
    return ""


def why_no_room(adapters: Sequence[Adapter], name: str, source: str, endpoint: str) -> str:
    """Why a model with this name cannot be added; "" if it can. A model of the same name and source is replaced."""
    if name == endpoint:
        return f"{name!r} is the name of the endpoint, by which requests get the base model"
    taken = next((adapter for adapter in adapters if adapter.name == name), None)
    if taken is not None and taken.source != source:
        return f"the name {name!r} is taken by run {taken.run} of another source"
    if taken is None and len(adapters) >= MOST_ADAPTERS:
        return f"it serves {len(adapters)} models, and at most {MOST_ADAPTERS} fit"
    return ""


def plus(adapters: Iterable[Adapter], new: Adapter) -> list[Adapter]:
    """The adapters with a new one, which replaces one of its name. None has been compared in the new revision yet."""
    return [*minus(adapters, new.name), new]


def minus(adapters: Iterable[Adapter], name: str) -> list[Adapter]:
    """The adapters of a new revision without the one of that name."""
    kept = [adapter for adapter in adapters if adapter.name != name]
    return [evolve(adapter, parity=None) for adapter in kept]
