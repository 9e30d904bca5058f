"""A sink for Slack's incoming webhooks."""

from .emulator import SlackSink

__all__ = ["SlackSink"]
