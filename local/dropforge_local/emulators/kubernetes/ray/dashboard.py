"""Ray's Jobs API, as the operator uses it (https://docs.ray.io/en/latest/cluster/running-applications/job-submission)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from dropforge_local.base.ports import HOST

TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class DashboardError(Exception):
    """Ray does not answer, or answers with an error."""


@dataclass(frozen=True)
class Dashboard:
    """The API of a head at a port of this machine; `token` is empty for a head without authentication."""

    session: aiohttp.ClientSession
    port: int
    token: str

    async def job(self, submission_id: str) -> dict[str, Any] | None:
        """Ray's record of a job; None if Ray does not know the job. Raises DashboardError."""
        return await self._call("GET", submission_id)

    async def submit(self, request: dict[str, Any]) -> None:
        """Submit a job. Raises DashboardError, also if the submission id is taken."""
        await self._call("POST", "", request)

    async def stop(self, submission_id: str) -> None:
        """Stop a job. Raises DashboardError."""
        await self._call("POST", f"{submission_id}/stop")

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        url = f"http://{HOST}:{self.port}/api/jobs/{path}"
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            async with self.session.request(method, url, json=body, headers=headers, timeout=TIMEOUT) as response:
                if response.status == 404:
                    return None
                if response.status >= 400:
                    raise DashboardError(f"{method} {url}: {response.status} {(await response.text())[-500:]}")
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DashboardError(f"{method} {url}: {error!r}") from error
