"""Settings of MaxText for several stages. Functions import MaxText themselves: only its own environment has it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .work import Result


def on_tpu() -> bool:
    """Whether this image is for TPUs. Asking JAX would take the chips."""
    return find_spec("libtpu") is not None


def common(prepared: Result) -> list[str]:
    """`key=value` arguments for every MaxText program of this run. The programs read and write only local files."""
    return [
        *prepared["family"],
        "run_name=run",
        "scan_layers=true",
        "skip_jax_distributed_system=true",
        "enable_goodput_recording=false",
        "log_config=false",
        f"tokenizer_path={prepared['base']}",
        f"jax_cache_dir={prepared['xla_cache']}",  # XLA's compiled programs; MaxText's default is in the home directory
    ]


def use_source_config(prepared: Result) -> Any:
    """Make the converters use the base model's own configuration: MaxText's is the template's, with its sizes."""
    import jax
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from transformers import AutoConfig

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    config = AutoConfig.from_pretrained(prepared["base"])
    HF_MODEL_CONFIGS[prepared["model_name"]] = config
    return config
