"""The data sets of the demo: what a model is judged on, it has never read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dropforge_cli.sources import SOURCES
from dropforge_local import tiny

LOCAL = sorted((Path(__file__).resolve().parents[2] / "examples" / "local").glob("*.json"))
PHRASINGS = [
    (lead, phrasing, re.sub(r"\\{[a-z]+\\}", r"[a-z0-9]+", re.escape(lead + phrasing)))
    for lead in tiny.LEADS
    for _, phrasings in tiny.QUERIES
    for phrasing in phrasings
]


def phrasings(rows: list[dict[str, str]]) -> set[tuple[str, str]]:
    """The lead and the phrasing of every question."""
    found = set()
    for row in rows:
        fitting = [(lead, phrasing) for lead, phrasing, form in PHRASINGS if re.fullmatch(form, row["question"])]
        assert fitting, row
        found.update(fitting[:1] if len(fitting) == 1 else [])
    return found


def test_the_rows_to_evaluate_on_share_no_phrasing_with_the_others() -> None:
    trained = phrasings(tiny.house_rows(tiny.ROWS))
    judged = phrasings(tiny.house_rows(tiny.UNSEEN_ROWS, held_out=True))
    assert len(judged) > 20
    assert len(trained) > 3 * len(judged)
    assert not trained & judged


@pytest.mark.parametrize("path", LOCAL, ids=lambda path: path.stem)
def test_every_demo_is_judged_on_unseen_phrasings(path: Path, tmp_path: Path) -> None:
    spec = json.loads(path.read_text())
    for part, rows in (
        ("evaluation", tiny.house_rows(tiny.UNSEEN_ROWS, held_out=True)),
        ("dataset", tiny.house_rows(tiny.ROWS)),
    ):
        file = SOURCES[spec[part]["source"]](tmp_path)
        assert [json.loads(line) for line in file.read_text().splitlines()] == rows
