"""The import stage: converts the base model from Hugging Face's layout to MaxText's, on the CPU."""

from __future__ import annotations

import os
import shutil
import sys

from .imports import quick_imports
from .maxtext_settings import common, use_source_config
from .stages import stage_main
from .work import Result, Work

# Orbax splits the checkpoint into as many parts. With one part, to_maxtext cannot save lazily loaded weights.
DEVICES = 16


def run(work: Work) -> Result:
    """Write DIRECTORY/imported/0/items in 32 bits, which optimisers need, whatever the type of the base."""
    prepared = work.done("prepare")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    with quick_imports():
        from maxtext.checkpoint_conversion import to_maxtext

    shutil.rmtree(work.imported, ignore_errors=True)
    use_source_config(prepared)
    to_maxtext.main(
        [to_maxtext.__file__, *common(prepared), f"base_output_directory={work.imported}", "hardware=cpu"],
        hf_model_path=prepared["base"],
        save_dtype="float32",
        simulated_cpu_devices_count=DEVICES,
    )
    return {"parameters": str(work.imported / "0" / "items")}


if __name__ == "__main__":
    sys.exit(stage_main("import", run))
