"""Gives the libraries with which MaxText reads and writes checkpoints the token of the run.

Orbax uses TensorStore and, by etils, gcsfs. TensorStore takes its token from a metadata server, at the address in
GCE_METADATA_ROOT (measured with 0.1.84: tests/stack/test_ray.py). gcsfs takes the credentials themselves. Orbax 0.12
makes a client of google-cloud-storage, too: it asks whether a bucket with checkpoints has a hierarchical namespace.
"""

from __future__ import annotations

import os
import threading

from dropforge.cloud.clients import Clients
from dropforge.cloud.run_metadata import HOST, metadata_server

ROOT_VARIABLE = "GCE_METADATA_ROOT"
STATIC_VARIABLE = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # TensorStore prefers a fixed token, which ends after an hour


def lend(clients: Clients) -> None:
    """Let the libraries in this process use the run's token. Does nothing where the account has the access.

    Call it before any of them opens a bucket.
    """
    credentials = clients.run_credentials()
    if credentials is None:
        return
    server = metadata_server(clients)
    threading.Thread(target=server.serve_forever, name="bucket-tokens", daemon=True).start()
    os.environ.pop(STATIC_VARIABLE, None)
    os.environ[ROOT_VARIABLE] = f"{HOST}:{server.server_port}"
    import fsspec
    from orbax.checkpoint._src.path import gcs_utils

    fsspec.config.conf["gcs"] = {**fsspec.config.conf.get("gcs", {}), "token": credentials}
    # The run's token may not read a bucket's settings. Without them, a bucket is flat, as the runs bucket is.
    gcs_utils.get_bucket = clients.storage().bucket
