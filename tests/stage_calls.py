"""Call the stages in this process as the functions do: with the context of the environment, and answers as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.run.events import Request
from dropforge.stages.answers import Answer
from dropforge.stages.await_ import inspect as _inspect
from dropforge.stages.await_ import job_events as _job_events
from dropforge.stages.cancel import cancel as _cancel
from dropforge.stages.cancel import cancel_deleted as _cancel_deleted
from dropforge.stages.deploy import deploy as _deploy
from dropforge.stages.provision import provision as _provision
from dropforge.stages.submit import resume as _resume
from dropforge.stages.submit import submit_message as _submit_message
from dropforge.stages.submit import submit_object as _submit_object
from dropforge.stages.submit import submit_uri as _submit_uri
from dropforge.stages.sweep.sweep import sweep as _sweep
from dropforge.stages.teardown import teardown as _teardown

from .deployments import here

PLATFORMS: Platforms | None = None  # a test may set other platforms


def context() -> Context:
    """Return the context of the environment, with PLATFORMS if a test has set them."""
    return replace(here(), platforms=PLATFORMS) if PLATFORMS else here()


def request(context: Context, key: str) -> Request:
    """Return the request of a message on the deployment's requests topic."""
    return Request(context.settings.requests_topic, key, f"message of {key}")


def with_context(stage: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stage)
    def call(*arguments: Any, **named: Any) -> Any:
        answer = stage(context(), *arguments, **named)
        return answer.to_json() if isinstance(answer, Answer) else answer

    return call


provision = with_context(_provision)
inspect = with_context(_inspect.inspect)
deploy = with_context(_deploy)
teardown = with_context(_teardown)
sweep = with_context(_sweep)
cancel = with_context(_cancel)
cancel_deleted = with_context(_cancel_deleted)
resume = with_context(_resume)
submit_object = with_context(_submit_object)
submit_message = with_context(lambda context, data, key: _submit_message(context, data, request(context, key)))
submit_uri = with_context(lambda context, uri, key: _submit_uri(context, uri, request(context, key)))
receive_job_event = with_context(_job_events.receive_job_event)
