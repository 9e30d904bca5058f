"""Characters that no author wrote: what is left of a text that was read in the wrong encoding, or cut."""

from __future__ import annotations

import re

# Neither tabs, line breaks nor carriage returns. C1 controls come from Windows-1252 that was read as Latin-1.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_NO_CHARACTER = re.compile("[\ufffd\ufeff\ufffe\uffff]")
# A byte 0x80 to 0xbf of UTF-8, read as Latin-1 or as Windows-1252 (https://encoding.spec.whatwg.org/#windows-1252).
_REST = (
    "[\x80-\xbf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018\u2019\u201c\u201d"
)
_REST += "\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]"
# UTF-8 that was read as one of these. No language puts these after each other, but capital letters come
# before closing quotation marks and dashes: one pair counts only after letters that no word ends in.
_MOJIBAKE = re.compile(
    f"[\xc2\xc3]{_REST}"  # é, ü, «
    f"|\xe2[\x80\x82\x84\u20ac\u201a\u201e]{_REST}"  # quotation marks, dashes, €, ™
    f"|\xf0[\x9f\u0178]{_REST}{_REST}"  # emoji
    "|\xef\xbb\xbf|\xef\xbf\xbd"  # a byte order mark, a replacement character
    f"|\xe1\xba{_REST}"  # Vietnamese
    f"|(?:[\xc4-\xdf]{_REST}|[\xe0-\xef]{_REST}{_REST}){{2}}"  # two letters of any other script
)


def damage_of(text: str) -> str:
    """What is odd about the characters of a text; "" if nothing is. It never quotes the text."""
    if (found := _CONTROL.search(text)) and not _is_mojibake(text):
        return f"the control character U+{ord(found[0]):04X}"
    if text.isascii():
        return ""
    if _is_mojibake(text):
        return "UTF-8 that was read as Latin-1 or Windows-1252 (such as \xc3\xa9 for \xe9)"
    if found := _NO_CHARACTER.search(text):
        names = {"\ufffd": "the replacement character U+FFFD", "\ufeff": "a byte order mark (U+FEFF) inside a text"}
        return names.get(found[0], f"U+{ord(found[0]):04X}, which is no character")
    return ""


def _is_mojibake(text: str) -> bool:
    return not text.isascii() and _MOJIBAKE.search(text) is not None
