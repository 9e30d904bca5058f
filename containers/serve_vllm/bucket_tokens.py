"""A process of its own, which gives vLLM's streamer of weights the token of the run.

runai-model-streamer lists and downloads the small files with google-cloud-storage, and streams the weights with
google-cloud-cpp. Both take the token from a metadata server, and each has a variable for its address (measured on
2026-11-24 with 0.15.9: both asked a server on loopback).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from dropforge.cloud.clients import Clients
from dropforge.cloud.run_metadata import HOST, metadata_server

from .children import die_with_parent

# google-cloud-cpp reads the first one, google-auth the others.
ADDRESS_VARIABLES = ("GCE_METADATA_ROOT", "GCE_METADATA_HOST", "GCE_METADATA_IP")


def lend(environment: Mapping[str, str]) -> dict[str, str]:
    """Start the process with the environment of a container that has access; the variables by which it is found.

    It ends with this process, also if this process becomes vLLM.
    """
    command = [sys.executable, "-m", "containers.serve_vllm.bucket_tokens"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent()
    )
    assert process.stdout is not None, "the pipe was asked for"
    with process.stdout:
        port = process.stdout.readline().strip()
    if not port:
        raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}; expected a metadata server's port")
    return dict.fromkeys(ADDRESS_VARIABLES, f"{HOST}:{port}")


def main() -> None:
    """Serve until this process is killed, which happens with vLLM at the latest."""
    server = metadata_server(Clients(dict(os.environ)))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
