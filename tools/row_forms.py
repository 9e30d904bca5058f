"""An example of each form of rows, for the table in docs/data-formats.md and for the tests of that table."""

from __future__ import annotations

import json
from typing import Any

from dropforge.rows import FORMS, Reader, Row

Q, A = "Which team? The lamp is broken", "returns"
EXAMPLES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]},
    "conversations": {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]},
    "contents": {
        "contents": [{"role": "user", "parts": [{"text": Q}]}, {"role": "model", "parts": [{"text": A}]}],
        "systemInstruction": {"parts": [{"text": "Name the team."}]},
    },
    "prompt_completion": {"prompt": Q, "completion": A},
    "prompt_response": {"prompt": Q, "response": A, "system": "Name the team."},
    "query_response": {"query": Q, "response": A, "history": [["Hello", "How can I help?"]]},
    "instruction_output": {"instruction": "Name the team.", "input": "The lamp is broken", "output": A},
    "instruction_response": {"instruction": "Name the team.", "context": "The lamp is broken", "response": A},
    "input_output": {"input": Q, "output": A},
    "question_answer": {"question": Q, "answer": A},
    "text": {"text": "The team returns handles lamps."},
    "completion": {"completion": "The team returns handles lamps."},
}


def table() -> str:
    """A line for each form, in the order in which `auto` tries them."""
    lines = ["| `dataset.format` | columns (and those it reads if they are there) | a row | read as | learnt |"]
    lines.append("|---|---|---|---|---|")
    for name, form in FORMS.items():
        row = Reader(form)(EXAMPLES[name])
        more = f" ({', '.join(f'`{each}`' for each in form.optional)})" if form.optional else ""
        columns = ", ".join(f"`{each}`" for each in form.columns)
        example = json.dumps(EXAMPLES[name], ensure_ascii=False)
        lines.append(f"| `{name}` | {columns}{more} | `{example}` | {read_as(row)} | {learnt(row)} |")
    return "\n".join(lines) + "\n"


def read_as(row: Row) -> str:
    if row.text:
        return "a text"
    return ", ".join(f"{message['role']}: {json.dumps(message['content'])}" for message in row.messages)


def learnt(row: Row) -> str:
    return row.text or "; ".join(str(row.messages[at]["content"]) for at in row.answers)
