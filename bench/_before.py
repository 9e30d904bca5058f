"""Two trees side by side: each benchmark runs in the tree of a commit and in this tree, in turns, on one machine.

`python -m bench --before COMMIT NAME...` writes the commit's tree to build/before/, and creates an environment there by
the tree's own `make setup`. Both trees are measured by the same program: this tree's `bench/` replaces the other. A
figure is the median of the rounds. Where two figures differ, the line says `before → now (now / before)`.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOLE = "\0"  # stands for a number in the text of a line
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w.]*\.\d)")  # no part of a version

Figures = dict[tuple[str, int], list[str]]  # the numbers by the text of a line, and how often the text occurred before


def compare(commit: str, names: Sequence[str], rounds: int) -> None:
    """Run the benchmarks `names` in both trees, and print each line of their output once, with both figures.

    Raises SystemExit if there is no such commit, or if a benchmark fails in this tree. If a benchmark fails in the tree
    before, a line says so, with the last line of its output.
    """
    before = tree_of(commit)
    for name in names:
        print(f"\n## {name}: {commit} → this tree, medians of {rounds}", flush=True)
        measured: dict[Path, list[Figures]] = {before: [], ROOT: []}
        for _ in range(rounds):
            for tree, found in measured.items():
                found.append(figures(output_of(name, tree)))
        for line in lines(measured[before], measured[ROOT]):
            print(line, flush=True)


def tree_of(commit: str) -> Path:
    """Return the folder with the commit's tree, its environment, and this tree's benchmarks."""
    sha = _run("git", "rev-parse", "--short=12", f"{commit}^{{commit}}", folder=ROOT).strip()
    tree = ROOT / "build" / "before" / sha
    archive, unpacked = tree.with_suffix(".tar"), tree.with_suffix(".new")
    if not tree.exists():
        tree.parent.mkdir(parents=True, exist_ok=True)
        _run("git", "archive", "--output", str(archive), sha, folder=ROOT)
        shutil.rmtree(unpacked, ignore_errors=True)  # of an interrupted command
        shutil.unpack_archive(archive, unpacked)
        unpacked.rename(tree)
        archive.unlink()
    shutil.rmtree(tree / "bench", ignore_errors=True)
    shutil.copytree(ROOT / "bench", tree / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    _run("make", "setup", folder=tree)
    return tree


def output_of(name: str, tree: Path) -> str:
    python = sys.executable if tree == ROOT else str(tree / "build" / "venv" / "bin" / "python")
    done = subprocess.run([python, "-m", "bench", name], cwd=tree, capture_output=True, text=True)
    if done.returncode and tree == ROOT:
        raise SystemExit(f"{name} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1]
        print(f"  {name} fails in {tree.name}, so there is nothing to compare: {reason}", flush=True)
        return ""
    return done.stdout


def figures(output: str) -> Figures:
    """Return the numbers of each line, by the line's text with HOLE for each number."""
    found: Figures = {}
    seen: Counter[str] = Counter()
    for line in output.splitlines():
        if line.strip() and not line.startswith("## "):
            text = NUMBER.sub(HOLE, line.rstrip())
            text = text[: len(text) - len(text.lstrip())] + " ".join(text.split())  # columns differ with their figures
            found[text, seen[text]] = NUMBER.findall(line)
            seen[text] += 1
    return found


def lines(before: Sequence[Figures], now: Sequence[Figures]) -> Iterator[str]:
    """Yield each line of this tree's output with the medians of both trees, then the lines of the tree before alone."""
    for key in _keys(now):
        old, new = _medians(before, key), _medians(now, key)
        yield _with_figures(key[0], old, new) if old else _with_figures(key[0], new, new) + "   (no figure before)"
    for key in _keys(before):
        if not _medians(now, key):
            old = _medians(before, key)
            yield _with_figures(key[0], old, old) + "   (only before)"


def _keys(rounds: Sequence[Figures]) -> list[tuple[str, int]]:
    return list(dict.fromkeys(key for found in rounds for key in found if found[key]))


def _medians(rounds: Sequence[Figures], key: tuple[str, int]) -> list[str]:
    return [_median(numbers) for numbers in zip(*(found[key] for found in rounds if key in found), strict=True)]


def _median(numbers: Sequence[str]) -> str:
    """The median as the benchmark printed it; of an even number of rounds the higher."""
    return statistics.median_high((_value(number), number) for number in numbers)[1]


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _with_figures(text: str, before: Sequence[str], now: Sequence[str]) -> str:
    numbers = iter(zip(before, now, strict=True))
    return re.sub(HOLE, lambda _: _figure(*next(numbers)), text)


def _figure(before: str, now: str) -> str:
    if before == now:
        return now
    ratio = f"{_value(now) / _value(before):.2f}" if _value(before) else "was 0"
    return f"{before} → {now} ({ratio})"


def _run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        what = f"{' '.join(command)} failed with status {done.returncode} in {folder}"
        raise SystemExit(f"{what}:\n{done.stdout}{done.stderr}")
    return done.stdout
