"""Channel Slack: Block Kit messages to an incoming webhook, or by a bot, which keeps a run's messages in one thread.

An incoming webhook answers only "ok": it does not tell the message's `ts`, so it cannot begin a thread
(https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks).
Limits (https://docs.slack.dev/reference/block-kit/blocks): header 150 characters, section text 3,000, 50 blocks.
"""

from __future__ import annotations

import html
import json
import re
from http.client import HTTPException
from typing import Any, NamedTuple

from dropforge.base import names
from dropforge.base.errors import NotFound
from dropforge.base.redact import cut, redact
from dropforge.base.settings import Settings
from dropforge.cloud.classify import client_errors
from dropforge.cloud.context import Cloud
from dropforge.context import Context
from dropforge.run.record import RunState, Tone
from dropforge.spec import JobSpec

from .channel import Failure
from .news import Line, News
from .values import Unreadable, value_of

NAME = "slack"
MAX_HEADER, MAX_SECTION = 150, 3000
_LINK = re.compile(r"https?://[A-Za-z0-9.:/_%;=?-]{1,500}")
_HALF_ENTITY = re.compile(r"&[a-z]{0,3}\Z")
_EMOJI = {
    RunState.ACCEPTED: ":inbox_tray:",
    RunState.REJECTED: ":no_entry:",
    RunState.TRAINING: ":fire:",
    RunState.SUCCEEDED: ":white_check_mark:",
    RunState.FAILED: ":x:",
    RunState.CANCELLED: ":black_square_for_stop:",
}
_TONES = {Tone.WARNING: ":warning:", Tone.NEWS: ":arrows_counterclockwise:", Tone.SUCCESS: ":white_check_mark:"}
# https://docs.slack.dev/reference/methods/chat.postMessage: errors after which the same call may succeed.
_MAY_PASS = frozenset(
    {"fatal_error", "internal_error", "ratelimited", "rate_limited", "request_timeout", "service_unavailable"}
)
_NO_THREAD = frozenset({"cannot_reply_to_message", "message_not_found", "thread_not_found"})  # a user deleted it


class Address(NamedTuple):
    """The secret with a webhook's URL or, with a channel, the secret with a bot's token."""

    secret: str
    channel: str = ""


class Message(NamedTuple):
    """A Slack message: the text of the notification, and the blocks of the message."""

    text: str
    blocks: list[dict[str, Any]]


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secret of a spec, by JSON pointer; empty without Slack."""
    slack = spec.notify.slack
    named = {"webhook_secret": slack.webhook_secret, "token_secret": slack.token_secret} if slack else {}
    return {f"/notify/slack/{field}": secret for field, secret in named.items() if secret}


def address_of(spec: JobSpec | None, settings: Settings) -> Address | None:
    """The spec's webhook or bot or, if the spec has none, the deployment's webhook."""
    if spec and (slack := spec.notify.slack):
        return Address(slack.webhook_secret or slack.token_secret or "", slack.channel or "")
    return Address(settings.slack_webhook_secret) if settings.slack_webhook_secret else None


def message_of(news: News) -> Message:
    """The Slack message for a message."""
    emoji = _TONES[news.tone] if news.is_notice else _EMOJI[news.state]
    return Message(_escaped(news.title), [_header(f"{emoji} {news.title}"), *_sections(news), _context(news)])


def send(context: Context, address: Address, news: News) -> Failure | None:
    """Send a message to the webhook, or to the run's thread in the bot's channel; None on success. Never raises."""
    message = message_of(news)
    try:
        value = value_of(context.cloud, address.secret)
    except Unreadable as unreadable:
        return unreadable.failure
    if address.channel:
        return _post(context, address, value, news, message)
    return _send(context.cloud, address.secret, value, message)


def _send(cloud: Cloud, secret: str, url: str, message: Message) -> Failure | None:
    from slack_sdk import errors  # from the package, not `slack_sdk.errors`: see Clients.slack

    try:
        response = cloud.clients.slack(url).send(
            text=message.text, blocks=message.blocks, unfurl_links=False, unfurl_media=False
        )
    except (
        ValueError,
        HTTPException,
        errors.SlackClientError,
    ) as error:  # their texts repeat the URL, which is a secret
        problem = f"secret {secret!r} does not hold the URL of a Slack webhook: {type(error).__name__}"
        return Failure(problem, may_pass=False)
    except OSError as error:
        return Failure(f"Slack could not be reached: {type(error).__name__}", may_pass=True)
    if response.status_code == 200:
        return None
    problem = f"Slack answered {response.status_code} {cut(response.body, 100)!r} to the webhook of secret {secret!r}"
    return Failure(problem, may_pass=response.status_code == 429 or response.status_code >= 500)


def _post(context: Context, address: Address, token: str, news: News, message: Message) -> Failure | None:
    """Post to the run's thread. The first message begins the thread.

    Two first messages at once are both in the channel, and later messages follow the one that was noted first. The end
    of a run and a notice are also shown in the channel itself.
    """
    try:
        thread = _thread(context, address, news.event.run)
    except client_errors() as error:
        context.log(f"the Slack thread of the run could not be read: {type(error).__name__}", stage="notify")
        thread = ""
    posted = _call(context.cloud, address, token, message, thread, is_shown=news.is_end or news.is_notice)
    if isinstance(posted, Failure):
        return posted
    if not thread and posted:
        try:
            noted = json.dumps({"channel": address.channel, "ts": posted}).encode()
            context.store.put_new(names.slack_object(news.event.run), noted)
        except client_errors() as error:  # the message is there; the next message begins another thread
            context.log(f"the Slack thread of the run could not be noted: {type(error).__name__}", stage="notify")
    return None


def _thread(context: Context, address: Address, run: str) -> str:
    """The `ts` of the run's first message; "" before it, and for an object that is no note of this channel."""
    try:
        noted = json.loads(context.store.read(names.slack_object(run)).data)
        return str(noted["ts"]) if noted["channel"] == address.channel else ""
    except (NotFound, ValueError, TypeError, KeyError):
        return ""


def _call(
    cloud: Cloud, address: Address, token: str, message: Message, thread: str, *, is_shown: bool
) -> str | Failure:
    """Call chat.postMessage; return the `ts` of the new message. Its errors are answers with the status 200."""
    from slack_sdk import errors  # from the package, not `slack_sdk.errors`: see Clients.slack

    reply: dict[str, Any] = {"thread_ts": thread, "reply_broadcast": is_shown} if thread else {}
    try:
        answer = cloud.clients.slack_bot(token).chat_postMessage(
            channel=address.channel, text=message.text, blocks=message.blocks, unfurl_links=False, unfurl_media=False,
            **reply,
        )  # fmt: skip
        return str(answer.get("ts") or "")
    except errors.SlackApiError as error:
        status, word = _refusal(error.response)
        if thread and word in _NO_THREAD:
            return _call(cloud, address, token, message, "", is_shown=is_shown)
        problem = f"Slack answered {status} {word!r} to the bot of secret {address.secret!r} in {address.channel}"
        return Failure(problem, may_pass=word in _MAY_PASS or status == 429 or status >= 500)
    except (ValueError, HTTPException, errors.SlackClientError) as error:  # their texts may repeat the token
        problem = f"secret {address.secret!r} does not hold the token of a Slack bot: {type(error).__name__}"
        return Failure(problem, may_pass=False)
    except OSError as error:
        return Failure(f"Slack could not be reached: {type(error).__name__}", may_pass=True)


def _refusal(response: Any) -> tuple[int, str]:
    """The status and the word of a refusal: the SDK gives a SlackResponse or, for a body that is no JSON, a dict."""
    if isinstance(response, dict):
        return int(response.get("status") or 500), ""
    return response.status_code, cut(str(response.get("error", "")), 100)


def _header(text: str) -> dict[str, Any]:
    return {"type": "header", "text": {"type": "plain_text", "text": cut(text, MAX_HEADER)}}


def _sections(news: News) -> list[dict[str, Any]]:
    """The lines, in as few paragraphs as they fit."""
    paragraphs: list[str] = []
    for line in map(_marked, news.lines):
        if paragraphs and len(paragraphs[-1]) + 1 + len(line) <= MAX_SECTION:
            paragraphs[-1] += f"\n{line}"
        else:
            paragraphs.append(line)
    return [{"type": "section", "text": _verbatim(text)} for text in paragraphs]


def _marked(line: Line) -> str:
    """A line in Slack's markup. Of its addresses, only its own link becomes a link."""
    link = _linked(line.link, line.link)
    label = f"*{_escaped(line.label)}* " if line.label else ""
    shown = _HALF_ENTITY.sub("", _escaped(line.text)[: MAX_SECTION - len(label) - len(link) - 2])
    if line.is_code:
        shown = f"`{shown.replace('`', chr(39))}`"
    return label + (shown.replace(_escaped(line.link), link, 1) if link else shown)


def _linked(link: str, text: str) -> str:
    return f"<{link}|{text}>" if _LINK.fullmatch(link) else ""


def _context(news: News) -> dict[str, Any]:
    ids = _escaped(f"run `{news.event.run}` · {news.event.id}")
    text = " · ".join(filter(None, [_linked(news.link, "open the run"), ids]))
    return {"type": "context", "elements": [_verbatim(text)]}


def _verbatim(text: str) -> dict[str, Any]:
    """A text in which Slack makes no links of addresses, names of channels or names of people.

    https://docs.slack.dev/reference/block-kit/composition-objects/text-object
    """
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _escaped(text: str) -> str:
    """The text without credentials, links and mentions of everybody (`<!channel>`)."""
    return html.escape(redact(text), quote=False)
