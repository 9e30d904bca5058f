"""Errors in OpenAI's format, under the names that vLLM gives them."""

from __future__ import annotations

import json
from http import HTTPStatus

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from dropforge.base.log import log

# vllm/entrypoints/serve/exception_handling/error_response.py
_NAMES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    500: "InternalServerError",
    502: "InternalServerError",
    503: "ServiceUnavailableError",
}
_MOST_CHARACTERS = 2000


class Refused(Exception):
    """A request that gets an error for an answer. `field` names the wrong part of its body."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


@web.middleware
async def errors_as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer each error with OpenAI's JSON: refusals, aiohttp's own errors, faults of the engine or of this code."""
    try:
        return await handler(request)
    except Refused as error:
        return _answer(error.status, str(error), error.field)
    except web.HTTPException as error:  # 404, 405, 413
        detail = error.text if error.status == 413 else f"{error.reason}: {request.method} {request.path}"
        return _answer(error.status, str(detail), allow=error.headers.get("Allow"))
    except aiohttp.ClientError as error:
        return _answer(502, f"the engine did not answer: {error!r}")
    except Exception as error:  # noqa: BLE001  (the text of an unknown fault may show other requests)
        log(f"a request failed: {type(error).__name__}: {error}", stage="serve", severity="ERROR")
        return _answer(500, "the server failed at this request; its log has the reason")


def translated(status: int, text: str) -> web.Response:
    """An engine's error, in OpenAI's format. FastAPI's own errors have `detail`, and 422 for a wrong value."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        return web.json_response(answer, status=status)
    detail = answer.get("detail", text) if isinstance(answer, dict) else text
    return _answer(400 if status == 422 else status, str(detail))


def _answer(status: int, message: str, field: str | None = None, allow: str | None = None) -> web.Response:
    """https://platform.openai.com/docs/guides/error-codes"""
    name = _NAMES.get(status) or HTTPStatus(status).phrase
    error = {"message": message[:_MOST_CHARACTERS], "type": name, "param": field, "code": status}
    return web.json_response({"error": error}, status=status, headers={"Allow": allow} if allow else None)
