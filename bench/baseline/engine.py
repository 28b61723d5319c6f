"""mlx-lm used as a program would use it that has the model to itself: no network, no log, no snapshots.

Sessions keep their prompt cache from turn to turn. One thread loads and runs, since MLX's streams belong to
threads.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from .messages import (
    Batch,
    Chat,
    Done,
    Encode,
    Forget,
    Load,
    Loaded,
    Ran,
    Refused,
    Row,
    Stream,
    Tokens,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .messages import Command, Reply


class Engine:
    """The model, and the prompt caches of its sessions."""

    def __init__(self, folder: Path | None, *, prefill_step: int) -> None:
        """Load the model as a worker with its default settings does; None loads none."""
        self._prefill_step = prefill_step
        self._caches: dict[str, list[Any]] = {}
        self._batches: Any = None
        if folder is None:
            return
        self._model, self._tokenizer = mlx_lm.load(str(folder), lazy=True)[:2]
        if mx.default_device() == mx.Device(mx.cpu):
            self._model = dequantize_model(self._model)
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())
        self._ends = frozenset(self._tokenizer.eos_token_ids)
        self._batches = BatchGenerator(
            self._model,
            stop_tokens=[[token] for token in sorted(self._ends)],
            prefill_step_size=prefill_step,
        )

    def close(self) -> None:
        """Give back what the batch generator took of the machine."""
        if self._batches is not None:
            self._batches.close()

    @property
    def device(self) -> str:
        """Name the device."""
        return str(mx.default_device())

    def run(self, command: Command) -> Reply:
        """Carry out a command. Raises whatever mlx-lm raises."""
        if isinstance(command, Load):
            return load(command.paths)
        if self._batches is None:
            return Refused("there is no model: start the program with --model")
        match command:
            case Encode(text):
                return Tokens(tuple(self._tokenizer.encode(text, add_special_tokens=False)))
            case Chat(system, text, first):
                return Tokens(tuple(self._chat(system, text, first=first)))
            case Stream(session, tokens, max_tokens):
                return self._stream(session, tokens, max_tokens)
            case Batch(sessions, prompts, max_tokens):
                return self._batch(sessions, prompts, max_tokens)
            case Forget():
                self._caches.clear()
                mx.clear_cache()
                return Done()

    def _chat(self, system: str, text: str, *, first: bool) -> list[int]:
        if not self._tokenizer.has_chat_template:
            whole = f"{system}\n{text}\n" if first else f"\n{text}\n"
            return list(self._tokenizer.encode(whole, add_special_tokens=False))
        head = [{"role": "system", "content": system}]
        turn = [*head, {"role": "user", "content": text}]
        tokens = self._render(turn, add_generation_prompt=True)
        before = [] if first else self._render(head, add_generation_prompt=False)
        return tokens[len(before) :] if tokens[: len(before)] == before else tokens

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        apply: Any = self._tokenizer.apply_chat_template
        return list(apply(messages, add_generation_prompt=add_generation_prompt, return_dict=False))

    def _stream(self, session: str, tokens: Sequence[int], max_tokens: int) -> Ran:
        started_s = time.perf_counter()
        if session not in self._caches:
            self._caches[session] = make_prompt_cache(self._model)
        found, times_s = [], []
        steps = generate_step(
            mx.array(list(tokens)),
            self._model,
            max_tokens=max_tokens,
            prompt_cache=self._caches[session],
            prefill_step_size=self._prefill_step,
        )
        for token, _ in steps:
            times_s.append(time.perf_counter() - started_s)
            found.append(int(token))
            if token in self._ends:
                break
        steps.close()
        row = Row(tuple(found), tuple(times_s))
        return Ran((row,), time.perf_counter() - started_s)

    def _batch(self, sessions: Sequence[str], prompts: Sequence[Sequence[int]], max_tokens: int) -> Ran:
        started_s = time.perf_counter()
        uids = self._batches.insert(
            [list(prompt) for prompt in prompts],
            [max_tokens] * len(prompts),
            caches=[self._caches.get(session) for session in sessions],
        )
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        times_s: dict[int, list[float]] = {uid: [] for uid in uids}
        names = dict(zip(uids, sessions, strict=True))
        while names:
            for response in self._batches.next_generated():
                found[response.uid].append(int(response.token))
                times_s[response.uid].append(time.perf_counter() - started_s)
                if response.finish_reason is not None:
                    self._caches[names.pop(response.uid)] = response.prompt_cache
        rows = tuple(Row(tuple(found[uid]), tuple(times_s[uid])) for uid in uids)
        return Ran(rows, time.perf_counter() - started_s)


def load(paths: Sequence[str]) -> Loaded:
    """Read files as plainly as MLX can: the limit of a restore."""
    started_s = time.perf_counter()
    for path in paths:
        mx.eval(mx.load(path))
    seconds = time.perf_counter() - started_s
    return Loaded(sum(Path(path).stat().st_size for path in paths), seconds)
