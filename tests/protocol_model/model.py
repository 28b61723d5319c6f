"""The protocol of several workers as a model: explicit states, and every step that may follow one.

**State.** `Shared` is what all sessions have in common: which workers run, are paused or dead, drain, or are
known by some and not by others (`is_unsure`: whoever asks may believe either); the server's process (`life`);
the faults that are left. `Session` is one session: its log (requests, notes of a close, results), the chunks
of its answers, what each worker knows of it and does with it (`Memory`), whose disk has KV of which request.
No session reads another one's state. So the interleavings of several sessions are those of each one with the
steps of workers and server; `test_protocol_model` compares both.

**Steps** are what can be seen from outside, each atomic: a read of the log; a chunk, seal, note or result
that the server stores or refuses; a delivery, an ack, a removal; a crash, a pause, a restart; a server that
loses its last entries, while what was removed stays removed. Anything may happen between two of them.

**Invariants** (`checker`): one first result for each request, and for each id; results in order, each from
the history before it; none contradicts a published chunk, and no chunk is of another history; no request is
in neither queue nor results; without faults one worker is at work on a session. At rest nothing of a
forgotten session is in log, chunks, or on a disk. From each state all requests can be answered without
further faults, by the workers that run.

**A request leaves the queue** (`dequeue`) once its result is safe: no power cut can take it, as the server
process that stored it has synced its files since. Age alone does not say that: a server that was killed and
started again may not have synced what it found. `synced` is the least part of the log that must be safe for
the removals so far; everything behind it may be lost.

**Not modelled:** time (the end of a worker is noticed before it is back, also by those that were paused: they
notice it when they go on), the contents of tokens (a token is the worker that drew it), several chunks,
lagging replicas, lost acks, refused chunks, checkpoints, forks and shared KV, cancels out of order, counted
attempts, limits of sessions, `ctl` and `ask`, pings, expired sessions: the result of a close that forgets
stays, as no worker is stalled for fifteen minutes.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

UP, PAUSED, DEAD = "up", "paused", "dead"
#: The history of a session whose log has lost a result.
DIVERGED: Final = (("diverged",),)
#: Kinds of requests: an append, a generate, one sent again (of the first request), a close that forgets, and
#: one that does not (only in recorded histories).
KINDS: Final = "AGRFC"

History = tuple[Any, ...]
Label = tuple[Any, ...]


class Worker(NamedTuple):
    """What is known of a worker. Others may be unsure whether it is there, or drains."""

    status: str = UP
    drains: bool = False
    is_unsure: bool = False


class Shared(NamedTuple):
    """What all sessions have in common: workers, the server's process, and the faults that are left."""

    workers: tuple[Worker, ...]
    num_faults: int
    num_losses: int
    num_drains: int
    life: int = 0


class Entry(NamedTuple):
    """An entry of a session's log; its sequence is its place, from 1. A removed entry stays as `is_gone`.

    `kind` is `in`, `note` or `out`. A request has the workers (`by`) to which it was delivered, until it is
    `acked`; a note those whose disks have no KV of the session. A result has its worker (`by`), the sequence
    of the result before it
    (`fence`), the tokens of an answer, and the history `after` it. A `repeats` is not the first of its id; a
    `fails` changes nothing. `life` is the server's process that stored it.
    """

    kind: str
    request: int
    is_gone: bool = False
    acked: bool = False
    by: Any = None
    fence: int = 0
    tokens: tuple[int, ...] = ()
    after: History = ()
    repeats: bool = False
    fails: bool = False
    life: int = 0


class Chunk(NamedTuple):
    """A message of an answer's token stream: a token (the worker that drew it) and the history it is for.

    Without a base it is a seal: no chunk may follow.
    """

    by: int
    base: History | None = None


class Memory(NamedTuple):
    """What a worker knows of a session, and what it does next.

    idle: nothing; stale: whatever it does next is fenced; rung: it has to read; listed: it has read the queue
    (`listed`); fresh: it has read the
    results up to `known`; ready: `request`, at `seq`, is next; begun: its chunks are read, the last one is at
    `after`; told: its first chunk is stored; ending: it is to end without tokens; noted: a note of the close
    is stored; checked: the request was still there.
    """

    phase: str = "rung"
    life: int = -1  # of the server that `known` is from; -1 if nothing was read
    known: int = 0
    history: History = ()
    listed: tuple[int, ...] = ()
    request: int = -1
    seq: int = 0
    after: int = 0
    tokens: tuple[int, ...] = ()
    fails: bool = False


class Session(NamedTuple):
    """One session: what the server has of it, and each worker."""

    log: tuple[Entry, ...]
    chunks: tuple[tuple[Chunk, ...], ...]  # by request
    memory: tuple[Memory | None, ...]  # by worker
    kv: tuple[int, ...]  # by worker: the requests, as bits, of which its disk has KV
    synced: int = 0
    looked: int = 0  # the server's process after whose start requests without a delivery were looked for
    is_swept: bool = False  # the chunks of what was forgotten were removed
    num_ends: int = 0  # how many requests may still be ended without tokens


class Rules(NamedTuple):
    """What may happen in an exploration, and which rules of the protocol are left out (`without`)."""

    num_workers: int = 3
    num_faults: int = 2
    num_losses: int = 1
    num_drains: int = 1
    num_ends: int = 1
    queue_first: bool = True  # whether an unread log is read from its queue, else from its results
    reads_at_once: bool = False  # whether a log that was not read before is read in one step
    routes_freely: bool = False  # whether a worker that is not the owner may take a session
    most_chunks: int | None = 1  # None: an answer may have any number
    without: frozenset[str] = frozenset()

    def has(self, rule: str) -> bool:
        """Whether the protocol has a rule."""
        return rule not in self.without


class Model(NamedTuple):
    """The steps of one session whose clients send these requests, in order (a string of `KINDS`)."""

    rules: Rules
    program: str
    ids: tuple[int, ...] = ()  # of the requests; without them only an `R` has another one's

    def begin(self) -> Session:
        """Return the session before its first request."""
        num, rules = len(self.program), self.rules
        return Session((), ((),) * num, (None,) * rules.num_workers, (0,) * rules.num_workers,
                       num_ends=rules.num_ends)  # fmt: skip

    # ---- what an entry or a state says

    def kind(self, request: int) -> str:
        """Return how a request is carried out."""
        return self.program[0] if self.program[request] == "R" else self.program[request]

    def id_of(self, request: int) -> int:
        """Return a request's id."""
        if self.ids:
            return self.ids[request]
        return 0 if self.program[request] == "R" else request

    def _may_publish(self, memory: Memory) -> bool:
        most = self.rules.most_chunks
        is_open = most is None or len(memory.tokens) < most
        return is_open and self.kind(memory.request) == "G" and not memory.fails

    def _may_commit(self, memory: Memory) -> bool:
        return self.rules.most_chunks is None or not self._may_publish(memory)

    def owners(self, shared: Shared, session: Session) -> set[int]:
        """Return the workers that may own a session, by what any of them may believe of the others."""
        return {
            one for members, drained in _beliefs(shared) for one in self._owner(members, drained, session)
        }

    def _owner(self, members: list[int], drained: set[int], session: Session) -> list[int]:
        last = last_out(session.log)
        takers = [one for one in members if one not in drained] or members
        if last and session.log[last - 1].by in takers:
            return [session.log[last - 1].by]
        return takers[:1]  # the lowest has the highest hash

    def routes(self, shared: Shared, session: Session) -> set[int]:
        """Return the workers that may get a delivery: the one that is at work, else the owner.

        One that drains says: later.
        """
        workers = shared.workers
        ups = {w for w, one in enumerate(workers) if one.status == UP}
        if self.rules.routes_freely:
            return ups
        found = set[int]()
        for members, drained in _beliefs(shared):
            busy = [one for one in members if at_work(session.memory[one])]
            if not self.rules.has("a session moves between two requests"):
                busy = [one for one in busy if one not in drained]
            found |= {one for one in busy if one not in drained}
            if not busy:
                found |= {*self._owner(members, drained, session)}
        return found & ups

    # ---- steps of all sessions

    def shared_steps(self, shared: Shared) -> Iterator[tuple[Label, Shared]]:
        """Return the steps of workers and server."""
        for w, worker in enumerate(shared.workers):

            def becomes(
                w: int = w, worker: Worker = worker, *, num_faults: int = 0, num_drains: int = 0, **new: Any
            ) -> Shared:
                workers = list(shared.workers)
                workers[w] = worker._replace(**new)
                return shared._replace(
                    workers=tuple(workers),
                    num_faults=shared.num_faults - num_faults,
                    num_drains=shared.num_drains - num_drains,
                )

            if worker.status != DEAD and shared.num_faults:
                yield ("crash", w), becomes(status=DEAD, drains=False, is_unsure=True, num_faults=1)
            if worker.status == UP and shared.num_faults:
                yield ("pause", w), becomes(status=PAUSED, is_unsure=True, num_faults=1)
            if worker.status == PAUSED:
                yield ("resume", w), becomes(status=UP, is_unsure=True)
            if worker.status == DEAD and not worker.is_unsure:  # its end is noticed before it is back
                yield ("restart", w), becomes(status=UP, is_unsure=False)  # it has greeted all others
            if worker.status == UP and not worker.drains and shared.num_drains:
                yield ("drain", w), becomes(drains=True, num_drains=1)
            if worker.status == UP and worker.drains:
                yield ("undrain", w), becomes(drains=False)
            if worker.is_unsure:
                yield ("notice", w), becomes(is_unsure=False)
        if shared.num_losses:
            yield ("lose",), shared._replace(life=shared.life + 1, num_losses=shared.num_losses - 1)

    def follow(self, label: Label, shared: Shared, session: Session) -> Iterator[Session]:
        """Return what becomes of a session by a step of `shared_steps`; `shared` is the state after it."""
        match label:
            case "crash", w:
                yield self._given_back(session, w)
            case "notice", w if shared.workers[w].status != UP and self._is_lost(shared, session):
                # Those that are left take over what nobody has (`_take_unanswered`).
                yield from [self._ring(session, v) for v in self.owners(shared, session)] or [session]
            case (("resume" | "restart"), w) if self._finds_lost(label[0], w, shared, session):
                yield self._ring(session, w)
            case ("lose",):
                yield from self._lost(session)
            case _:
                yield session

    def _finds_lost(self, step: str, w: int, shared: Shared, session: Session) -> bool:
        """Whether a worker that is back takes what nobody has.

        One that was paused does so for the ends that it missed: it notices them now, as if they were new.
        """
        is_told = step == "restart" or (
            self.rules.has("a worker that was paused notices ends")
            and any(one.status != UP for one in shared.workers)
        )
        return is_told and self._is_lost(shared, session) and w in self.owners(shared, session)

    def _is_lost(self, shared: Shared, session: Session) -> bool:
        """Whether the queue has a request without a result, and no worker that answers is at work on it."""
        ups = [w for w, one in enumerate(shared.workers) if one.status == UP]
        return has_unanswered(session.log) and not any(at_work(session.memory[w]) for w in ups)

    def _lost(self, session: Session) -> Iterator[Session]:
        lefts = product(*(range(len(one) + 1) for one in session.chunks))
        cuts = [tuple(one[:n] for one, n in zip(session.chunks, left, strict=True)) for left in lefts]
        if not self.rules.without:
            memory = [_overtaken(one) for one in session.memory]
            session = session._replace(memory=tuple(memory))
        for kept in range(session.synced, len(session.log) + 1):
            for chunks in cuts:
                yield session._replace(log=session.log[:kept], chunks=chunks, synced=0, is_swept=False)

    # ---- steps of one session

    def steps(self, shared: Shared, session: Session) -> Iterator[tuple[Label, Session]]:
        """Return the steps of one session and its workers."""
        log = session.log
        asked = sum(one.kind == "in" for one in log)
        if asked < len(self.program):
            yield ("ask", asked), _logged(session, Entry("in", asked, by=frozenset()))
        ups = [w for w, one in enumerate(shared.workers) if one.status == UP]
        for seq, one in _queue(log):
            if not one.acked and not any(w in ups and at_work(session.memory[w]) for w in one.by):
                for w in self.routes(shared, session):
                    held = session._replace(log=_put(log, seq - 1, one._replace(by=one.by | {w})))
                    yield ("deliver", w, one.request), self._ring(held, w)
        if session.looked < shared.life and ups and self.rules.has("undelivered requests are found"):
            seen = session._replace(looked=shared.life)
            heard = self.owners(shared, session) if has_unanswered(log) else set()
            for one in [self._ring(seen, w) for w in heard] or [seen]:
                yield ("look",), one
        if ups:
            yield from self._sweep(shared, session)
        for w in ups:
            if (memory := session.memory[w]) is not None:
                yield from self._work(shared, session, w, memory)
            yield from self._erase(session, w)

    def _ring(self, session: Session, w: int) -> Session:
        """Wake a session at a worker: also at a paused one, which hears it when it goes on."""
        memory = session.memory[w]
        return session if at_work(memory) else _with(session, w, (memory or Memory())._replace(phase="rung"))

    def _work(
        self, shared: Shared, session: Session, w: int, memory: Memory
    ) -> Iterator[tuple[Label, Session]]:
        """Return the next steps of a worker at a session."""
        log, has = session.log, self.rules.has

        def then(**new: Any) -> Session:
            return _with(session, w, memory._replace(**new))

        def fenced() -> Iterator[tuple[Label, Session]]:
            yield from self._fenced(shared, session, w)

        if memory.phase == "stale":
            yield from fenced()
            return
        if (
            memory.phase not in ("idle", "rung", "listed")
            and memory.life != shared.life
            and has("a restart of the server is noticed")
        ):
            yield from fenced()
            return
        if self.rules.most_chunks is None and memory.phase == "begun" and self._may_publish(memory):
            yield from self._publish(session, w, memory)
        match memory.phase:
            case "rung" if memory.life >= 0:
                is_stale = last_out(log) != memory.known or memory.life != shared.life
                if is_stale and has("a known session is read on"):
                    yield from fenced()
                else:
                    yield ("look on", w), then(phase="fresh")
            case "rung" if self.rules.reads_at_once:
                known, history = read(log)
                pending = _pending(log, [seq for seq, _ in _queue(log)], known)
                now = Memory("fresh", shared.life, known, history)
                if pending is not None:
                    now = now._replace(phase="ready", request=log[pending - 1].request, seq=pending)
                yield ("read", w), _with(session, w, now)
            case "rung" if self.rules.queue_first:
                listed = tuple(seq for seq, one in _queue(log))
                yield ("list", w), then(phase="listed", listed=listed, life=shared.life)
            case "rung":
                known, history = read(log)
                yield ("read", w), then(phase="fresh", known=known, history=history, life=shared.life)
            case "listed":
                if memory.life != shared.life:
                    yield from fenced()
                    return
                known, history = read(log)
                pending = _pending(log, memory.listed, known)
                is_there = pending is None or not log[pending - 1].is_gone
                if not is_there and has("a reading checks that the request is there"):
                    yield from fenced()
                    return
                now = memory._replace(phase="fresh", known=known, history=history, listed=())
                if pending is not None:
                    now = now._replace(phase="ready", request=log[pending - 1].request, seq=pending)
                yield ("read", w), _with(session, w, now)
            case "fresh":
                pending = _pending(log, [seq for seq, _ in _queue(log)], memory.known)
                if pending is None:
                    yield ("ack", w), self._acked(then(phase="idle"), w)
                elif pending <= len(log):
                    now = then(phase="ready", request=log[pending - 1].request, seq=pending)
                    yield ("next", w), now if has("no ack before the result") else self._acked(now, w)
            case "ready":
                yield from self._begin(shared, session, w, memory)
            case "told":
                is_answered = any(one.request == memory.request for _, one in _outs(log))
                if is_answered and has("a chunk of an answered request stays"):
                    yield from fenced()
                elif log[memory.seq - 1 :] == () or log[memory.seq - 1].is_gone:
                    chunks = _put(session.chunks, memory.request, session.chunks[memory.request][:-1])
                    for _, one in self._fenced(shared, session, w):
                        yield ("withdraw", w), one._replace(chunks=chunks)
                else:
                    yield ("seen", w), then(phase="begun")
            case "ending":
                told = session.chunks[memory.request]
                if len(told) != memory.after:
                    yield from fenced()
                else:
                    sealed = then(phase="begun", fails=True, after=memory.after + 1)
                    chunks = _put(session.chunks, memory.request, (*told, Chunk(w)))
                    yield ("seal", w, memory.request), sealed._replace(chunks=chunks)
            case "begun" if not self._may_commit(memory):
                yield from self._publish(session, w, memory)
            case "begun" | "noted" if not memory.known and has("a first result needs its request"):
                if log[memory.seq - 1 :] == () or log[memory.seq - 1].is_gone:
                    yield from fenced()
                else:
                    yield ("check", w), then(phase="checked")
            case "begun" | "noted" | "checked":
                yield from self._commit(shared, session, w, memory)

    def _fenced(self, shared: Shared, session: Session, w: int) -> Iterator[tuple[Label, Session]]:
        """Return what a worker does whose knowledge is stale: it reads anew, or leaves it to another one."""
        others = [v for v, one in enumerate(shared.workers) if v != w and one.status == UP]
        left = self._given_back(session, w)
        if any(at_work(session.memory[v]) for v in others):
            yield ("leave", w), left
            return
        last = last_out(session.log)
        owner = session.log[last - 1].by if last else None
        for members, drained in _beliefs(shared):
            takers = [one for one in members if one not in drained] or members
            if owner is not None and owner != w and owner in takers:
                hears = shared.workers[owner].status != DEAD
                wakes = hears and self.rules.has("a worker that leaves a session wakes its owner")
                yield ("leave", w), self._ring(left, owner) if wakes else left
            else:
                yield ("read anew", w), _with(session, w, Memory())

    def _begin(
        self, shared: Shared, session: Session, w: int, memory: Memory
    ) -> Iterator[tuple[Label, Session]]:
        log, request, has = session.log, memory.request, self.rules.has
        kind, told = self.kind(request), session.chunks[request]
        first = self._first(log, memory)
        if first is not None and has("a known id is not carried out again"):
            yield ("repeat", w), _with(session, w, memory._replace(phase="noted"))
            return
        if kind in "FC":
            yield ("note", w, request), self._note(shared, session, w, memory)
            return
        if kind == "G" and last_out(log) != memory.known and has("a first chunk needs the last result"):
            yield from self._fenced(shared, session, w)
            return
        is_sealed = any(one.base is None for one in told)
        tokens = tuple(one.by for one in told if one.base is not None)
        is_over = is_sealed or memory.history == DIVERGED
        if not has("chunks are read back"):
            is_sealed, tokens = False, ()
        begun = memory._replace(phase="begun", after=len(told), tokens=tokens, fails=is_over and not tokens)
        if not begun.fails:
            kv = _put(session.kv, w, session.kv[w] | 1 << request) if "F" in self.program else session.kv
            yield ("begin", w), _with(session, w, begun)._replace(kv=kv)
        elif not is_sealed and kind == "G":
            yield ("end", w), _with(session, w, begun._replace(phase="ending"))
        else:
            yield ("end", w), _with(session, w, begun)
        if session.num_ends and not begun.fails and not tokens:
            seals = kind == "G" and has("an end without tokens is sealed")
            ended = begun._replace(phase="ending" if seals else "begun", fails=True)
            yield ("end", w), _with(session, w, ended)._replace(num_ends=session.num_ends - 1)

    def _first(self, log: tuple[Entry, ...], memory: Memory) -> Entry | None:
        """Return the first result of a request's id, as far as the worker knows."""
        for entry in known_outs(log, memory.known):
            if self.id_of(entry.request) == self.id_of(memory.request) and not entry.repeats:
                return entry
        return None

    def _publish(self, session: Session, w: int, memory: Memory) -> Iterator[tuple[Label, Session]]:
        told, request = session.chunks[memory.request], memory.request
        if len(told) != memory.after and self.rules.has("chunks are fenced"):
            yield ("leave", w), _with(session, w, Memory())
            return
        is_first = not memory.tokens and self.rules.has("a first chunk is taken back after a forget")
        now = memory._replace(
            phase="told" if is_first else "begun", tokens=(*memory.tokens, w), after=len(told) + 1
        )
        chunks = _put(session.chunks, request, (*told, Chunk(w, memory.history)))
        yield ("chunk", w, request), _with(session, w, now)._replace(chunks=chunks)

    def _note(self, shared: Shared, session: Session, w: int, memory: Memory) -> Session:
        """Erase KV where workers answer, and store which disks have none of it any more."""
        before = (1 << memory.request) - 1
        workers = enumerate(shared.workers)
        done = [v for v, one in workers if v == w or (one.status == UP and not at_work(session.memory[v]))]
        kv = tuple(bits & ~before if v in done else bits for v, bits in enumerate(session.kv))
        for v in done:
            if v != w:
                session = _with(session, v, None)
        said = frozenset(done if self.rules.has("a forget waits for absent workers") else range(len(kv)))
        session = _with(session, w, memory._replace(phase="noted"))._replace(kv=kv)
        return _logged(session, Entry("note", memory.request, by=said))

    def _commit(
        self, shared: Shared, session: Session, w: int, memory: Memory
    ) -> Iterator[tuple[Label, Session]]:
        log, request, has = session.log, memory.request, self.rules.has
        has_all = not self.rules.without
        is_fenced = last_out(log) != memory.known
        if is_fenced and has("results are fenced"):
            yield from self._fenced(shared, session, w)
            return
        first = self._first(log, memory) if has("a known id is not carried out again") else None
        kind, history = self.kind(request), memory.history
        fails = memory.fails or (first is None and history == DIVERGED and kind not in "FC")
        if kind in "FC" and first is None:
            after: History = ()
        elif fails or first is not None:
            after = history
        else:
            after = (*history, (request, memory.tokens))
        entry = Entry("out", request, by=w, fence=memory.known, after=after,
                      tokens=memory.tokens, repeats=first is not None, fails=fails,
                      life=0 if has("a restart makes no result safe") else shared.life)  # fmt: skip
        stored = _logged(session, entry)
        now = Memory("fresh", shared.life, len(stored.log), after)
        if not has_all:
            yield ("commit", w, request), _with(stored, w, now)
            return
        others = [self._behind(one) for one in session.memory]
        yield ("commit", w, request), stored._replace(memory=_put(tuple(others), w, now))

    def _behind(self, memory: Memory | None) -> Memory | None:
        """Forget what no longer matters of a memory, as another worker has stored a result."""
        if memory is None or memory.phase in ("listed", "told", "stale") or memory.life < 0:
            return memory
        is_next = memory.phase in ("fresh", "ready") and not (
            memory.phase == "ready" and self.kind(memory.request) == "G"
        )
        publishes = memory.phase == "begun" and self._may_publish(memory)
        return memory if is_next or publishes or memory.phase == "ending" else _overtaken(memory)

    def _acked(self, session: Session, w: int) -> Session:
        """Acknowledge what was delivered to a worker."""
        log = tuple(
            one._replace(acked=True, by=frozenset()) if _holds(one, w) else one for one in session.log
        )
        return session._replace(log=log)

    def _given_back(self, session: Session, w: int) -> Session:
        """Forget a session at a worker, which returns what was delivered to it."""
        log = tuple(one._replace(by=one.by - {w}) if _holds(one, w) else one for one in session.log)
        return _with(session, w, None)._replace(log=log)

    def _erase(self, session: Session, w: int) -> Iterator[tuple[Label, Session]]:
        """Return how a worker that was away carries out a note of a forget."""
        for at, note in enumerate(session.log):
            if note.kind == "note" and w not in note.by and not at_work(session.memory[w]):
                kv = _put(session.kv, w, session.kv[w] & ~((1 << note.request) - 1))
                log = _put(session.log, at, note._replace(by=note.by | {w}))
                yield ("erase", w), _with(session, w, None)._replace(kv=kv, log=log)

    def _sweep(self, shared: Shared, session: Session) -> Iterator[tuple[Label, Session]]:
        """Return the next removal from the log: of a forgotten session, or of an answered request."""
        log, has = session.log, self.rules.has
        for at, entry in enumerate(log):
            if (
                entry.kind == "out"
                and self.kind(entry.request) == "F"
                and not (entry.is_gone or entry.repeats or entry.fails)
            ):
                yield from self._forget(session, at)
        for at, entry in enumerate(log):
            if entry.kind != "in" or entry.is_gone:
                continue
            outs = [seq for seq, one in _outs(log) if one.request == entry.request]
            if not outs and has("a request leaves the queue after its result"):
                continue
            safe = outs[0] if outs else 0
            is_old = outs and log[outs[0] - 1].life < shared.life
            by_age = is_old and not has("a restart makes no result safe")
            if by_age or not has("a removed request has a safe result"):
                safe = 0
            synced = max(session.synced, safe) if shared.num_losses else 0
            yield ("dequeue", entry.request), session._replace(log=_gone(log, at), synced=synced)

    def _forget(self, session: Session, at: int) -> Iterator[tuple[Label, Session]]:
        """Return the next removal of what is before the close whose result is at index `at`."""
        log, close = session.log, session.log[at].request
        old = [(i, one) for i, one in enumerate(log) if one.request < close and not one.is_gone]
        kinds = ("in", "out") if self.rules.has("requests are removed before results") else ("out", "in")
        for kind in kinds:
            for i, one in old:
                if one.kind == kind:
                    yield ("remove", kind, one.request), session._replace(log=_gone(log, i, by="forget"))
                    return
        if not session.is_swept:
            chunks = tuple(() if r < close else one for r, one in enumerate(session.chunks))
            yield ("remove", "chunks", close), session._replace(chunks=chunks, is_swept=True)
        if not self.rules.has("the last result stays"):
            asked = next(i for i, one in enumerate(log) if one.request == close)
            left = _gone(_gone(log, at, by="forget"), asked, by="forget")
            yield ("remove", "close", close), session._replace(log=left)


def last_out(log: tuple[Entry, ...]) -> int:
    """Return the sequence of the last result; 0 without one."""
    for seq in range(len(log), 0, -1):
        if log[seq - 1].kind == "out" and not log[seq - 1].is_gone:
            return seq
    return 0


def _outs(log: tuple[Entry, ...]) -> list[tuple[int, Entry]]:
    return [(seq, one) for seq, one in enumerate(log, 1) if one.kind == "out" and not one.is_gone]


def _queue(log: tuple[Entry, ...]) -> list[tuple[int, Entry]]:
    return [(seq, one) for seq, one in enumerate(log, 1) if one.kind == "in" and not one.is_gone]


def known_outs(log: tuple[Entry, ...], known: int) -> list[Entry]:
    """Return the results up to `known` since the last close."""
    found: list[Entry] = []
    for seq, one in _outs(log):
        if seq > known:
            break
        found = [] if found and not one.after and not one.fails and not one.repeats else found
        found.append(one)
    return found


def read(log: tuple[Entry, ...]) -> tuple[int, History]:
    """Return the sequence of the last result, and the history after it; `DIVERGED` if one before is lost."""
    before, history = 0, ()
    is_lost = False
    for seq, one in _outs(log):
        is_close = not one.after and not one.fails and not one.repeats
        is_lost = (is_lost or one.fence != before) and not is_close
        before, history = seq, one.after
    return before, DIVERGED if is_lost else history


def _pending(log: tuple[Entry, ...], listed: Any, known: int) -> int | None:
    """Return the sequence of the first listed request without a result up to `known`."""
    answered = {one.request for seq, one in _outs(log) if seq <= known}
    return next((seq for seq in listed if log[seq - 1].request not in answered), None)


def has_unanswered(log: tuple[Entry, ...]) -> bool:
    """Whether the queue has a request without a result."""
    answered = {one.request for _, one in _outs(log)}
    return any(one.request not in answered for _, one in _queue(log))


def at_work(memory: Memory | None) -> bool:
    """Whether a worker has something to do for a session."""
    return memory is not None and memory.phase != "idle"


def _beliefs(shared: Shared) -> list[tuple[list[int], set[int]]]:
    """Return what a worker may believe: which ones serve, and which of them drain."""
    sure = [[w] if one.status == UP else [] for w, one in enumerate(shared.workers) if not one.is_unsure]
    unsure = [w for w, one in enumerate(shared.workers) if one.is_unsure]
    drained = {w for w, one in enumerate(shared.workers) if one.drains}
    settled = [w for some in sure for w in some]
    found = []
    for mask in range(1 << len(unsure)):
        some = [w for i, w in enumerate(unsure) if mask >> i & 1]
        found.append((sorted(settled + some), drained))
    return found


def _overtaken(memory: Memory | None) -> Memory | None:
    """Return a memory whose next step is fenced, without what no longer matters of it."""
    if memory is None or (memory.phase == "rung" and memory.life < 0):
        return memory
    return Memory("idle", 0, -1) if memory.phase == "idle" else Memory("stale")


def _holds(entry: Entry, w: int) -> bool:
    return entry.kind == "in" and not entry.is_gone and w in entry.by


def _with(session: Session, w: int, memory: Memory | None) -> Session:
    return session._replace(memory=_put(session.memory, w, memory))


def _logged(session: Session, entry: Entry) -> Session:
    return session._replace(log=(*session.log, entry))


def _gone(log: tuple[Entry, ...], at: int, *, by: str = "") -> tuple[Entry, ...]:
    return _put(log, at, Entry(log[at].kind, log[at].request, is_gone=True, by=by or None))


def _put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
