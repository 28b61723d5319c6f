"""Restores KV from disk many times, with faults put into the files, and compares every bit.

    python tests/soak/restores.py --restores 1000000 --seed 1

One restore is a `match` and a `load` of the real store, which reads a session's files from disk into arrays.
The KV is that of tiny models with every class of cache; before a campaign it is shown that restored caches
go on bit for bit as those that never left memory. Sessions of one length take turns (A, B, A), are restored
two at a time, and the store is closed and opened again. Now and then a file gets a flipped bit, is cut, or
is replaced: by one of its size of another session, another tenant, the same tokens with another picture,
another type of KV, or an older code. A restore may then be shorter, but its bits must be right, and the
faulty file must be found: by the restore that reads it, else by `cache verify`.
"""

import asyncio
import itertools
import logging
import random
import shutil
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from harness import ROOT, arguments, folder, table

sys.path[:0] = [str(ROOT / "tests" / "device")]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import structlog  # noqa: E402
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache  # noqa: E402
from tiny_models import BLOCK, VOCABULARY, WIDE, build, prompt  # noqa: E402

from cache.admin.survey import verify  # noqa: E402
from cache.disk.chain_reader import RestoredKv  # noqa: E402
from cache.kv import layers  # noqa: E402
from cache.names import blocks  # noqa: E402
from cache.names.blocks import Span  # noqa: E402
from cache.names.identity import Identity  # noqa: E402
from cache.names.images import ImageSpan  # noqa: E402
from cache.names.snapshot import STATE, Tensor  # noqa: E402
from cache.names.tokens import Tokens, as_tokens  # noqa: E402
from cache.store import Store  # noqa: E402

#: Models that have all classes of cache between them, and two classes that no model has by itself.
KINDS: Final = (
    *("llama", "exaone4", "gemma3_text", "mamba2", "rwkv7", "qwen3_next", "granitemoehybrid", "falcon_h1"),
    *(
        "recurrent_gemma",
        "baichuan_m1",
        "llama4",
        "deepseek_v3",
        "longcat_flash",
        "quantized",
        "concatenated",
    ),
)
#: The changes of the identity by which KV is another model's, as far as the store knows.
ELSEWHERE: Final = {"dtype": {"kv_dtype": "bfloat16"}, "code": {"code": "old"}}
FAULTS: Final = ("flipped", "cut", "swapped", "tenant", "picture", "dtype", "code")
#: Of so many steps one puts a fault into a file, and one opens the store again.
_FAULT_EACH: Final = 20
_OPEN_EACH: Final = 200
#: So many restores with one model, before the next one's turn.
_TOGETHER: Final = 1000
_NUM_DECODED: Final = 12


@dataclass
class Verdict:
    """The counts of a campaign; `wrong` should be empty, and `found` equal `put`."""

    restores: int = 0
    put: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Session:
    """A saved session: the tensors and the file of each snapshot, and the bits of its KV by length."""

    tenant: str
    tokens: Tokens
    cuts: dict[Span, tuple[Tensor, ...]] = field(default_factory=dict)
    files: dict[Span, Path] = field(default_factory=dict)
    bits: dict[int, dict[str, bytes]] = field(default_factory=dict)


class Model:
    """A tiny model, and how to make its caches."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = build("llama", **WIDE) if kind in ("quantized", "concatenated") else build(kind)
        first = self.new()
        self.run(first, [0])
        self.layout = layers.layout(first, self.new)
        names = {"weights": kind, "config": "c", "tokenizer": "t", "kv_dtype": "float32"}
        self.identity = Identity(**names, block_tokens=BLOCK, code="new", caches=layers.describe(first))

    def new(self) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self.model)
        if self.kind == "quantized":
            return [cache.to_quantized(32, 8) for cache in caches]
        return [ConcatenateKVCache() for _ in caches] if self.kind == "concatenated" else caches

    def run(self, caches: list[Any], tokens: Sequence[int]) -> mx.array:
        logits = self.model(mx.array([[*tokens]]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def decoded(self, caches: list[Any]) -> list[bytes]:
        """Decode greedily, and return the bits of all logits."""
        bits, token = [], 1
        for _ in range(_NUM_DECODED):
            logits = self.run(caches, [token])
            bits.append(bytes(memoryview(logits).cast("B")))
            token = int(mx.argmax(logits).item())
        return bits

    async def open(self, where: Path, **changes: str) -> Store:
        limits: Any = {"max_bytes": 1 << 30, "queue_bytes": 1 << 30, "min_free_bytes": 0}
        identity = replace(self.identity, **changes)
        return await Store.open(where, identity=identity, layout=self.layout, **limits)


class Campaign:
    """Restores of one model's sessions. Each session has KV of its own, also where tokens are the same."""

    def __init__(self, model: Model, where: Path, dice: random.Random, verdict: Verdict) -> None:
        self._model = model
        self._where = where
        self._dice = dice
        self._verdict = verdict
        self._sessions: list[Session] = []
        #: For each fault, which session may get it, and whose files replace its own.
        self._others: dict[str, tuple[Session, Session]] = {}

    async def begin(self) -> None:
        """Save the sessions, and show that restored caches go on as those in memory."""
        self._store = store = await self._model.open(self._where / "own")
        for number, length in enumerate((8, 17, 17, 24, 24, 24)):
            await self._save(store, Session("a", as_tokens(prompt(length, 3 + number))))
        *_, one, other = self._sessions
        self._others["swapped"] = one, other
        self._others["tenant"] = one, await self._save(store, Session("b", one.tokens), 1)
        ids = array("I", prompt(17, 50))
        pictures = [as_tokens().extended(ids, [ImageSpan(2, 8, mark)]) for mark in (b"P", b"Q")]
        first, second = [await self._save(store, Session("a", one), at) for at, one in enumerate(pictures)]
        self._others["picture"] = first, second
        for salt, (name, changes) in enumerate(ELSEWHERE.items(), 2):
            elsewhere = await self._model.open(self._where / name, **changes)
            self._others[name] = one, await self._save(elsewhere, Session("a", one.tokens), salt)
            await elsewhere.close()
            del self._sessions[-1]

    async def _save(self, store: Store, session: Session, salt: int = 0) -> Session:
        """Save a session's KV (with a `salt` that of other tokens), and restore it at each length."""
        caches, chain = self._model.new(), store.kv.chain(session.tenant)
        ids = [(token + salt) % (VOCABULARY - 1) for token in session.tokens.ids()]
        digest = chain.root
        for span in store.kv.wanted(chain, session.tokens):
            self._model.run(caches, ids[span.start : span.end])
            session.cuts[span] = layers.cut(caches, span.start, span.end, at_end=True) or ()
            digest = blocks.link(digest, session.tokens.packed(span.start, span.end))
            session.files[span] = store._folder.path(digest)
        await self._mend(store, session)
        for span in session.cuts:
            restored = await store.kv.load(store.kv.match(chain, session.tokens[: span.end]))
            assert restored is not None
            assert restored.num_tokens == span.end
            session.bits[span.end] = bits_of(restored)
        again = layers.rebuild(restored.tensors, self._model.new(), restored.num_tokens)
        if self._model.decoded(again) != self._model.decoded(caches):
            self._verdict.wrong.append(f"{self._model.kind}: restored caches go on otherwise")
        self._sessions.append(session)
        return session

    async def _mend(self, store: Store, session: Session) -> None:
        chain = store.kv.chain(session.tenant)
        for span in store.kv.wanted(chain, session.tokens):
            assert store.kv.save(chain, session.tokens, span, session.cuts[span])
        assert await store.queue.drained(60)

    async def play(self, num_restores: int) -> None:
        """Restore so many times, between faults and new starts."""
        until = self._verdict.restores + num_restores
        for step in itertools.count(1):
            one, other = self._dice.sample(self._sessions, 2)
            if step % _FAULT_EACH == 0:
                await self._fault(one, FAULTS[step // _FAULT_EACH % len(FAULTS)])
            elif step % 3:
                for session in (one, other, one):
                    await self._restore(session)
            else:
                await asyncio.gather(self._restore(one), self._restore(other))
            if step % _OPEN_EACH == 0:
                assert await self._store.close()
                self._store = await self._model.open(self._where / "own")
            if self._verdict.restores >= until:
                break
        assert await self._store.close()

    async def _restore(self, session: Session, *, is_faulty: bool = False) -> None:
        """Restore a session from the files of now, and compare each bit with those of the first restore."""
        tokens = session.tokens + [VOCABULARY - 1] * BLOCK
        match = self._store.kv.match(self._store.kv.chain(session.tenant), tokens)
        restored = await self._store.kv.load(match)
        self._verdict.restores += 1
        num = restored.num_tokens if restored is not None else 0
        is_whole = num == len(session.tokens) or is_faulty
        if not is_whole or (restored is not None and bits_of(restored) != session.bits.get(num)):
            self._verdict.wrong.append(f"{self._model.kind}: {num} tokens of {session.tokens}")

    async def _fault(self, session: Session, fault: str) -> None:
        """Put a fault into one of a session's files, restore it, and save what is missing then."""
        session, other = self._others.get(fault, (session, session))
        places = [span for span, path in session.files.items() if path.exists()]
        span = self._dice.choice(places)
        path, taken = session.files[span], other.files[span]
        before = path.read_bytes()
        whole = bytearray(before)
        if fault == "flipped":
            whole[self._dice.randrange(len(whole))] ^= 1 << self._dice.randrange(8)
        elif fault == "cut":
            del whole[self._dice.randrange(len(whole)) :]
        elif taken.exists() and taken.stat().st_size == len(before):
            whole[:] = taken.read_bytes()
        else:
            return
        path.write_bytes(whole)
        rejected = self._store.stats().rejected
        await self._restore(session, is_faulty=True)
        is_found = self._store.stats().rejected > rejected
        if not is_found:  # it is of a part that this restore does not need
            is_found = bool(verify(self._where / "own", lambda *_: None).doubtful)
            path.write_bytes(before)
        self._verdict.put[fault] += 1
        self._verdict.found[fault] += is_found
        await self._mend(self._store, session)
        await self._restore(session)


def bits_of(restored: RestoredKv) -> dict[str, bytes]:
    """Return the bits of the KV; arrays have memory for more tokens, of any content."""
    arrays = {name: np.asarray(one) for name, one in restored.tensors.items()}
    return {
        name: (one if name.startswith(STATE) else one[:, :, : restored.num_tokens]).tobytes()
        for name, one in arrays.items()
    }


async def campaign(where: Path, restores: int, seed: int, kinds: Sequence[str] = KINDS) -> Verdict:
    """Restore so many times in all, by turns with each kind of model; return what was found."""
    verdict, models, turn = Verdict(), [Model(kind) for kind in kinds], 0
    while verdict.restores < restores:
        turn += 1
        for model in models:
            dice = random.Random(f"{seed} {model.kind} {turn}")
            played = Campaign(model, where / f"{model.kind} {turn}", dice, verdict)
            await played.begin()
            await played.play(min(_TOGETHER, restores // len(kinds)))
            shutil.rmtree(where / f"{model.kind} {turn}")
        faults = f"{verdict.put.total()} faults, {verdict.found.total()} found"
        print(f"{verdict.restores} restores, {len(verdict.wrong)} false; {faults}", flush=True)
    return verdict


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--restores", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    begun_s = time.process_time()
    async with folder() as where:
        verdict = await campaign(where, given.restores, given.seed)
    print(
        table(
            ("restores", verdict.restores),
            ("false restores", len(verdict.wrong)),
            *((f"files {fault}", f"{verdict.put[fault]}, found {verdict.found[fault]}") for fault in FAULTS),
            ("minutes of CPU", f"{(time.process_time() - begun_s) / 60:.1f}"),
        )
    )
    print(*verdict.wrong[:20], sep="\n")
    return not verdict.wrong and verdict.put == verdict.found


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
