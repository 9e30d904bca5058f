"""Rows of training data: one reader for the trainers, the command line and the control plane. It imports no library."""

from .conversation import LeftOut, Message, Row
from .forms import FORMS, Reader, columns_of, form_of
from .values import UnsupportedRow, UnusableRow, kind_of

__all__ = [
    "FORMS",
    "LeftOut",
    "Message",
    "Reader",
    "Row",
    "UnsupportedRow",
    "UnusableRow",
    "columns_of",
    "form_of",
    "kind_of",
]
