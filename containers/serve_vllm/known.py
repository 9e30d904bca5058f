"""Whether this image's vLLM knows a model's type, read from its files: importing vLLM takes half a minute.

vLLM reads a model's configuration with transformers, or with a class of its own. Without either it ends before it loads
weights, with an error that names no mend.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

# Runs in vLLM's Python, which is not this process's. It imports neither package.
_LOOK = """
import importlib.metadata as m, importlib.util as u, json
print(json.dumps({n: [u.find_spec(n).submodule_search_locations[0], m.version(n)] for n in ("vllm", "transformers")}))
"""
_TABLES = {
    "transformers": ("models/auto/configuration_auto.py", "models/auto/auto_mappings.py"),
    "vllm": ("transformers_utils/config.py",),
}


def unknown_model(config: dict[str, Any], program: str = "vllm") -> str:
    """Why `program` cannot serve a model with that config.json, and the mend; "" if it may be able to."""
    kind, packages = config.get("model_type", ""), _packages(program)
    if not kind or not packages or config.get("auto_map"):
        return ""
    files = [Path(packages[name][0]) / file for name, found in _TABLES.items() for file in found]
    text = "".join(file.read_text() for file in files if file.is_file())
    if not text or re.search(rf'"{re.escape(kind)}"|\b{re.escape(kind)}=', text):
        return ""
    versions = " and ".join(f"{name} {version}" for name, (_, version) in packages.items())
    return (
        f"the model's type is {kind!r} ({', '.join(config.get('architectures') or ['no architecture'])}, saved by "
        f"transformers {config.get('transformers_version', 'of an unknown version')}), which {versions} of this image "
        "do not know; expected a type that they know: build serve_vllm on a newer vLLM (containers/bases.toml)"
    )


def _packages(program: str) -> dict[str, list[str]]:
    """Directory and version of vLLM and transformers; {} if the program's Python does not tell."""
    path = shutil.which(program)
    first = Path(path).read_bytes().partition(b"\n")[0] if path else b""
    if not first.startswith(b"#!"):
        return {}
    python = first[2:].decode().split()
    found = subprocess.run([*python, "-c", _LOOK], capture_output=True, text=True)
    packages: dict[str, list[str]] = json.loads(found.stdout) if found.returncode == 0 else {}
    return packages
