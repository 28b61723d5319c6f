"""A corpus as token ids, by the tokenizer of the measured model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from .faults import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Texts:
    """Real texts, cut to any number of tokens."""

    def __init__(self, model: Path, texts: Iterator[str]) -> None:
        """Read the tokenizer in the model's folder. Raises `BenchError` if there is none."""
        file = model / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  # the library raises plain Exception
            raise BenchError(f"{file} cannot be read: {error}") from None
        self._texts = texts

    def next_tokens(self, number: int) -> tuple[int, ...]:
        """Return exactly `number` tokens: the next texts, the last one cut."""
        found: list[int] = []
        while len(found) < number:
            found += self._tokenizer.encode(f"{next(self._texts)}\n\n", add_special_tokens=False).ids
        return tuple(found[:number])

    def next_text(self, number: int) -> str:
        """Return the text of the next `number` tokens."""
        return str(self._tokenizer.decode(self.next_tokens(number)))
