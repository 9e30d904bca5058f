"""The serving container on a machine with chips, which a machine of tests lacks: it has no /dev/vfio/0."""

import sys
from unittest.mock import patch

from containers.serve_vllm import serve

with patch.object(serve, "has_tpu", return_value=True):
    sys.exit(serve.main())
