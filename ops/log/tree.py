"""Builds trees of sessions: which session was forked from which. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct

from .sessions import SessionRow  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Branch(Struct, frozen=True, kw_only=True):
    """A session and its forks. `row` is None if the session is no longer in the log."""

    tenant: str
    session: str
    row: SessionRow | None
    forks: tuple[Branch, ...] = ()

    def __iter__(self) -> Iterator[Branch]:
        """Iterate over this branch and all branches below it."""
        yield self
        for fork in self.forks:
            yield from fork


def trees(rows: Iterable[SessionRow]) -> list[Branch]:
    """Return the trees of forked sessions. `rows` must have their parents (see `sessions.begun`).

    Parents are found by name: forks of a removed session belong to a new session of the same name.
    """
    known = {(row.tenant, row.session): row for row in rows}
    forks: defaultdict[tuple[str, str], list[SessionRow]] = defaultdict(list)
    for row in known.values():
        if row.parent is not None:
            forks[row.tenant, row.parent.session].append(row)
    seen = set[tuple[str, str]]()

    def grow(key: tuple[str, str]) -> Branch:
        seen.add(key)
        below = sorted(forks[key], key=lambda row: (row.parent.position if row.parent else 0, row.session))
        grown = tuple(
            grow((one.tenant, one.session)) for one in below if (one.tenant, one.session) not in seen
        )
        return Branch(tenant=key[0], session=key[1], row=known.get(key), forks=grown)

    roots = sorted(key for key in forks if key not in known or known[key].parent is None)
    grown = [grow(key) for key in roots]
    # The rest are cycles of names: a session ended, and one of the same name was forked from its fork.
    return grown + [grow(key) for key in sorted(forks) if key not in seen]
