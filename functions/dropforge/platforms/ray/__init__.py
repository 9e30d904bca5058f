"""Platform `ray`."""

from __future__ import annotations

from dropforge.platforms.platform import Platform

from .spec import RayTarget

PLATFORM = Platform(name="ray", target=RayTarget, serves=())
