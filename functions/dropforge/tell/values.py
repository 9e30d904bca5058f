"""The value of a channel's secret, and the failure if it cannot be read."""

from __future__ import annotations

from dropforge.cloud.classify import client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.secrets import read_secret

from .channel import Failure


class Unreadable(Exception):
    """A secret that could not be read. The failure never contains its value."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.problem)
        self.failure = failure


def value_of(cloud: Cloud, secret: str) -> str:
    """The value of a channel's secret. Raises Unreadable."""
    try:
        return read_secret(cloud, secret)
    except LookupError as error:
        raise Unreadable(Failure(str(error), may_pass=False)) from None
    except client_errors() as error:
        problem = f"secret {secret!r} could not be read: {type(error).__name__}"
        raise Unreadable(Failure(problem, may_pass=True)) from None
