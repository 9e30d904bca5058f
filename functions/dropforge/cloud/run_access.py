"""A container's access to the objects of its run: a token that the function `access` gives for at most an hour.

The control plane sets the variables. Without these variables, as with a user's own bucket, a container uses its
account.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Any
from urllib.parse import urlencode

from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError

BUCKET_VARIABLE = "DROPFORGE_RUNS_BUCKET"
URL_VARIABLE = "DROPFORGE_ACCESS_URL"  # of the function
REQUEST_VARIABLE = "DROPFORGE_ACCESS_REQUEST"  # JSON: the run, and the proof that the container is the run's
HOST_VARIABLE = "GCE_METADATA_HOST"  # of google-auth, too
IDENTITY = "/computeMetadata/v1/instance/service-accounts/default/identity"
TIMEOUT_SECONDS = 60.0  # the function may have to start
# https://cloud.google.com/storage/docs/json_api: requests and uploads name the bucket in the same place
_BUCKET = re.compile(r"/storage/v1/b/([^/?]+)")


class RunCredentials(Credentials):  # type: ignore[misc]
    """The token of the run for its bucket, and the account's own credentials for all other buckets."""

    def __init__(self, environment: Mapping[str, str], own: Credentials) -> None:
        super().__init__()
        self._bucket = environment[BUCKET_VARIABLE]
        self._url = environment[URL_VARIABLE]
        self._body = environment[REQUEST_VARIABLE].encode()
        self._own = own
        self._spec: Any = None
        self._lock = Lock()  # the threads of a transfer ask once

    def before_request(self, request: Any, method: str, url: str, headers: MutableMapping[str, str]) -> None:
        """Add the token to the headers of a request to Cloud Storage."""
        match = _BUCKET.search(url)
        if match and match[1] != self._bucket:
            self._own.before_request(request, method, url, headers)
        else:
            self.present(request)
            super().before_request(request, method, url, headers)

    def present(self, request: Callable[..., Any]) -> tuple[str, int]:
        """The token, renewed if it must be, and its seconds to live. Raises GoogleAuthError."""
        with self._lock:
            if not self.valid:
                self.refresh(request)
            return str(self.token), int((self.expiry - _now()).total_seconds())

    def spec(self, request: Callable[..., Any]) -> Any:
        """The run's spec, which came with the token: a JSON object; None in a server. Raises GoogleAuthError."""
        self.present(request)
        return self._spec

    def refresh(self, request: Callable[..., Any]) -> None:
        """Ask for a new token. Raises RefreshError, which is retryable unless the function refuses."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._identity(request)}"}
        answer = request(self._url, method="POST", body=self._body, headers=headers, timeout=TIMEOUT_SECONDS)
        text = _text(answer.data)
        if answer.status != 200:
            message = f"the function access at {self._url} answered {answer.status}: {text[:300]}"
            raise RefreshError(message, retryable=answer.status in (408, 429) or answer.status >= 500)
        granted = json.loads(text)
        self.token, self._spec = granted["access_token"], granted.get("spec")
        self.expiry = _now() + timedelta(seconds=int(granted["expires_in"]))

    def _identity(self, request: Callable[..., Any]) -> str:
        """An identity token of the container's account for the function, from the metadata server.

        https://cloud.google.com/run/docs/securing/service-identity#identity_tokens. The class of google-auth for this
        differs between the versions in the images. Raises RefreshError.
        """
        query = urlencode({"audience": self._url, "format": "full"})
        url = f"http://{os.environ.get(HOST_VARIABLE, 'metadata.google.internal')}{IDENTITY}?{query}"
        answer = request(url, method="GET", headers={"Metadata-Flavor": "Google"}, timeout=TIMEOUT_SECONDS)
        if answer.status != 200:
            message = f"the metadata server answered {answer.status} to {IDENTITY}; expected an identity token"
            raise RefreshError(message, retryable=answer.status in (404, 429) or answer.status >= 500)
        return _text(answer.data)


def _text(data: bytes | str) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data


def _now() -> datetime:
    """The time as google-auth compares it: in UTC, without a zone."""
    return datetime.now(UTC).replace(tzinfo=None)


def has_access(environment: Mapping[str, str]) -> bool:
    """Whether the control plane gave this container access to the objects of a run."""
    return bool(environment.get(REQUEST_VARIABLE))
