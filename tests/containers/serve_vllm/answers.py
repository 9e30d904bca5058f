"""Requests at the limits of OpenAI's API, and the status that each engine and each version of vLLM answers."""

from __future__ import annotations

import json
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "how many cars are there"}]
LARGE = [{"role": "user", "content": "a" * (17 << 20)}]
HALF = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
# Method, path, and the rest of a request, with the status of its answer.
ANSWERS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "no model": ("POST", CHAT, {"json": {"messages": HELLO, "max_tokens": 1}}, 200),
    "no model for a text": ("POST", TEXT, {"json": {"prompt": "select", "max_tokens": 1}}, 200),
    "a model that is no name": ("POST", CHAT, {"json": {"messages": HELLO, "model": 5}}, 400),
    "another type": ("POST", CHAT, {"data": json.dumps({"messages": HELLO}), "content_type": "text/plain"}, 400),
    "deep JSON": ("POST", CHAT, {"data": b"[" * 100_000}, 400),
    "half of a surrogate pair": ("POST", CHAT, {"data": HALF}, 400),
    "17 MiB": ("POST", CHAT, {"json": {"messages": LARGE, "max_tokens": 1}}, 400),
    "a token id above the vocabulary": ("POST", TEXT, {"json": {"prompt": [10**6]}}, 400),
    "an empty prompt": ("POST", TEXT, {"json": {"prompt": ""}}, 400),
    "an empty stop": ("POST", CHAT, {"json": {"messages": HELLO, "stop": ""}}, 400),
    "an empty stop of two": ("POST", TEXT, {"json": {"prompt": "select", "stop": ["x", ""]}}, 400),
    "options of no stream": ("POST", CHAT, {"json": {"messages": HELLO, "stream_options": {"x": True}}}, 400),
    "another method": ("GET", CHAT, {}, 405),
    "no such route": ("POST", "/v1/nothing", {"json": {}}, 404),
    "no such model": ("POST", TEXT, {"json": {"prompt": "select", "model": "gpt-9"}}, 404),
    "an administrative route": ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "x", "lora_path": "/x"}}, 404),
}  # fmt: skip
