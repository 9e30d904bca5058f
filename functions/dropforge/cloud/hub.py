"""The Hugging Face Hub, for one small file: the configuration of a public model."""

from __future__ import annotations

from collections.abc import Mapping

FETCH_SECONDS = 3.0  # a submission waits no longer
MAX_BYTES = 1 << 20
_HUB = "https://huggingface.co"


class Hub:
    """Reads without a token: the control plane does not have the users' secrets.

    The environment has huggingface_hub's variables: HF_ENDPOINT names a mirror, HF_HUB_OFFLINE forbids requests. The
    local stack makes none, unless HF_ENDPOINT names a server.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        local = "STORAGE_EMULATOR_HOST" in environment and "HF_ENDPOINT" not in environment
        offline = environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        self._endpoint = "" if local or offline else environment.get("HF_ENDPOINT", _HUB)

    def config(self, source: str, revision: str) -> bytes:
        """The bytes of a model's config.json. Raises OSError if the Hub does not give it within FETCH_SECONDS."""
        if not self._endpoint:
            raise OSError("the Hub is not asked from here")
        import urllib.request  # costs 20 ms, and few submissions need it
        from urllib.error import HTTPError
        from urllib.parse import quote

        url = f"{self._endpoint}/{source}/resolve/{quote(revision, safe='')}/config.json"
        try:
            with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as response:
                data: bytes = response.read(MAX_BYTES)
        except HTTPError as error:
            error.close()
            raise OSError(f"{url} answers {error.code} {error.reason}") from None
        return data
