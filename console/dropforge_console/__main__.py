"""The console as a Cloud Run service behind Identity-Aware Proxy: `python -m dropforge_console` in its container.

The environment has the settings of the deployment, and those of `iap.Behind` (terraform/console.tf).
"""

from __future__ import annotations

import os
import sys
import time

from dropforge.base.errors import DropforgeError
from dropforge.context import Context

from .iap import KEYS_URL, Behind, IapAccess, Keys
from .lending import Lender
from .preflight import by_function
from .server import listen, serve


def main() -> int:
    """Serve until SIGTERM; return 64 if the environment is wrong."""
    try:
        context, behind = Context.from_environment(), Behind.from_environment(os.environ)
        port = int(os.environ.get("PORT", "8080"))
    except (DropforgeError, ValueError) as error:
        print(f"the console cannot start: {error}", file=sys.stderr)
        return 64
    lender = Lender(behind.ask_url, context.cloud.clients) if behind.ask_url else None
    preflight = by_function(behind.preflight_url, context.cloud.clients) if behind.preflight_url else None
    keys = Keys(os.environ.get("DROPFORGE_CONSOLE_KEYS_URL", KEYS_URL), time.monotonic)
    serve(context, listen(port, "0.0.0.0"), IapAccess(behind, keys), token_of=lender, preflight=preflight)
    return 0


if __name__ == "__main__":
    sys.exit(main())
