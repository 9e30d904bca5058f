"""`python -m bench --before COMMIT` pairs the figures of two trees by the text of their lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import _before as before
from bench.__main__ import main

# Lines of the tree before and of this tree, and what is printed of both.
PAIRS = [
    ("## stack (load 0.10, 2 cores)", "## stack (load 0.40, 2 cores)", ""),
    (
        "memory idle: stack 150 MiB, functions 190 MiB",
        "memory idle: stack 120 MiB, functions 190 MiB",
        "memory idle: stack 150 → 120 (0.80) MiB, functions 190 MiB",
    ),
    (
        "100 no-op runs at once: all succeeded in 12.0 s, 8.3 per second",
        "100 no-op runs at once: all succeeded in 6.0 s, 16.6 per second",
        "100 no-op runs at once: all succeeded in 12.0 → 6.0 (0.50) s, 8.3 → 16.6 (2.00) per second",
    ),
    (
        "  durable workflow, p50            11.4 ms   goal <= 10 ms",
        "  durable workflow, p50     5.7 ms   goal <= 10 ms",
        "  durable workflow, p50 11.4 → 5.7 (0.50) ms goal <= 10 ms",
    ),
    ("DBOS 3.4.0 30.0 ms", "DBOS 3.4.0 15.0 ms", "DBOS 3.4.0 30.0 → 15.0 (0.50) ms"),
    ("DBOS 3.4.0 60.0 ms", "DBOS 3.4.0 60.0 ms", "DBOS 3.4.0 60.0 ms"),  # the same text once more
    ("pure steps   255,212 /s", "pure steps 510,424 /s", "pure steps 255,212 → 510,424 (2.00) /s"),
    ("", "new 4", "new 4   (no figure before)"),
    ("gone 3", "", "gone 3   (only before)"),
]


def test_each_figure_that_differs_has_both_values_and_their_ratio() -> None:
    old, new, printed = ("\n".join(lines) for lines in zip(*PAIRS, strict=True))
    assert list(before.lines([before.figures(old)], [before.figures(new)])) == printed.split("\n")[1:]


def test_a_figure_is_the_median_of_the_rounds() -> None:
    rounds = [before.figures(f"rate {number} /s") for number in (9, 2, 4)]
    assert list(before.lines(rounds, [before.figures("rate 8 /s")])) == ["rate 4 → 8 (2.00) /s"]


def test_a_benchmark_that_the_tree_before_cannot_run_leaves_this_trees_figures() -> None:
    assert list(before.lines([{}, {}], [before.figures("rate 8 /s")])) == ["rate 8 /s   (no figure before)"]


def test_a_figure_of_zero_has_no_ratio() -> None:
    assert list(before.lines([before.figures("lost 0")], [before.figures("lost 2")])) == ["lost 0 → 2 (was 0)"]


def test_the_tree_before_is_measured_by_this_trees_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit's own code stays; its benchmarks go."""
    make = "setup:\n\t@mkdir -p build/venv && touch build/venv/made\n"
    for path, text in (("Makefile", make), ("code.py", "old"), ("bench/stack.py", "old"), ("bench/gone.py", "old")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "before"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "code.py").write_text("new")
    (tmp_path / "bench" / "stack.py").write_text("new")
    (tmp_path / "bench" / "gone.py").unlink()
    monkeypatch.setattr(before, "ROOT", tmp_path)
    tree = before.tree_of("HEAD")
    assert before.tree_of("HEAD") == tree  # a second time, the tree is there
    assert (tree / "code.py").read_text() == "old"
    assert [path.name for path in (tree / "bench").iterdir()] == ["stack.py"]
    assert (tree / "bench" / "stack.py").read_text() == "new"
    assert (tree / "build" / "venv" / "made").exists()


def test_an_unknown_benchmark_is_told_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--before", "HEAD", "stakc"])
    assert "no benchmark is called stakc; there are calls, chaos, " in capsys.readouterr().err
