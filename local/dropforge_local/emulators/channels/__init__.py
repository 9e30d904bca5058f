"""A sink for webhooks, Microsoft Teams and GitHub's commit statuses."""

from .emulator import ChannelSink

__all__ = ["ChannelSink"]
