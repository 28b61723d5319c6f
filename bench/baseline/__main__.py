"""The program: commands from standard input, a reply to each on standard output, until the input ends."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from .messages import Hello, Refused, Reply, decode_command, encode

DEFAULT_PREFILL_STEP: Final = 2048


def main() -> int:
    """Run until there are no more commands; 1 where the model cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m bench.baseline", description="mlx-lm without Turnkeep")
    parser.add_argument("--model", type=Path, help="MLX model folder; without it only files can be loaded")
    parser.add_argument("--prefill-step", type=int, default=DEFAULT_PREFILL_STEP)
    options = parser.parse_args()
    # What libraries print must not come between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(message: Reply) -> None:
        replies.write(encode(message))
        replies.flush()

    from .engine import Engine

    try:
        engine = Engine(options.model, prefill_step=options.prefill_step)
    except Exception as error:  # noqa: BLE001  # whatever mlx-lm raises
        reply(Refused(f"{options.model} cannot be loaded: {_one_line(error)}"))
        return 1
    reply(Hello(device=engine.device))
    try:
        for line in sys.stdin.buffer:
            try:
                answer = engine.run(decode_command(line))
            except msgspec.DecodeError as error:
                answer = Refused(f"not a command: {error}")
            except Exception as error:  # noqa: BLE001  # whatever mlx-lm raises
                answer = Refused(_one_line(error))
            reply(answer)
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    finally:
        engine.close()
    return 0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    sys.exit(main())
