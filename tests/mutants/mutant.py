"""A mutant, and the catalogue of the mutants that people wrote: catalogue/*.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).with_name("catalogue")


@dataclass(frozen=True)
class Mutant:
    """One change of a file: `old` becomes `new`.

    `breaks` is the promise that the change breaks. A mutant that breaks none says why in `equivalent`, and no judge
    sees it. `survives` says why the judges do not notice a mutant yet. `fixed` is what kills the mutant in CI: "model",
    a file of unit tests, or the name of a simulation (judges.py). `place` is the index of the old text in the file;
    None: it occurs once.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str = ""
    equivalent: str = ""
    survives: str = ""
    fixed: str = ""
    place: int | None = None

    @property
    def fixed_judge(self) -> str:
        """The judge that kills the mutant in CI; "" if CI does not judge it."""
        if self.fixed in ("", "model"):
            return self.fixed
        return "unit" if self.fixed.startswith("tests/") else "chaos"

    def applied(self, source: str) -> str:
        """The file's text with the change. Raises ValueError if the old text does not occur exactly once."""
        place = self.place
        if place is None:
            if (count := source.count(self.old)) != 1:
                where = f"the old text of mutant {self.id} occurs {count} times in {self.file}; expected once"
                raise ValueError(f"{where}: change its entry in {CATALOGUE.relative_to(ROOT)}/")
            place = source.index(self.old)
        return source[:place] + self.new + source[place + len(self.old) :]


def catalogue() -> list[Mutant]:
    """Every mutant that a person wrote. Its id is the file without its prefix and suffix, and its own name."""
    return [mutant for path in sorted(CATALOGUE.glob("*.toml")) for mutant in _read(path)]


def _read(path: Path) -> Iterator[Mutant]:
    for file, entries in tomllib.loads(path.read_text()).items():
        module = file.removeprefix("functions/dropforge/").removesuffix(".py").removesuffix(".workflows.yaml")
        for name, entry in entries.items():
            yield Mutant(id=f"{module}/{name}", file=file, **entry)
