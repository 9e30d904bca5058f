"""The memory of a process that reads rows does not grow with their file: a data set may have 64 GiB."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL, LARGE = 16 << 20, 128 << 20  # bytes of text
ROW = 4 << 10
ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, size: int) -> None:
    rows = [
        [f"How many are above {number}?", f"SELECT {number} {'FROM orders ' * 340}"] for number in range(size // ROW)
    ]
    if path.suffix == ".gz":
        with gzip.open(path, "wt", compresslevel=1) as file:
            file.writelines(f"{','.join(row)}\n" for row in [["prompt", "completion"], *rows])
    elif path.suffix == ".jsonl":
        with path.open("w") as lines:
            lines.writelines(f"{json.dumps(dict(zip(('prompt', 'completion'), row, strict=True)))}\n" for row in rows)
    else:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(dict(zip(("prompt", "completion"), zip(*rows, strict=True), strict=True)))
        parquet.write_table(table, path, use_dictionary=False)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv.gz", "rows.parquet"])
def test_the_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    for folder, size in (("small", SMALL), ("large", LARGE)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / name, size)
    command = [sys.executable, "-P", __file__, name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, grown = json.loads(done.stdout.splitlines()[-1])
    assert rows > 0.9 * LARGE / ROW
    assert grown < LARGE / 3, f"the memory grew by {grown >> 20} MiB for a file of {LARGE >> 20} MiB of text"


class Client:
    """A bucket with one file."""

    size, generation, crc32c = 0, 1, ""

    def __init__(self, path: Path) -> None:
        self.path = path

    def bucket(self, _name: str) -> Client:
        return self

    def get_blob(self, _name: str) -> Client:
        return self

    def download_to_filename(self, path: str, checksum: Any) -> None:
        os.link(self.path, path)


def most_memory() -> int:
    """The most memory of this program so far, in bytes. (`getrusage` counts that of the parent before `exec`, too.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def main(name: str) -> None:
    """Read a small and a large file in one process. Print the rows of each, and by how much the memory grew."""
    from containers.common.rows import load_split
    from dropforge.spec import Dataset, Evaluation

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    source, before = Dataset(source=f"gs://bucket/{name}"), 0
    for folder in (Path("small"), Path("large")):
        before = most_memory()
        split, _ = load_split(source, Evaluation(holdout_fraction=0.01), 42, Client(folder / name), folder / "work")
        assert all(row.content.endswith("orders ") for row in split.train)
        print(json.dumps([len(split.train), most_memory() - before]))


if __name__ == "__main__":
    main(sys.argv[1])
