"""Which sessions are variants of one conversation, from the forks in the log. Pure.

Another answer, and another question in the place of one, are asked in a fork with the tag `VARIANT`. The page
shows all variants as one conversation, with a switch at each message that has several.
"""

from __future__ import annotations

import re
from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ops.log.sessions import SessionRow

VARIANT: Final = "variant"
#: How the page names variants, and hardly anybody a session. Sessions with other names are none, so their
#: first entries need not be read.
_NAME: Final = re.compile(r"--v(\d+)$")


class Variants(Struct, frozen=True, kw_only=True):
    """The variants of a conversation, as seen from one of them.

    `root` is the session that was not forked as a variant; `begins` has its first words. `members` are all
    sessions of the conversation, `open` those that are not closed, and `next` is a free name for another one.
    `at` has, by the position at which a message begins, the sessions to switch
    between: one for each variant of the message, the oldest variant first.
    """

    root: str
    begins: str | None
    members: tuple[str, ...]
    open: tuple[str, ...]
    next: str
    at: dict[int, tuple[str, ...]]


class _Part(NamedTuple):
    """A session's own tokens in a conversation; they end where the next session was forked."""

    session: str
    end: float


def stem(name: str) -> str:
    """Return the beginning of a session's name that all variants of its conversation share."""
    return _NAME.sub("", name)[:56]


def may_vary(name: str) -> bool:
    """Whether a session of this name can be a variant."""
    return bool(_NAME.search(name))


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return a name for another variant of session `name`, which is none of those that are `taken`."""
    found = [_NAME.search(one) for one in taken if stem(one) == stem(name)]
    return f"{stem(name)}--v{1 + max((int(one[1]) for one in found if one), default=1)}"


def variants(name: str, rows: Iterable[SessionRow], taken: Iterable[str]) -> Variants:
    """Return the variants of session `name` among `rows`, which have their first words, parents and tags.

    `taken` are the names of all sessions that may not be those of another variant.
    """
    known = {row.session: row for row in rows}
    paths = {one: _path(one, known) for one in known}
    own = paths.get(name, [_Part(name, inf)])
    root = own[0].session
    at: defaultdict[int, dict[str, str]] = defaultdict(dict)
    members = sorted((one for one in known if paths[one][0].session == root), key=_age)
    for other in sorted(members, key=lambda one: known[one].last, reverse=True):
        if other != name:
            position, here, there = _parted(own, paths[other])
            at[position] |= {here: name}
            at[position].setdefault(there, other)
    return Variants(
        root=root,
        begins=known[root].begins if root in known else None,
        members=tuple(members),
        open=tuple(one for one in members if known[one].state != "closed"),
        next=free_name(name, taken),
        at={position: tuple(found[one] for one in sorted(found, key=_age)) for position, found in at.items()},
    )


def joined(rows: Sequence[SessionRow], roots: Sequence[SessionRow]) -> list[SessionRow]:
    """Return one row for each conversation: its first one in `rows`, but with the first words of its root.

    `roots` are rows with first words, parents and tags of all sessions that are or have variants.
    """
    known = {row.session: row for row in roots}
    found: dict[str, SessionRow] = {}
    for row in rows:
        root = _path(row.session, known)[0].session
        begins = known[root].begins if root in known else row.begins
        found.setdefault(root, replace(row, begins=begins))
    return [*found.values()]


def _age(name: str) -> tuple[int, str]:
    """Return a key that sorts names of variants by their numbers."""
    return len(name), name


def _path(name: str, known: Mapping[str, SessionRow]) -> list[_Part]:
    """Return the sessions whose own tokens a session has, the root first.

    A session that was forked where its parent begins has none of its parent's own.
    """
    path, end, seen = list[_Part](), inf, set[str]()
    while name not in seen:
        seen.add(name)
        row = known.get(name)
        parent = row.parent if row is not None and VARIANT in row.tags else None
        if parent is None or parent.position < end:
            path.insert(0, _Part(name, end))
        if parent is None:
            break
        name, end = parent.session, min(end, parent.position)
    return path


def _parted(own: Sequence[_Part], other: Sequence[_Part]) -> tuple[int, str, str]:
    """Return where two conversations part, and the sessions that own the message there."""
    number, before = 0, 0.0
    while own[number] == other[number]:
        before, number = own[number].end, number + 1
    here, there = own[number], other[number]
    if here.session != there.session:  # both were forked from the same session, at the same place
        return int(before), here.session, there.session
    if here.end < there.end:
        return int(here.end), own[number + 1].session, there.session
    return int(there.end), here.session, other[number + 1].session
