"""Channel webhook: the run event's JSON by POST, signed by the rules of Standard Webhooks.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.run.events import run_event_message
from dropforge.spec import JobSpec

from .channel import Failure
from .news import News
from .outgoing import post
from .values import Unreadable, value_of

NAME = "webhook"
KEY_BYTES = range(24, 65)


class Address(NamedTuple):
    """The URL or the secret that holds it, and the secret with the signing keys."""

    url: str
    url_secret: str
    signing_secret: str


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secrets of a spec, by JSON pointer; empty without a webhook."""
    webhook = spec.notify.webhook
    named = {"url_secret": webhook.url_secret, "signing_secret": webhook.signing_secret} if webhook else {}
    return {f"/notify/webhook/{field}": secret for field, secret in named.items() if secret}


def address_of(spec: JobSpec | None, settings: Settings) -> Address | None:
    """The spec's webhook; a deployment has none of its own."""
    webhook = spec.notify.webhook if spec else None
    return Address(webhook.url or "", webhook.url_secret or "", webhook.signing_secret) if webhook else None


def send(context: Context, address: Address, news: News) -> Failure | None:
    """Send the run event; None on success. Never raises. A repeated event has the same `webhook-id`."""
    cloud = context.cloud
    try:
        url = address.url or value_of(cloud, address.url_secret)
        keys = _keys(value_of(cloud, address.signing_secret))
    except Unreadable as unreadable:
        return unreadable.failure
    if not keys:
        expected = "expected whsec_ and the base64 of 24 to 64 random bytes; two keys, for a change, with a space"
        return Failure(f"secret {address.signing_secret!r} holds no signing key: {expected}", may_pass=False)
    body, _ = run_event_message(news.event)
    seconds = int(context.now().timestamp())
    place = f"the webhook of secret {address.url_secret!r}" if address.url_secret else "the webhook of the spec"
    headers = {"Content-Type": "application/json", **signature_headers(keys, news.event.id, seconds, body)}
    return post(url, body, headers, place, cloud.clients.webhook_emulator())


def signature_headers(keys: list[bytes], message_id: str, seconds: int, body: bytes) -> dict[str, str]:
    """The headers that prove a message: one signature for each key, so that a receiver can change its key."""
    signed = f"{message_id}.{seconds}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def _keys(text: str) -> list[bytes]:
    """The keys in a signing secret; empty if one of them is no key."""
    try:
        keys = [base64.b64decode(word.removeprefix("whsec_"), validate=True) for word in text.split()]
    except ValueError:
        return []
    return keys if all(len(key) in KEY_BYTES for key in keys) else []
