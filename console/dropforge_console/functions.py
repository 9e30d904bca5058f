"""The functions of the deployment that the console's account may call. It may call no other service."""

from __future__ import annotations

from typing import Any

import requests

from dropforge.base.redact import cut, redact
from dropforge.cloud.clients import TIMEOUT_SECONDS, Clients

from .asking import Unanswered


class Function:
    """A function by its name and its URL. `clients` give the identity of the console's account."""

    def __init__(self, name: str, url: str, clients: Clients, timeout: float = TIMEOUT_SECONDS) -> None:
        self._name = name
        self._url = url
        self._clients = clients
        self._timeout = timeout  # in seconds

    def __call__(self, body: dict[str, str], of: str) -> Any:
        """The JSON that the function answers to `body`; `of` says in an error what it was about. Raises Unanswered."""
        from google.auth.exceptions import GoogleAuthError

        try:
            headers = {"Authorization": f"Bearer {self._clients.identity_token(self._url)}"}
            answer = requests.post(self._url, json=body, headers=headers, timeout=self._timeout)
            if answer.status_code != 200:
                said = cut(redact(answer.text), 300)
                raise Unanswered(f"the function {self._name} answered {answer.status_code} for {of}: {said}")
            return answer.json()
        except (requests.RequestException, GoogleAuthError, ValueError) as error:
            message = f"the function {self._name} gave no answer for {of}: {type(error).__name__}"
            raise Unanswered(message) from error
