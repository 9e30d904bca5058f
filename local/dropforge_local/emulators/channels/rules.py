"""What the services behind the channels accept and refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

MAX_CARD_BYTES = 28 * 1024  # https://learn.microsoft.com/en-us/connectors/teams/
MAX_DESCRIPTION = 140
TOLERANCE_SECONDS = 300  # the reference libraries of Standard Webhooks refuse older and newer messages
CARD = "application/vnd.microsoft.card.adaptive"
_STATES = ("error", "failure", "pending", "success")


class Refused(Exception):
    """The answer to a message that a service does not take: an HTTP status and a text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def check_webhook(headers: Mapping[str, str], body: bytes, now: float) -> None:
    """Raise Refused for a request that is no message of Standard Webhooks."""
    _object(body)
    if "json" not in headers.get("Content-Type", ""):
        raise Refused(415, "the Content-Type is not JSON")
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        if not headers.get(name):
            raise Refused(400, f"Missing required headers: {name}")
    timestamp = headers["webhook-timestamp"]
    if not timestamp.isdigit() or abs(int(timestamp) - now) > TOLERANCE_SECONDS:
        raise Refused(400, "Message timestamp too old or too new")
    signatures = headers["webhook-signature"].split(" ")
    if "." in headers["webhook-id"] or not all(re.fullmatch(r"v1,[A-Za-z0-9+/]{43}=", s) for s in signatures):
        raise Refused(401, "No matching signature found")


def check_card(body: bytes) -> None:
    """Raise Refused for a request that the workflow "post to a channel when a webhook request is received" refuses."""
    if len(body) > MAX_CARD_BYTES:
        raise Refused(413, "Request Entity too large")
    message = _object(body)
    attachments = message.get("attachments")
    if message.get("type") != "message" or not isinstance(attachments, list) or not attachments:
        raise Refused(400, "expected a message with attachments")
    for attachment in attachments:
        card = attachment.get("content") if isinstance(attachment, dict) else None
        if not isinstance(card, dict) or attachment.get("contentType") != CARD or card.get("type") != "AdaptiveCard":
            raise Refused(400, "expected an Adaptive Card; older cards of connectors are not supported")
        if card.get("version") not in ("1.0", "1.1", "1.2", "1.3", "1.4", "1.5"):
            raise Refused(400, "the version of the card is not supported")
        if not all(_is_element(element) for element in card.get("body", [])):
            raise Refused(400, "the card has an element that is not valid")
        if not all(action.get("type") == "Action.OpenUrl" and action.get("url") for action in card.get("actions", [])):
            raise Refused(400, "the card has an action that is not valid")


def check_status(headers: Mapping[str, str], body: bytes, sha: str) -> None:
    """Raise Refused for a commit status that GitHub refuses.

    https://docs.github.com/en/rest/commits/statuses#create-a-commit-status
    """
    if not headers.get("User-Agent"):
        raise Refused(403, "Request forbidden by administrative rules. Please make sure you have a User-Agent header")
    status = _object(body)
    if not re.fullmatch(r"[0-9a-f]{40}", sha):
        raise Refused(422, f"No commit found for SHA: {sha}")
    if status.get("state") not in _STATES:
        raise Refused(422, "Validation Failed: state is not included in the list")
    if len(status.get("description") or "") > MAX_DESCRIPTION:
        raise Refused(422, "Validation Failed: description is too long (maximum is 140 characters)")
    if not str(status.get("target_url", "https://")).startswith(("http://", "https://")):
        raise Refused(422, "Validation Failed: target_url must use http(s) scheme")


def _is_element(element: Any) -> bool:
    if not isinstance(element, dict):
        return False
    if element.get("type") == "TextBlock":
        return isinstance(element.get("text"), str)
    runs = element.get("inlines")
    return (
        element.get("type") == "RichTextBlock"
        and isinstance(runs, list)
        and all(run.get("type") == "TextRun" and isinstance(run.get("text"), str) for run in runs)
    )


def _object(body: bytes) -> Json:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "Problems parsing JSON") from None
    if not isinstance(value, dict):
        raise Refused(400, "Body should be a JSON object")
    return value
