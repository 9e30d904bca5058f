"""Channel Microsoft Teams: an Adaptive Card to the webhook of a workflow, whose URL is a secret.

Microsoft has retired the older webhooks of Office 365 connectors
(https://devblogs.microsoft.com/microsoft365dev/retirement-of-office-365-connectors-within-microsoft-teams/).
A workflow posts messages of up to 28 KB (https://learn.microsoft.com/en-us/connectors/teams/).
"""

from __future__ import annotations

import json
from typing import Any

from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.spec import JobSpec

from .channel import Failure
from .news import Line, News
from .outgoing import post
from .values import Unreadable, value_of

NAME = "teams"
MAX_BYTES = 28 * 1024


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secret of a spec, by JSON pointer; empty without Teams."""
    return {"/notify/teams/webhook_secret": spec.notify.teams.webhook_secret} if spec.notify.teams else {}


def address_of(spec: JobSpec | None, settings: Settings) -> str | None:
    """The spec's secret; a deployment has none of its own."""
    return spec.notify.teams.webhook_secret if spec and spec.notify.teams else None


def send(context: Context, address: str, news: News) -> Failure | None:
    """Send a card to the workflow of the secret; None on success. Never raises."""
    try:
        url = value_of(context.cloud, address)
    except Unreadable as unreadable:
        return unreadable.failure
    body, headers = json.dumps(message_of(news)).encode(), {"Content-Type": "application/json"}
    return post(url, body, headers, f"Teams, secret {address!r}", context.cloud.clients.webhook_emulator())


def message_of(news: News) -> dict[str, Any]:
    """The message with its card. Text runs have no Markdown: a foreign text makes no link and no mention.

    https://adaptivecards.io/explorer/TextRun.html
    """
    title = _paragraph({"text": news.title, "weight": "Bolder", "size": "Medium"})
    where = _paragraph({"text": f"run {news.event.run} · {news.event.id}", "size": "Small", "isSubtle": True})
    card = {
        "type": "AdaptiveCard",
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": [title, *map(_line, news.lines), where],
        "actions": [{"type": "Action.OpenUrl", "title": "Open the run", "url": news.link}],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _line(line: Line) -> dict[str, Any]:
    label = [{"text": f"{line.label}: ", "weight": "Bolder"}] if line.label else []
    font = {"fontType": "Monospace"} if line.is_code else {}
    return _paragraph(*label, {"text": line.text, **font})


def _paragraph(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", **run} for run in runs]}
