"""Identity and Access Management of the local stack: the bindings of terraform/, evaluated for each call."""

from .callers import Callers
from .policy import Policy, require

__all__ = ["Callers", "Policy", "require"]
