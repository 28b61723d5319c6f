"""Which sessions the console shows as variants of one conversation, and where they part."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ops.console.variants import VARIANT, joined, variants
from ops.log.sessions import SessionRow
from turnkeep_client.messages import Parent

#: Sessions, the last used one last: parent, position, and whether it is a variant.
Forks = dict[str, tuple[str, int, bool] | None]


def rows(forks: Forks) -> list[SessionRow]:
    """Return the rows of sessions, the last used one first."""
    found = [
        SessionRow(
            tenant="default",
            session=name,
            state="idle",
            waiting=0,
            position=9,
            last=datetime.fromtimestamp(number, UTC),
            entries=1,
            dead=0,
            model=None,
            worker=None,
            begins=f"words of {name}",
            parent=Parent(session=fork[0], position=fork[1]) if fork else None,
            tags=(VARIANT,) if fork and fork[2] else (),
        )
        for number, (name, fork) in enumerate(forks.items())
    ]
    return found[::-1]


@pytest.mark.parametrize(
    ("forks", "name", "at"),
    [
        ({"a": None}, "a", {}),
        ({"a": None, "a-v2": ("a", 0, True)}, "a", {0: ("a", "a-v2")}),
        ({"a": None, "a-v2": ("a", 0, True)}, "a-v2", {0: ("a", "a-v2")}),
        # a fork of a fork at the place where that one begins is a third variant
        ({"a": None, "a-v2": ("a", 7, True), "a-v3": ("a-v2", 7, True)}, "a", {7: ("a", "a-v2", "a-v3")}),
        ({"a": None, "a-v2": ("a", 7, True), "a-v10": ("a", 7, True)}, "a-v2", {7: ("a", "a-v2", "a-v10")}),
        # later in a variant: the switch at 7 leads to where it was last
        ({"a": None, "a-v2": ("a", 7, True), "a-v3": ("a-v2", 9, True)}, "a", {7: ("a", "a-v3")}),
        (
            {"a": None, "a-v2": ("a", 7, True), "a-v3": ("a-v2", 9, True)},
            "a-v3",
            {7: ("a", "a-v3"), 9: ("a-v2", "a-v3")},
        ),
        # before the place where a variant begins
        (
            {"a": None, "a-v2": ("a", 7, True), "a-v3": ("a-v2", 3, True)},
            "a-v2",
            {3: ("a-v2", "a-v3"), 7: ("a", "a-v2")},
        ),
        # a fork that somebody has named is a conversation of its own, and so are its variants
        ({"a": None, "b": ("a", 7, False), "b-v2": ("b", 8, True)}, "a", {}),
        ({"a": None, "b": ("a", 7, False), "b-v2": ("b", 8, True)}, "b", {8: ("b", "b-v2")}),
        # the first one is gone
        ({"a-v2": ("a", 7, True), "a-v3": ("a", 7, True)}, "a-v2", {7: ("a-v2", "a-v3")}),
        # names that lead in a circle
        ({"a": ("b", 7, True), "b": ("a", 7, True)}, "a", {}),
    ],
)
def test_a_message_has_a_switch_where_variants_part(
    forks: Forks, name: str, at: dict[int, tuple[str, ...]]
) -> None:
    assert variants(name, rows(forks)).at == at


def test_variants_are_one_row_with_the_first_words_of_the_conversation() -> None:
    there = rows({"a": None, "b": None, "a-v2": ("a", 7, True), "c": ("a", 7, False), "b-v2": None})
    shown = [(row.session, row.begins) for row in joined(there, there)]
    assert shown == [
        ("b-v2", "words of b-v2"),
        ("c", "words of c"),
        ("a-v2", "words of a"),
        ("b", "words of b"),
    ]
    found = variants("a-v2", there)
    assert (found.root, found.begins, found.members) == ("a", "words of a", ("a", "a-v2"))
