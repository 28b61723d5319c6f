"""Tokens with images: what is compared and named is the picture, not its placeholder ids."""

from __future__ import annotations

import random
from array import array
from typing import TypeAlias

from cache.names import blocks
from cache.names.images import ImageSpan
from cache.names.tokens import Chain, Tokens, as_tokens, from_compact, to_compact

BLOCK = 8
ONE, TWO = b"1" * 32, b"2" * 32
ROOT = blocks.root(b"an identity", "tenant")

#: A token as it is compared: an id, or an image and an offset in it.
Content: TypeAlias = "int | tuple[bytes, int]"


def made(*parts: list[int] | tuple[bytes, int]) -> tuple[Tokens, list[Content]]:
    """Return tokens of texts and images (fingerprint, length), and their contents one by one."""
    tokens, contents = as_tokens(), list[Content]()
    for part in parts:
        if isinstance(part, list):
            tokens, contents = tokens + part, contents + part
        else:
            name, num = part
            tokens += as_tokens([7] * num, [ImageSpan(0, num, name)])
            contents += [(name, i) for i in range(num)]
    return tokens, contents


def names(tokens: Tokens) -> list[bytes]:
    return [*Chain(ROOT, BLOCK).names(tokens)]


def test_blocks_of_text_keep_their_names_and_those_with_another_picture_get_others() -> None:
    text = [*range(20, 40)]
    plain, one, two = (made(text, part, text)[0] for part in ([7] * 20, (ONE, 20), (TWO, 20)))
    assert plain.ids() == one.ids() == two.ids()
    found = [names(tokens) for tokens in (plain, one, two)]
    assert found[0][:3] == found[1][:3] == found[2][:3]
    assert all(len({each[i] for each in found}) == 3 for i in range(3, 8))
    assert names(made(text, (ONE, 20), text)[0]) == found[1]


def test_a_block_of_one_token_of_an_image_tells_its_offset() -> None:
    """The same picture one token earlier or later is another block, even where the ids are equal."""
    early, late = made([7] * 14, (ONE, 9), [7] * 9)[0], made([7] * 15, (ONE, 9), [7] * 8)[0]
    assert early.ids() == late.ids()
    assert names(early)[:2] == names(late)[:2]
    assert names(early)[2] != names(late)[2]


def test_two_histories_share_what_has_the_same_content() -> None:
    rng = random.Random(3)

    def some() -> list[list[int] | tuple[bytes, int]]:
        sizes = (1, 3, BLOCK, 40, 5000)
        return [
            (rng.choice((ONE, TWO)), rng.choice(sizes)) if rng.random() < 0.5 else [7] * rng.choice(sizes)
            for _ in range(rng.randrange(6))
        ]

    for _ in range(200):
        common = some()
        (one, first), (two, second) = made(*common, *some()), made(*common, *some())
        shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        shared = min(len(first), len(second)) if shared is None else shared
        assert one.num_common(two) == shared
        assert (one == two) is (first == second)
        assert (one.digest() == two.digest()) is (first == second)


def test_a_history_may_be_cut_and_continued_anywhere() -> None:
    tokens, contents = made([1, 2, 3], (ONE, 6000), [4] * 10, (TWO, 30), [5])
    for at in (0, 2, 3, 4, 4096, 6002, 6003, 6020, len(tokens)):
        head = tokens[:at]
        assert head == made(*_parts(contents[:at]))[0]
        assert head.packed() == tokens.packed(0, at)
        assert tokens.packed(at, at + 9) == tokens.packed()[4 * at : 4 * at + 36]
        assert head.extended(array("I", [9])).num_common(tokens) == at
        if at not in (4, 4096, 6002, 6020):  # a tail does not know the image that begins before it
            assert head + tokens[at:] == tokens


def test_the_log_gets_the_ids_that_the_model_runs() -> None:
    tokens, _ = made([1], (ONE, 5), [2])
    assert from_compact(to_compact(tokens)).ids() == tokens.ids()
    assert tokens.ids().tolist() == [1, 7, 7, 7, 7, 7, 2]
    assert tokens.packed() != as_tokens(tokens.ids()).packed()


def _parts(contents: list[Content]) -> list[list[int] | tuple[bytes, int]]:
    """Return the texts and images that have these contents."""
    found = list[list[int] | tuple[bytes, int]]()
    for one in contents:
        if isinstance(one, int):
            found.append([one])
        elif one[1] == 0:
            found.append((one[0], 1))
        else:
            found[-1] = one[0], one[1] + 1
    return found
