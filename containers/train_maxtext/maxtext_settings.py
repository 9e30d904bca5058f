"""Settings of MaxText that several stages share. Imports MaxText where it is used: only its own environment has it."""

from __future__ import annotations

from typing import Any

from stages import Result


def common(prepared: Result) -> list[str]:
    """`key=value` words for every MaxText program of this run. Only local files are read and written."""
    return [
        *prepared["family"],
        "run_name=run",
        "scan_layers=true",
        "skip_jax_distributed_system=true",
        "enable_goodput_recording=false",
        "log_config=false",
        f"tokenizer_path={prepared['base']}",
        f"jax_cache_dir={prepared['xla_cache']}",  # of what XLA compiled; MaxText's default is in the home directory
    ]


def use_source_config(prepared: Result) -> Any:
    """Have the converters work by the base model's own configuration; MaxText's is the template's, with its sizes."""
    import jax
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from transformers import AutoConfig

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    config = AutoConfig.from_pretrained(prepared["base"])
    HF_MODEL_CONFIGS[prepared["model_name"]] = config
    return config
