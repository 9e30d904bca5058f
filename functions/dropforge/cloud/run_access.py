"""A container's access to the objects of its run: a token that the function `access` gives for at most an hour.

The control plane sets the variables. Without these variables, as with a user's own bucket, a container uses its
account.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import urlencode

from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError

from dropforge.base.redact import cut
from dropforge.base.threads import Threads

from .classify import is_passing
from .retrying import Retrying

BUCKET_VARIABLE = "DROPFORGE_RUNS_BUCKET"
URL_VARIABLE = "DROPFORGE_ACCESS_URL"  # of the function
REQUEST_VARIABLE = "DROPFORGE_ACCESS_REQUEST"  # JSON: the run, and the proof that the container is the run's
HOST_VARIABLE = "GCE_METADATA_HOST"  # of google-auth, too
IDENTITY = "/computeMetadata/v1/instance/service-accounts/default/identity"
TIMEOUT_SECONDS = 60.0  # the function may have to start
_THREADS = Threads()
_LONGEST_ANSWER = 300  # of what an error quotes
# https://cloud.google.com/storage/docs/json_api: requests and uploads name the bucket in the same place
_BUCKET = re.compile(r"/storage/v1/b/([^/?]+)")


class RunCredentials(Credentials):  # type: ignore[misc]
    """The token of the run for its bucket, and the account's own credentials for all other buckets.

    Whoever needs the token waits while the function or the metadata server fails for the moment: other libraries than
    ours give up soon, or at once. So every method raises GoogleAuthError for a final refusal, and RetryError when the
    time of `retrying` is over.
    """

    def __init__(
        self, environment: Mapping[str, str], own: Credentials, retrying: Retrying, threads: Threads = _THREADS
    ) -> None:
        super().__init__()
        self._bucket = environment[BUCKET_VARIABLE]
        self._url = environment[URL_VARIABLE]
        self._body = environment[REQUEST_VARIABLE].encode()
        self._host = environment.get(HOST_VARIABLE, "metadata.google.internal")
        self._own, self._retrying = own, retrying
        self._spec: Any = None
        self._lock = threads.lock()  # the threads of a transfer ask once

    def before_request(self, request: Any, method: str, url: str, headers: MutableMapping[str, str]) -> None:
        """Add the token to the headers of a request to Cloud Storage."""
        match = _BUCKET.search(url)
        if match and match[1] != self._bucket:
            self._own.before_request(request, method, url, headers)
        else:
            self.present(request)
            super().before_request(request, method, url, headers)

    def present(self, request: Callable[..., Any]) -> tuple[str, int]:
        """The token, renewed if it must be, and its seconds to live."""
        with self._lock:
            if not self.valid:
                self.refresh(request)
            return str(self.token), int((self.expiry - _now()).total_seconds())

    def spec(self, request: Callable[..., Any]) -> Any:
        """The run's spec, which came with the token: a JSON object; None in a server."""
        self.present(request)
        return self._spec

    def refresh(self, request: Callable[..., Any]) -> None:
        """Ask for a new token."""
        self._retrying(partial(self._ask, request))

    def _ask(self, request: Callable[..., Any]) -> None:
        """Ask for a new token once. Raises RefreshError, which is retryable unless the function refuses."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._identity(request)}"}
        answer = request(self._url, method="POST", body=self._body, headers=headers, timeout=TIMEOUT_SECONDS)
        text = _text(answer.data)
        if answer.status != 200:
            raise RefreshError(self._said(answer.status, text), retryable=is_passing(answer.status))
        try:
            granted = json.loads(text)
            token, seconds = str(granted["access_token"]), int(granted["expires_in"])
        except (ValueError, KeyError, TypeError):  # the page of a proxy
            raise RefreshError(f"{self._said(200, text)}; expected a token", retryable=True) from None
        self.token, self._spec = token, granted.get("spec")
        self.expiry = _now() + timedelta(seconds=seconds)

    def _said(self, status: int, text: str) -> str:
        return f"the function access at {self._url} answered {status}: {cut(text, _LONGEST_ANSWER)}"

    def _identity(self, request: Callable[..., Any]) -> str:
        """An identity token of the container's account for the function, from the metadata server.

        https://cloud.google.com/run/docs/securing/service-identity#identity_tokens. The class of google-auth for this
        differs between the versions in the images. Raises RefreshError.
        """
        query = urlencode({"audience": self._url, "format": "full"})
        url = f"http://{self._host}{IDENTITY}?{query}"
        answer = request(url, method="GET", headers={"Metadata-Flavor": "Google"}, timeout=TIMEOUT_SECONDS)
        if answer.status != 200:
            message = f"the metadata server answered {answer.status} to {IDENTITY}; expected an identity token"
            raise RefreshError(message, retryable=is_passing(answer.status) or answer.status == 404)
        return _text(answer.data)


def _text(data: bytes | str) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data


def _now() -> datetime:
    """The time as google-auth compares it: in UTC, without a zone."""
    return datetime.now(UTC).replace(tzinfo=None)


def has_access(environment: Mapping[str, str]) -> bool:
    """Whether the control plane gave this container access to the objects of a run."""
    return bool(environment.get(REQUEST_VARIABLE))
