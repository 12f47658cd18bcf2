"""The error of what cannot be used from the wire."""

from __future__ import annotations


class WireError(ValueError):
    """Something received over the wire cannot be used; the text says what and why."""
