"""The payloads that Slack accepts and those that it refuses.

Limits: https://docs.slack.dev/reference/block-kit/blocks; error bodies:
https://api.slack.com/changelog/2016-05-17-changes-to-errors-for-incoming-webhooks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

MAX_BLOCKS = 50
MAX_ATTACHMENTS = 100
MAX_TEXT = 40_000  # Slack truncates longer texts and does not refuse them

Json = dict[str, Any]


class Refused(Exception):
    """Slack's answer to a payload that it does not post: an HTTP status and a word."""

    def __init__(self, word: str, status: int = 400) -> None:
        super().__init__(word)
        self.word = word
        self.status = status


def parse_payload(body: bytes, content_type: str) -> Json:
    """The payload in a JSON body, or in the field `payload` of the older form. Raises Refused."""
    try:
        text = body.decode()
        if content_type.startswith("application/x-www-form-urlencoded") and not text.lstrip().startswith("{"):
            text = parse_qs(text).get("payload", [""])[0]
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("invalid_payload") from error
    if not isinstance(payload, dict):
        raise Refused("invalid_payload")
    return payload


def check_payload(payload: Json) -> None:
    """Raise Refused for a payload that Slack does not post; truncate a text that is too long."""
    text, blocks, attachments = (payload.get(key) for key in ("text", "blocks", "attachments"))
    if text is not None and not isinstance(text, str):
        raise Refused("invalid_payload")
    if isinstance(text, str) and len(text) > MAX_TEXT:
        payload["text"] = text[:MAX_TEXT]
    if not text and not blocks and not attachments:
        raise Refused("no_text")
    if attachments is not None:
        _check_attachments(attachments)
    if blocks is not None:
        check_blocks(blocks)


def check_blocks(blocks: Any) -> None:
    """Raise Refused for too many blocks, and for a block of an unknown type or outside of its limits."""
    if not isinstance(blocks, list):
        raise Refused("invalid_blocks_format")
    if len(blocks) > MAX_BLOCKS:
        raise Refused("invalid_blocks")
    ids: list[str] = []
    for block in blocks:
        if not isinstance(block, dict) or not _is_text(block, "type", 64) or block["type"] not in BLOCKS:
            raise Refused("invalid_blocks")
        if not _optional(block, "block_id", lambda value: _fits(value, 255)) or not BLOCKS[block["type"]](block):
            raise Refused("invalid_blocks")
        ids += [block["block_id"]] if "block_id" in block else []
    if len(ids) != len(set(ids)):
        raise Refused("invalid_blocks")


def _check_attachments(attachments: Any) -> None:
    if not isinstance(attachments, list) or not all(isinstance(item, dict) for item in attachments):
        raise Refused("invalid_attachments")
    if len(attachments) > MAX_ATTACHMENTS:
        raise Refused("too_many_attachments")
    for attachment in attachments:
        if "blocks" in attachment:
            check_blocks(attachment["blocks"])


def _section(block: Json) -> bool:
    fields = block.get("fields", [])
    return (
        ("text" in block or bool(fields))
        and _optional(block, "text", lambda value: _text_object(value, 3000))
        and _list_of(fields, 10, lambda value: _text_object(value, 2000))
        and _optional(block, "accessory", _element)
    )


def _header(block: Json) -> bool:
    return _text_object(block.get("text"), 150, ("plain_text",))


def _context(block: Json) -> bool:
    elements = block.get("elements")
    return bool(elements) and _list_of(elements, 10, lambda item: _text_object(item, 2000) or _image_element(item))


def _actions(block: Json) -> bool:
    elements = block.get("elements")
    return bool(elements) and _list_of(elements, 25, _element)


def _image(block: Json) -> bool:
    return (
        (_is_text(block, "image_url", 3000) or isinstance(block.get("slack_file"), dict))
        and _is_text(block, "alt_text", 2000)
        and _optional(block, "title", lambda value: _text_object(value, 2000, ("plain_text",)))
    )


def _markdown(block: Json) -> bool:
    return _is_text(block, "text", 12_000)


def _rich_text(block: Json) -> bool:
    return _list_of(block.get("elements"), 1000, lambda item: isinstance(item, dict))


BLOCKS: Mapping[str, Callable[[Json], bool]] = {
    "actions": _actions,
    "context": _context,
    "divider": lambda block: True,
    "header": _header,
    "image": _image,
    "markdown": _markdown,
    "rich_text": _rich_text,
    "section": _section,
}


def _element(value: Any) -> bool:
    """An interactive element. Only images and buttons are checked beyond their type."""
    if not isinstance(value, dict) or not _is_text(value, "type", 64):
        return False
    if value["type"] == "image":
        return _image_element(value)
    if value["type"] != "button":
        return True
    return (
        _text_object(value.get("text"), 75, ("plain_text",))
        and _optional(value, "url", lambda url: _fits(url, 3000))
        and _optional(value, "value", lambda text: _fits(text, 2000))
        and value.get("style", "primary") in ("primary", "danger")
    )


def _image_element(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "image" and _image(value)


def _text_object(value: Any, limit: int, kinds: tuple[str, ...] = ("plain_text", "mrkdwn")) -> bool:
    """A text of one of the `kinds`. https://docs.slack.dev/reference/block-kit/composition-objects/text-object"""
    if not isinstance(value, dict) or value.get("type") not in kinds:
        return False
    may_be_verbatim = value["type"] == "mrkdwn" and isinstance(value.get("verbatim"), bool)
    return _is_text(value, "text", limit) and ("verbatim" not in value or may_be_verbatim)


def _list_of(value: Any, limit: int, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= limit and all(check(item) for item in value)


def _optional(block: Json, key: str, check: Callable[[Any], bool]) -> bool:
    return key not in block or check(block[key])


def _is_text(block: Json, key: str, limit: int) -> bool:
    return bool(block.get(key)) and _fits(block[key], limit)


def _fits(value: Any, limit: int) -> bool:
    return isinstance(value, str) and len(value) <= limit
