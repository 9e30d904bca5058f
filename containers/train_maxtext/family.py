"""Maps a Hugging Face checkpoint to a model of MaxText, with the settings that make MaxText compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from containers.common.errors import config_error

Config = Mapping[str, Any]
Settings = dict[str, Any]

# MaxText's scaling of Llama 3.1 is in its code (layers/embeddings.py, LLaMARotaryEmbedding), not in a setting.
LLAMA31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Family:
    """The name of a MaxText model, as a template, and the settings that replace the template's sizes."""

    name: str
    settings: Settings

    def arguments(self) -> list[str]:
        """`key=value` arguments for any MaxText program."""
        changes = [f"{key}={str(value).lower()}" for key, value in self.settings.items()]
        return [f"model_name={self.name}", "override_model_config=true", *changes]


def family_of(config: Config, source: str) -> Family:
    """The family of a checkpoint's config.json. Raises JobError for models that the converter would convert wrongly."""
    kind = str(config.get("model_type"))
    make = FAMILIES.get(kind)
    if make is None:
        raise config_error(
            f"model.source {source!r} is of the type {kind!r}, which cannot be converted to MaxText and back; "
            f"expected one of {', '.join(sorted(FAMILIES))}",
            "use a model of these types, or a target that trains with TRL",
        )
    try:
        return make(config)
    except KeyError as error:
        raise config_error(f"the config.json of model.source {source!r} has no {error}") from None


def _qwen3(config: Config) -> Family:
    _require(config, "attention_bias", False)
    _require(config, "use_sliding_window", False)
    theta, scaling = _rope(config)
    if scaling:
        raise _unsupported("rope_scaling", scaling, "none")
    return Family("qwen3-0.6b", _sizes(config, theta))


def _llama(config: Config) -> Family:
    _require(config, "attention_bias", False)
    _require(config, "mlp_bias", False)
    theta, scaling = _rope(config)
    if scaling and {name: scaling.get(name) for name in LLAMA31_ROPE} != LLAMA31_ROPE:
        raise _unsupported("rope_scaling", scaling, f"none, or Llama 3.1's, {LLAMA31_ROPE}")
    return Family("llama3.1-8b", {**_sizes(config, theta), "rope_use_scale": bool(scaling)})


FAMILIES: dict[str, Callable[[Config], Family]] = {"llama": _llama, "qwen3": _qwen3}


def _sizes(config: Config, theta: float) -> Settings:
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", config["hidden_act"], "'silu'")
    heads = config["num_attention_heads"]
    return {
        "base_emb_dim": config["hidden_size"],
        "base_mlp_dim": config["intermediate_size"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "normalization_layer_epsilon": config["rms_norm_eps"],
        "rope_max_timescale": int(theta),
        "logits_via_embedding": bool(config.get("tie_word_embeddings", False)),
        "normalize_embedding_logits": False,
    }


def _rope(config: Config) -> tuple[float, Settings]:
    """The base of the rotary frequencies, and their scaling or {}. transformers 5 keeps both in `rope_parameters`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        raise KeyError("rope_theta")
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    return float(theta), {} if kind == "default" else parameters


def _require(config: Config, name: str, expected: object) -> None:
    if config.get(name, expected) != expected:
        raise _unsupported(name, config[name], repr(expected))


def _unsupported(name: str, value: object, expected: str) -> Exception:
    return config_error(
        f"the model's config.json has {name} {value!r}; MaxText's model of this family expects {expected}",
        "use another model, or a target that trains with TRL",
    )
