"""Expected failures: one line and a hint, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from dropforge.base.errors import CloudError, DropforgeError, InvalidSpec
from dropforge.base.redact import cut
from dropforge.cloud.classify import classify, client_errors

from .plain import echo

FAILED = 1
LONGEST_MESSAGE = 2000


class CliError(click.ClickException):
    """A failure that the user can fix; `hint` says how."""

    exit_code = FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(cut(message, LONGEST_MESSAGE))
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        echo(f"error: {self.message}", err=True)
        if self.hint:
            echo(f"hint: {self.hint}", err=True)


@contextmanager
def explained() -> Iterator[None]:
    """Turn the expected errors of dropforge, the local stack and Google's clients into a CliError."""
    try:
        yield
    except InvalidSpec as error:
        raise CliError("the job spec is refused\n" + str(error)) from error
    except CloudError as error:
        raise CliError(f"{error.error_class}: {error.message}", error.hint) from error
    except DropforgeError as error:
        raise CliError(str(error)) from error
    except BrokenPipeError:
        raise  # `dropforge runs | head -1`: click exits silently
    except OSError as error:
        # ConnectionError and the errors of requests are OSErrors too.
        raise _of_client(error) if isinstance(error, _client_errors()) else CliError(str(error)) from error
    except Exception as error:
        if isinstance(error, _client_errors()):
            raise _of_client(error) from error
        if (stack_error := _of_stack(error)) is not None:
            raise stack_error from error
        raise


def _client_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the imported client libraries. Importing the others would cost a second."""
    return client_errors() if "google.api_core" in sys.modules or "requests" in sys.modules else ()


def _of_client(error: Exception) -> CliError:
    classified = classify(error)
    return CliError(f"{classified.error_class}: {classified.message}", classified.hint)


def _of_stack(error: Exception) -> CliError | None:
    stack = sys.modules.get("dropforge_local.stack.config")
    return CliError(str(error)) if stack is not None and isinstance(error, stack.StackError) else None
