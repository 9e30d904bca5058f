"""The configurations of public models, so that a plan needs no network.

Each entry has the keys of the model's config.json that decide its sizes. The gated models' files need a token, which
the control plane does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

_MAXTEXT = "MaxText 0.2.5, configs/models (https://pypi.org/project/maxtext/0.2.5)"
_TRANSFORMERS = "the defaults of transformers 5.23, models/gemma (https://pypi.org/project/transformers)"
_COPIES = "public copies of config.json"


@dataclass(frozen=True)
class KnownModel:
    """A model's configuration: the source of its figures, and the day of the reading."""

    config: dict[str, Any]
    source: str
    as_of: date = date(2026, 11, 22)


def _dense(
    model_type: str, layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    """A model in 16 bits with 8 heads for keys and values, as all sizes of Llama 3.1 and Qwen 3 have."""
    return {
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


def _llama(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, Any]:
    return _dense("llama", layers, hidden, intermediate, heads, 128_256, tied=False)


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> dict[str, Any]:
    return _dense("qwen3", layers, hidden, intermediate, heads, 151_936, tied) | {"head_dim": 128}


_GEMMA_2B = {
    "model_type": "gemma",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 256_000,
}
_GEMMA_3_12B = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262_208,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
_LLAMA_8B, _LLAMA_70B = _llama(32, 4096, 14_336, 32), _llama(80, 8192, 28_672, 64)

KNOWN_MODELS = {
    "google/gemma-2b": KnownModel(_GEMMA_2B, _TRANSFORMERS),
    "google/gemma-2b-it": KnownModel(_GEMMA_2B, _TRANSFORMERS),
    "google/gemma-3-12b-pt": KnownModel(_GEMMA_3_12B, f"{_MAXTEXT}; {_COPIES}"),
    "google/gemma-3-12b-it": KnownModel(_GEMMA_3_12B, f"{_MAXTEXT}; {_COPIES}"),
    "Qwen/Qwen3-0.6B": KnownModel(_qwen3(28, 1024, 3072, 16, True), _MAXTEXT),
    "Qwen/Qwen3-4B": KnownModel(_qwen3(36, 2560, 9728, 32, True), _MAXTEXT),
    "Qwen/Qwen3-8B": KnownModel(_qwen3(36, 4096, 12_288, 32, False), _MAXTEXT),
    "Qwen/Qwen3-14B": KnownModel(_qwen3(40, 5120, 17_408, 40, False), _MAXTEXT),
    "Qwen/Qwen3-32B": KnownModel(_qwen3(64, 5120, 25_600, 64, False), _MAXTEXT),
    "meta-llama/Llama-3.1-8B": KnownModel(_LLAMA_8B, f"{_MAXTEXT}; {_COPIES}"),
    "meta-llama/Llama-3.1-8B-Instruct": KnownModel(_LLAMA_8B, f"{_MAXTEXT}; {_COPIES}"),
    "meta-llama/Llama-3.1-70B": KnownModel(_LLAMA_70B, _MAXTEXT),
    "meta-llama/Llama-3.1-70B-Instruct": KnownModel(_LLAMA_70B, _MAXTEXT),
}
