"""Write schemas/*.schema.json from the pydantic models; `--check` fails when a file is out of date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dropforge.run.events import job_event_schema, run_event_schema
from dropforge.spec import job_spec_schema
from dropforge.spec.policy import policy_schema
from dropforge.spec.request import request_schema

ROOT = Path(__file__).resolve().parent.parent / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """Return every published schema by file name."""
    return {
        "job_spec.schema.json": job_spec_schema(),
        "job_event.schema.json": job_event_schema(),
        "run_event.schema.json": run_event_schema(),
        "request.schema.json": request_schema(),
        "policy.schema.json": policy_schema(),
    }


def main(argv: list[str]) -> int:
    outdated = []
    for name, schema in schemas().items():
        text = json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            outdated.append(name)
            if "--check" not in argv:
                path.write_text(text)
    if outdated and "--check" in argv:
        print(f"{', '.join(outdated)} differ from the models; run `make schemas`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
