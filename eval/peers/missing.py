"""Which peer could not take part, and why?"""

from __future__ import annotations


class MissingPeer(Exception):
    """A peer that is not installed, not built, or cannot run this shape; its text is told in the table."""
