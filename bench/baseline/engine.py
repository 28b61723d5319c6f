"""mlx-lm used as a program would use it that has the model to itself: no network, no log, no snapshots.

`python -m bench.baseline.engine MODEL PREFILL_STEP` takes commands from standard input and writes a reply to
each on standard output, until the input ends. Sessions keep their prompt caches from turn to turn.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from .messages import Forget, Refused, Row, Said, Say, decode_command, encode

if TYPE_CHECKING:
    from collections.abc import Sequence


class Engine:
    """The model, and the prompt caches of its sessions."""

    def __init__(self, folder: str, *, prefill_step: int) -> None:
        """Load the model as a worker with its default settings does."""
        self._prefill_step = prefill_step
        self._caches: dict[str, list[Any]] = {}
        self._model, tokenizer = mlx_lm.load(folder, lazy=True)[:2]
        if mx.default_device() == mx.Device(mx.cpu):
            self._model = dequantize_model(self._model)
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())
        self._ends = frozenset(tokenizer.eos_token_ids)
        stop_tokens = [[token] for token in sorted(self._ends)]
        self._batches: Any = BatchGenerator(
            self._model, stop_tokens=stop_tokens, prefill_step_size=prefill_step
        )

    def close(self) -> None:
        """Give back what the batch generator took of the machine."""
        self._batches.close()

    def run(self, command: Say | Forget) -> Said:
        """Carry out a command. Raises whatever mlx-lm raises."""
        match command:
            case Say((session,), (prompt,), max_tokens):
                return Said((self._alone(session, prompt, max_tokens),))
            case Say(sessions, prompts, max_tokens):
                return Said(self._together(sessions, prompts, max_tokens))
            case Forget():
                self._caches.clear()
                mx.clear_cache()
                return Said()

    def _alone(self, session: str, prompt: Sequence[int], max_tokens: int) -> Row:
        """Answer in one session, by what is quickest for one."""
        started_s = time.perf_counter()
        if session not in self._caches:
            self._caches[session] = make_prompt_cache(self._model)
        found, times_s = [], []
        steps = generate_step(
            mx.array(list(prompt)),
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
        return Row(tuple(found), tuple(times_s))

    def _together(
        self, sessions: Sequence[str], prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> tuple[Row, ...]:
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
        return tuple(Row(tuple(found[uid]), tuple(times_s[uid])) for uid in uids)


def main() -> int:
    """Run until there are no more commands; 1 where the model cannot be loaded."""
    # What libraries print must not come between the replies.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    folder, prefill_step = sys.argv[1:]
    try:
        engine = Engine(folder, prefill_step=int(prefill_step))
    except Exception as error:  # noqa: BLE001  # whatever mlx-lm raises
        replies.write(encode(Refused(f"{folder} cannot be loaded: {_one_line(error)}")))
        return 1
    try:
        replies.write(encode(Said()))
        for line in sys.stdin.buffer:
            try:
                answer: Said | Refused = engine.run(decode_command(line))
            except Exception as error:  # noqa: BLE001  # whatever mlx-lm raises
                answer = Refused(_one_line(error))
            replies.write(encode(answer))
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    finally:
        engine.close()
    return 0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    sys.exit(main())
