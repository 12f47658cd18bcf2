"""What cannot be used of what came over the wire."""

from __future__ import annotations


class WireError(ValueError):
    """Something that came over the wire cannot be used; the text says what and why."""
