"""Let the installed gcloud check commands without running them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..gcloud import RunGcloud


def refused(run_gcloud: RunGcloud, commands: list[str], directory: Path) -> dict[str, str]:
    """Return gcloud's error message for each command that it refuses. gcloud writes its own files to `directory`."""
    path = directory / "commands.json"
    path.write_text(json.dumps([{"command_string": command} for command in commands]))
    environment = {**os.environ, "CLOUDSDK_CONFIG": str(directory), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    done = run_gcloud(["meta", "lint-gcloud-commands", f"--commands-file={path}"], environment)
    results = json.loads(done.stdout)
    assert len(results) == len(commands), done.stderr
    return {result["command_string"]: result["error_message"] for result in results if not result["success"]}
