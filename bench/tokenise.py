"""Rows per second of the tokenisation, with one process and with one per core, and of reading the token ids back.

The rows are about 500 characters long: four prompts of the tiny model's data set, one after another. The start of the
processes counts. `datasets.map` is what people use instead, with the same chat template: TRL's function for prompts and
completions, and one that renders texts and encodes a batch of them. Both find out less than ours, such as answers that
are cut.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = 40_000


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # of the processes
    from containers.common import chat
    from containers.common.processes import cores
    from containers.common.tokenise import Tokeniser, load, save
    from dropforge.rows import Row
    from dropforge_local import tiny

    rows = [
        Row(
            (
                {"role": "user", "content": "\n".join([tiny.PROMPT.format(**row)] * 4)},
                {"role": "assistant", "content": row["answer"]},
            )
        )
        for row in tiny.house_rows(ROWS)
    ]
    base = str(tiny.base_model(ROOT / "build" / "tiny"))
    tokeniser = Tokeniser.load(base, False, "sft", None)
    print(f"{ROWS} rows of {sum(len(row.content) for row in rows) // ROWS} characters")
    show("render alone", lambda: [chat.render(tokeniser.tokenizer, row.messages) for row in rows])
    encoded: Any = None
    for processes in sorted({1, cores()}):
        encode = partial(replace(tokeniser, processes=processes).encode, rows, 512, "rows")
        encoded = show(f"{processes} process(es)", encode)
    show_map(tokeniser.tokenizer, rows)
    key = show("digest for the cache", lambda: tokeniser.key(rows, 512))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokens"
        save(path, key, encoded)
        show(f"read ({path.stat().st_size / 1e6:.0f} MB)", lambda: load(path, key))


def show_map(tokenizer: Any, rows: list[Any]) -> None:
    import datasets

    from containers.common.processes import cores

    def like_trl(row: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
        return {"input_ids": ids, "mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}

    def batched(batch: dict[str, Any]) -> dict[str, Any]:
        ends = [
            len(tokenizer.apply_chat_template(row, tokenize=False, add_generation_prompt=True))
            for row in batch["prompt"]
        ]
        whole = [row + answer for row, answer in zip(batch["prompt"], batch["completion"], strict=True)]
        texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in whole]
        found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        places = zip(found["offset_mapping"], ends, strict=True)
        return {
            "input_ids": found["input_ids"],
            "mask": [[int(start >= end) for start, _ in row] for row, end in places],
        }

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(
        [{"prompt": [*row.messages[:-1]], "completion": [row.messages[-1]]} for row in rows]
    )
    for processes in sorted({1, cores()}):
        alone = processes if processes > 1 else None
        for name, work, options in (("like TRL", like_trl, {}), ("batched", batched, {"batched": True})):
            run = partial(data.map, work, num_proc=alone, load_from_cache_file=False, keep_in_memory=True, **options)
            show(f"map {name}, {processes}", run)


def show(name: str, work: Callable[[], Any]) -> Any:
    began = time.monotonic()
    result = work()
    print(f"{name:22} {ROWS / (time.monotonic() - began):9.0f} rows/s", flush=True)
    return result


if __name__ == "__main__":
    main()
