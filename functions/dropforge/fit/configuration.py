"""The config.json of a spec's model: from the table of known models, a bucket, or the Hub. Never its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dropforge.base.errors import DropforgeError
from dropforge.base.names import parse_gs_uri
from dropforge.cloud.clients import Clients
from dropforge.cloud.hub import FETCH_SECONDS, MAX_BYTES
from dropforge.cloud.objects import read_at_most

from .known import KNOWN_MODELS
from .shape import Config, ModelShape, shape_of

if TYPE_CHECKING:
    from dropforge.spec.sections import Model


class NoConfiguration(DropforgeError):
    """The model's configuration cannot be had here, or its type is not known. It is no reason to refuse a spec."""


def find_shape(model: Model, clients: Clients | None) -> ModelShape:
    """The shape of a spec's model. Without clients, only known models have one. Raises NoConfiguration."""
    return read_shape(_find_config(model, clients), model.source)


def read_shape(config: Config, source: str) -> ModelShape:
    """The shape that a configuration describes. Raises NoConfiguration."""
    try:
        shape = shape_of(config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:  # a file of a user
        raise NoConfiguration(f"the config.json of {source} lacks a size: {error!r}") from None
    if shape is None:
        kind = config.get("model_type")
        raise NoConfiguration(f"{source} is of the type {kind!r}, whose layers dropforge does not know")
    return shape


def _find_config(model: Model, clients: Clients | None) -> Config:
    if (known := KNOWN_MODELS.get(model.source)) and model.revision == "main":
        return known.config
    if clients is None:
        raise NoConfiguration(f"{model.source} is not among the known models")
    try:
        in_bucket = model.source.startswith("gs://")
        data = _from_bucket(model.source, clients) if in_bucket else clients.hub().config(model.source, model.revision)
        config = json.loads(data)
    except Exception as error:  # noqa: BLE001  (gated, missing, offline, malformed: the container reads it again)
        raise NoConfiguration(f"no config.json of {model.source} can be read here: {error}") from None
    if not isinstance(config, dict):
        raise NoConfiguration(f"the config.json of {model.source} is not a JSON object")
    return config


def _from_bucket(source: str, clients: Clients) -> bytes:
    bucket, path = parse_gs_uri(source)
    blob = clients.storage().bucket(bucket).blob(f"{path.rstrip('/')}/config.json")
    data = read_at_most(blob, MAX_BYTES, FETCH_SECONDS, retry=None)
    if data is None:
        raise FileNotFoundError(f"{blob.name} does not exist in {bucket}")
    return data
