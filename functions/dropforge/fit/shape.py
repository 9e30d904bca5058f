"""The sizes of a model, by arithmetic from its config.json: no weights, no PyTorch.

tests/containers/train_trl/test_shapes.py compares the counts with those of the real classes on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Config = Mapping[str, Any]

# Keys that a config.json may leave out, by model type: transformers' own defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_dim": 128},
}
_SIGLIP = {"num_channels": 3}
_SAVED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The projections of a layer, by the names of `training.adapter.target_modules`: the widths that they join.
_PROJECTIONS = {
    "q_proj": ("hidden", "query"),
    "k_proj": ("hidden", "key_value"),
    "v_proj": ("hidden", "key_value"),
    "o_proj": ("query", "hidden"),
    "gate_proj": ("hidden", "intermediate"),
    "up_proj": ("hidden", "intermediate"),
    "down_proj": ("intermediate", "hidden"),
}


@dataclass(frozen=True)
class ModelShape:
    """The quantities that decide a model's memory and files.

    parameters: all, with those of other parts such as a vision tower. linear: the weights that 4-bit loading quantises.
    query, key_value: the widths of the projections, heads times the size of a head. normalised_heads: the queries and
    keys are normalised (Qwen 3, Gemma 3). normalised_outputs: the output of each block is, too (Gemma 3).
    tied: the output layer shares the embedding's weights. saved_bytes: of a weight in the files.
    """

    parameters: int
    linear: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    query: int
    key_value: int
    normalised_heads: bool = False
    normalised_outputs: bool = False
    tied: bool = True
    saved_bytes: int = 2
    model_type: str = ""

    @property
    def file_bytes(self) -> int:
        """The bytes of the weights' files."""
        return self.parameters * self.saved_bytes

    @property
    def embedding(self) -> int:
        """The weights of one embedding."""
        return self.vocabulary * self.hidden

    @property
    def largest_projection(self) -> int:
        """The weights of the largest matrix of a layer."""
        return self.hidden * max(self.intermediate, self.query)

    def key_value_bytes(self, size: int) -> int:
        """The bytes that a token takes in the cache of keys and values, in numbers of `size` bytes."""
        return 2 * self.layers * self.key_value * size

    def adapter_parameters(self, r: int, modules: str | list[str] = "all-linear") -> int:
        """The parameters of a LoRA adapter: r rows and columns of each projection. An unknown module counts as all."""
        named = set(modules) if isinstance(modules, list) else set(_PROJECTIONS)
        names = named if named <= _PROJECTIONS.keys() else set(_PROJECTIONS)
        widths: list[int] = [getattr(self, width) for name in names for width in _PROJECTIONS[name]]
        return r * self.layers * sum(widths)


def shape_of(config: Config) -> ModelShape | None:
    """The shape of a model, from its config.json; None for a type of model whose layers are not known here.

    Raises KeyError if the configuration lacks a size.
    """
    text, vision = config, None
    if config.get("model_type") == "gemma3":
        text = {"model_type": "gemma3_text", **config["text_config"]}
        vision = {**_SIGLIP, **config["vision_config"]}
    kind = str(text.get("model_type"))
    if kind not in _DEFAULTS:
        return None
    shape = _text_shape(kind, {**_DEFAULTS[kind], **{key: value for key, value in text.items() if value is not None}})
    saved = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32")
    shape = replace(shape, model_type=str(config["model_type"]), saved_bytes=_SAVED_BYTES.get(saved, 4))
    return _with_vision(shape, vision) if vision else shape


def _text_shape(kind: str, text: Config) -> ModelShape:
    """A language model: an embedding, layers with attention and a gated block, and an output layer."""
    hidden, intermediate, layers = text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"]
    heads, vocabulary = text["num_attention_heads"], text["vocab_size"]
    size = text.get("head_dim") or hidden // heads
    query, key_value = heads * size, text.get("num_key_value_heads", heads) * size
    normalised_heads, normalised_outputs = kind in ("qwen3", "gemma3_text"), kind in ("gemma2", "gemma3_text")
    linear = 2 * hidden * (query + key_value) + 3 * hidden * intermediate
    norms = hidden * (4 if normalised_outputs else 2) + (2 * size if normalised_heads else 0)
    biases = 0
    if text.get("attention_bias"):
        biases += query + 2 * key_value + (0 if kind == "qwen2" else hidden)
    if text.get("mlp_bias"):
        biases += 2 * intermediate + hidden
    tied = bool(text.get("tie_word_embeddings", False))
    # Each layer has its matrices and vectors; after the last layer is one more vector.
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return ModelShape(
        parameters=embeddings + layers * (linear + norms + biases) + hidden,
        linear=layers * linear,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        vocabulary=vocabulary,
        query=query,
        key_value=key_value,
        normalised_heads=normalised_heads,
        normalised_outputs=normalised_outputs,
        tied=tied,
    )


def _with_vision(shape: ModelShape, vision: Config) -> ModelShape:
    """Gemma 3's whole model: SigLIP without its head, and the projector, beside the language model."""
    hidden, intermediate = vision["hidden_size"], vision["intermediate_size"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    linear = 4 * hidden * hidden + 2 * hidden * intermediate
    biases, norms = 5 * hidden + intermediate, 4 * hidden
    patch = vision["num_channels"] * vision["patch_size"] ** 2 * hidden + hidden
    layers = vision["num_hidden_layers"]
    tower = layers * (linear + biases + norms) + patch + patches * hidden + 2 * hidden
    projector = hidden * shape.hidden + hidden
    return replace(shape, parameters=shape.parameters + tower + projector, linear=shape.linear + layers * linear)
