"""Pages of lists, and tokens from a caller."""

from __future__ import annotations

import base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge_local.base.errors import ApiError
from dropforge_local.emulators.kit.paging import Paging, cut, read_token, write_token

PAGING = Paging(default=3, largest=5)


@given(st.lists(st.integers()), st.integers(min_value=0, max_value=9))
def test_pages_together_are_the_list(items: list[int], size: int) -> None:
    listed: list[int] = []
    token, is_last = "", False
    while not is_last:
        page, token = PAGING.page(items, size, token)
        assert len(page) <= min(size or 3, 5)
        listed += page
        is_last = not token
    assert listed == items


@given(st.text() | st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_any_token_is_read_or_refused(token: str) -> None:
    with suppress(ApiError):
        assert [type(part) for part in read_token(token, ["", 0])] == [str, int]


@pytest.mark.parametrize("key", [("a",), (1, "a"), ("a", True), ("a", 2**63), ("\ud800", 1), ()])
def test_key_of_other_types_is_refused(key: tuple[object, ...]) -> None:
    with pytest.raises(ApiError, match="was not written by this list"):
        read_token(write_token(*key), ["", 0])


def test_rows_beyond_the_page_give_a_token() -> None:
    page, token = cut([5, 6, 7], 2, lambda row: [row])
    assert (page, read_token(token, [0])) == ([5, 6], [6])
    assert cut([5, 6], 2, lambda row: [row]) == ([5, 6], "")


def test_negative_size_is_refused() -> None:
    with pytest.raises(ApiError, match="expected 0 or more"):
        PAGING.size(-1)
