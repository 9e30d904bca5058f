"""Rows per second of `dropforge data check` without a model, and its memory, on a file of a million short rows."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path

ROWS = 1_000_000


def main() -> None:
    from dropforge.rows.check import check
    from dropforge.rows.sources import rows_of
    from dropforge.spec import Dataset, Evaluation

    columns = {"prompt": "Question: {question}\nContext: {context}", "completion": "{answer}"}
    dataset = Dataset.model_validate({"source": "gs://bench/rows.jsonl", "columns": columns})
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        with path.open("w") as file:
            file.writelines(f"{json.dumps(row(number))}\n" for number in range(ROWS))
        before, began, cpu = peak(), time.monotonic(), time.process_time()
        report = check(dataset, rows_of(path.open("rb"), path.name), Evaluation(), 42)
        seconds, used = time.monotonic() - began, time.process_time() - cpu
    print(f"{ROWS} rows of {report.scan.characters // ROWS} characters: {ROWS / seconds:.0f} rows/s")
    print(f"{seconds:.1f} s, of which {used:.1f} s of one processor")
    print(f"memory: {(peak() - before) / ROWS:.0f} bytes a row ({peak() / 1e6:.0f} MB in all)")


def row(number: int) -> dict[str, str]:
    return {
        "question": f"How many orders have an amount above {number}?",
        "context": "CREATE TABLE orders (id INT, amount INT)",
        "answer": f"SELECT COUNT(*) FROM orders WHERE amount > {number};",
    }


def peak() -> int:
    """The most memory of this process so far, in bytes. Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
