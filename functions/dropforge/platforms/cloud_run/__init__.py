"""Platform `cloud_run`."""

from __future__ import annotations

from dropforge.platforms.platform import Platform

from .spec import CloudRunServe, CloudRunTarget

PLATFORM = Platform(name="cloud_run", target=CloudRunTarget, serves=(CloudRunServe,))
