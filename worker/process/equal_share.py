"""Divides what all tenants share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter


def most_of_each(num_held: Counter[str], most: int) -> int:
    """Return the most that one tenant may have of something of which all together may have `most`.

    Until the tenants have as many (`num_held`, by tenant) that is all of it, then an equal share: so at the
    limit a tenant with less may still get more, and one that has taken it all cannot lock out the others.
    """
    return most if num_held.total() < most else most // max(len(num_held), 1)
