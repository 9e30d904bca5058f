"""The example specs of the repository, with which somebody can start."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# In the image they are beside the package, in the repository beside the folder of the package.
_PLACES = (_HERE.parent / "examples", _HERE.parent.parent / "examples")


@cache
def examples() -> dict[str, str]:
    """The text of each example by its name, such as local/cloud_run; without the line that names the schema's file."""
    folder = next((place for place in _PLACES if place.is_dir()), None)
    paths = sorted(folder.rglob("*.json")) if folder else []
    texts = {path.relative_to(folder or _HERE).with_suffix("").as_posix(): path.read_text() for path in paths}
    return {name: _without_schema(text) for name, text in texts.items()}


def offered(*, is_local: bool) -> list[str]:
    """The names of the examples, those that this deployment can run first."""
    return sorted(examples(), key=lambda name: (name.startswith("local/") is not is_local, name))


def _without_schema(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith('"$schema"'))
