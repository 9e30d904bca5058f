"""Cloud TPU: nodes and queued resources. Their machines run startup scripts as local processes."""

from .config import TpuConfig
from .emulator import TpuEmulator

__all__ = ["TpuConfig", "TpuEmulator"]
