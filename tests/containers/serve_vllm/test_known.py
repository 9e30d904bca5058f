"""Whether vLLM knows a model's type, with a `vllm` program whose Python has vLLM's and transformers' tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from containers.serve_vllm.known import unknown_model

CONFIG = {"model_type": "lfm3", "architectures": ["Lfm3ForCausalLM"], "transformers_version": "5.23.0"}
FILES = {
    "transformers/models/auto/configuration_auto.py": 'CONFIGS = [("gemma3", "Gemma3Config")]\n',
    "transformers/models/auto/auto_mappings.py": 'MORE = [("qwen3", "Qwen3Config")]\n',
    "transformers-5.12.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformers\nVersion: 5.12.0\n",
    "vllm/transformers_utils/config.py": 'CONFIGS = Registry(chatglm="ChatGLMConfig")\n',
    "vllm-0.29.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.29.0\n",
    "transformers/__init__.py": "raise ImportError('imported')\n",
    "vllm/__init__.py": "raise ImportError('imported')\n",
}


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A vllm program whose interpreter has the packages of FILES, which cannot be imported."""
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec "{sys.executable}" "$@"\n')
    vllm = tmp_path / "vllm"
    vllm.write_text(f"#!{python}\n")
    for made in (python, vllm):
        made.chmod(0o755)
    return str(vllm)


def test_a_type_that_the_image_lacks_is_named_with_the_mend(program: str) -> None:
    assert unknown_model(CONFIG, program) == (
        "the model's type is 'lfm3' (Lfm3ForCausalLM, saved by transformers 5.23.0), which vllm 0.29.0 and "
        "transformers 5.12.0 of this image do not know; expected a type that they know: build serve_vllm on a newer "
        "vLLM (containers/bases.toml)"
    )


@pytest.mark.parametrize("change", [{"model_type": "gemma3"}, {"model_type": "qwen3"}, {"model_type": "chatglm"},
                                    {"auto_map": {"AutoConfig": "x.Y"}}, {"model_type": ""}])  # fmt: skip
def test_vllm_decides_about_the_others(program: str, change: dict[str, Any]) -> None:
    """Also about a newer transformers_version alone: training always has a newer one than serving."""
    assert unknown_model({**CONFIG, **change}, program) == ""


def test_a_program_that_is_no_script_of_python_decides_itself(program: str, tmp_path: Path) -> None:
    Path(program).write_text("#!/bin/sh\n")
    assert unknown_model(CONFIG, program) == ""
    assert unknown_model(CONFIG, str(tmp_path / "missing")) == ""
