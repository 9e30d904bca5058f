"""Removes credentials from text that leaves the process: known formats, and the passwords of URLs.

A text that is cut must be redacted first, because half a credential has no format any more: `cut` does both.
"""

from __future__ import annotations

import re

# A format without its own prefix must begin a word: no letter before it, or an escape of JSON or of a URL.
_WORD = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[bfnrt])|(?<=%[0-9A-F]{2}))"
_SPACE = r"(?:[ +]|%20)"
_SLASH = r"(?:\\{0,4}/|%2F)"

# By name: tests/base/test_redact.py has an example of each. The patterns also read bytes, and JSON in which line feeds
# and slashes are escaped. Nothing that must match follows a repeat without an upper bound, so that no text makes the
# search slow.
FORMATS = {
    # All lines of the key. If its end was cut off: up to the last character of a line of base64.
    "private key": (
        rf"-----BEGIN{_SPACE}(?:[A-Z0-9]{{1,20}}{_SPACE}){{0,3}}PRIVATE{_SPACE}KEY(?:{_SPACE}BLOCK)?-----"
        # (?>x*) is x*+, which Python 3.11.2 (Debian 12) gets wrong if x can fail after its first character.
        rf"(?>(?:[A-Za-z0-9+/=\\:,.%\s]|-(?!----))*)(?:-----END{_SPACE}[A-Z0-9 +%]{{1,60}}-----)?"
    ),
    "JSON web token": rf"{_WORD}eyJ[A-Za-z0-9_-]{{8,1024}}+\.eyJ[A-Za-z0-9_-]{{8,}}+(?:\.[A-Za-z0-9_-]*+)?",
    "password of a URL": r"(?:(?<=://)|(?<=:\\/\\/))[^\s/?#:@\"'<>\\]{0,128}+:[^\s/?#\"'<>\\]{1,256}(?=@)",
    "signature of a URL": r"(?:X-(?:Goog|Amz)-(?:Signature|Security-Token)|[?&](?:Signature|sig|access_token))"
    r"=[A-Za-z0-9%+/=_.~-]{16,}+",
    "bearer token": r"[Bb]earer [A-Za-z0-9._~+/=-]{16,}+",
    "Hugging Face": r"(?:hf_|api_org_)[A-Za-z0-9]{16,}+",
    "GitHub": r"gh[pousr]_[A-Za-z0-9_.-]{20,}+|github_pat_[A-Za-z0-9_]{20,}+",
    "GitLab": r"gl(?:pat|dt|rt|oas|ptt|agent|soat|ft|imt|cbt)-[A-Za-z0-9_.-]{20,}+",
    "Slack": r"xox[a-z][.-][A-Za-z0-9.-]{10,}+|x(?:app|wfp)-[A-Za-z0-9-]{10,}+",
    "Slack webhook": rf"hooks\.slack(?:-gov)?\.com{_SLASH}(?:services|triggers|workflows)"
    rf"{_SLASH}[A-Za-z0-9/\\%_-]++",
    "Discord webhook": rf"discord(?:app)?\.com{_SLASH}api{_SLASH}(?:v[0-9]{{1,2}}{_SLASH})?webhooks{_SLASH}"
    r"[A-Za-z0-9/\\%_-]++",
    "Teams webhook": rf"\.webhook\.office\.com{_SLASH}webhookb2{_SLASH}[A-Za-z0-9/\\%@_-]++",
    "AWS": r"A(?:KIA|SIA)[A-Z0-9]{16}|(?i:aws_?secret_?access_?key)[\s\"':=]{1,5}[A-Za-z0-9/+]{40}",
    "Google": r"AIza[A-Za-z0-9_-]{30,}+|ya29\.[A-Za-z0-9_.-]{20,}+|GOCSPX-[A-Za-z0-9_-]{20,}+"
    r"|1//0[A-Za-z0-9_-]{40,}+",
    "OpenAI, Anthropic": rf"{_WORD}sk-[A-Za-z0-9_-]{{20,}}+",
    "Stripe": r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}+",
    "package registries": r"npm_[A-Za-z0-9]{36}|pypi-AgE[A-Za-z0-9_-]{20,}+|dckr_pat_[A-Za-z0-9_-]{20,}+",
    "NVIDIA, Weights & Biases": r"nvapi-[A-Za-z0-9_-]{20,}+|wandb_v1_[A-Za-z0-9_]{20,}+",
}
TOKEN = re.compile("|".join(FORMATS.values()))
# Each credential of a format has one of these texts in it, or just behind it, if upper and lower case are the same.
# Nearly every text has none of them. To see that takes a tenth of the time of a search for TOKEN.
MARKS = {
    "private key": ("-----begin",),
    "JSON web token": ("eyj",),
    "password of a URL": ("@",),
    "signature of a URL": ("signature=", "security-token=", "sig=", "access_token="),
    "bearer token": ("bearer ",),
    "Hugging Face": ("hf_", "api_org_"),
    "GitHub": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    "GitLab": ("glpat-", "gldt-", "glrt-", "glsoat-", "glptt-", "glagent-", "gloas-", "glft-", "glimt-", "glcbt-"),
    "Slack": ("xox", "xapp-", "xwfp-"),
    "Slack webhook": ("hooks.slack",),
    "Discord webhook": ("discord",),
    "Teams webhook": (".webhook.office.com",),
    "AWS": ("akia", "asia", "aws"),
    "Google": ("aiza", "ya29.", "gocspx-", "1//0"),
    "OpenAI, Anthropic": ("sk-",),
    "Stripe": ("sk_live_", "sk_test_", "rk_live_", "rk_test_"),
    "package registries": ("npm_", "pypi-age", "dckr_pat_"),
    "NVIDIA, Weights & Biases": ("nvapi-", "wandb_v1_"),
}
_MARKS = tuple(mark for marks in MARKS.values() for mark in marks)
_REPLACED = "[redacted]"


def redact(text: str) -> str:
    """`text` with each credential-like part replaced by `[redacted]`."""
    folded = text.casefold()  # and not lower(): re.IGNORECASE takes a long s for an s, too
    for mark in _MARKS:  # a loop takes half of the time of any()
        if mark in folded:
            return TOKEN.sub(_REPLACED, text)
    return text


def cut(text: str, limit: int) -> str:
    """`text` without credentials, in at most `limit` characters; an ellipsis shows that it was longer."""
    text = redact(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
