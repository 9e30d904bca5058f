"""Fixtures that the whole suite shares."""

from __future__ import annotations
