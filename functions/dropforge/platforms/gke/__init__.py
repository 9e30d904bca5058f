"""Platform `gke`."""

from __future__ import annotations

from dropforge.platforms.platform import Platform

from .spec import GkeServe, GkeTarget

PLATFORM = Platform(name="gke", target=GkeTarget, serves=(GkeServe,))
