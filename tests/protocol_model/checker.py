"""Explores all states of the model, checks its invariants, and finds the steps that lead to a violation."""

from __future__ import annotations

from collections import deque
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Final

from .model import DEAD, DIVERGED, UP, Model, Rules, Session, Shared, Worker, at_work, has_unanswered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .model import Entry, Label

FAULTS: Final = {"crash", "pause", "lose", "drain", "undrain"}
#: Steps by which workers come back: a request is answered without them, while one worker runs.
BACK: Final = {"resume", "restart"}


class ViolationError(Exception):
    """An invariant does not hold; `trace` has the steps that lead there."""

    def __init__(self, what: str, trace: Sequence[Label] = ()) -> None:
        super().__init__(what)
        self.what, self.trace = what, list(trace)


class Exploration:
    """All reachable states of sessions with these programs, by number. `explore` finds them."""

    def __init__(self, rules: Rules, programs: Sequence[str]) -> None:
        self.models = [Model(rules, program) for program in programs]
        self.rules = rules
        self.states: list[tuple[int, ...]] = []  # numbers of the shared state and of each session
        self.shared: list[Shared] = []
        self.sessions: list[Session] = []
        self.num_steps = 0
        self._numbers: dict[Any, int] = {}
        self._parts: dict[Any, int] = {}
        self._found: dict[Any, Any] = {}  # the steps from a part that many states have
        self._parents: list[tuple[int, Label]] = []
        self._back: list[list[int]] = []  # by state: those from which a step leads there, without faults
        self._is_back: list[list[int]] = []  # the same for steps of `BACK`
        self._rests: list[int] = []

    def explore(self, *, deep_first: bool = False) -> None:
        """Find all states; raise `ViolationError` at the first one that breaks an invariant.

        Its trace is a shortest one, unless states are explored `deep_first`, which finds one sooner.
        """
        rules = self.rules
        shared = Shared((Worker(),) * rules.num_workers, rules.num_faults, rules.num_losses, rules.num_drains)
        begun = [self._part(model.begin(), self.sessions) for model in self.models]
        self._add((self._part(shared, self.shared), *begun), (-1, ()))
        waiting = deque([0])
        while waiting:
            known = len(self.states)
            self._expand(waiting.pop() if deep_first else waiting.popleft())
            waiting.extend(range(known, len(self.states)))
        self._check_liveness()

    def _add(self, state: tuple[int, ...], parent: tuple[int, Label]) -> int:
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self._parents.append(parent)
            self._back.append([])
            self._is_back.append([])
        return number

    def _part(self, part: Any, parts: list[Any]) -> int:
        number = self._parts.setdefault(part, len(parts))
        if number == len(parts):
            parts.append(part)
        return number

    def _steps(self, state: tuple[int, ...]) -> Iterator[tuple[Label, tuple[int, ...]]]:
        """Return the steps from a state. Many states have a part in common, whose steps are found once."""
        shared_at, *sessions = state
        for label, new in self._shared_steps(shared_at):
            followed = [self._followed(i, label, new, one) for i, one in enumerate(sessions)]
            for after in product(*followed):
                yield label, (new, *after)
        for i, one in enumerate(sessions):
            for label, changed in self._session_steps(i, shared_at, one):
                yield label, (shared_at, *sessions[:i], changed, *sessions[i + 1 :])

    def _shared_steps(self, at: int) -> list[tuple[Label, int]]:
        if at not in self._found:
            steps = self.models[0].shared_steps(self.shared[at])
            self._found[at] = [(label, self._part(new, self.shared)) for label, new in steps]
        found: list[tuple[Label, int]] = self._found[at]
        return found

    def _followed(self, i: int, label: Label, at: int, session: int) -> list[int]:
        key = i, label, self._seen(at), session
        if key not in self._found:
            steps = self.models[i].follow(label, self.shared[at], self.sessions[session])
            self._found[key] = [self._part(after, self.sessions) for after in steps]
        found: list[int] = self._found[key]
        return found

    def _session_steps(self, i: int, at: int, session: int) -> list[tuple[Label, int]]:
        key = i, self._seen(at), session
        if key not in self._found:
            steps = self.models[i].steps(self.shared[at], self.sessions[session])
            self._found[key] = [((*label, i), self._part(after, self.sessions)) for label, after in steps]
        found: list[tuple[Label, int]] = self._found[key]
        return found

    def _seen(self, at: int) -> int:
        """Return a number of what steps of sessions depend on: all of it but the faults and drains left."""
        shared = self.shared[at]
        return self._parts.setdefault((shared.workers, shared.life, shared.num_losses), at)

    def _expand(self, at: int) -> None:
        state = self.states[at]
        is_rest = True
        for label, new in self._steps(state):
            self.num_steps += 1
            number = self._add(new, (at, label))
            for model, before, after in zip(self.models, state[1:], new[1:], strict=True):
                if before != after or label[0] == "deliver":
                    sessions = self.sessions[before], self.sessions[after]
                    if wrong := check_step(model, self.shared[new[0]], label, *sessions):
                        raise ViolationError(wrong, [*self.trace(at), label])
            if number != at and label[0] not in FAULTS:
                (self._is_back if label[0] in BACK else self._back)[number].append(at)
                is_rest = False
        if is_rest:
            self._rests.append(at)
            for model, one in zip(self.models, state[1:], strict=True):
                if wrong := check_rest(model, self.sessions[one]):
                    raise ViolationError(f"at rest {wrong}", self.trace(at))

    def _check_liveness(self) -> None:
        reached = self._reach(self._rests, [self._back, self._is_back])
        self._require(reached, "requests or traces stay for ever", lambda _: True)
        answered = [at for at in range(len(self.states)) if self._is_answered(at)]
        reached = self._reach(answered, [self._back])
        runs = [any(one.status == UP for one in shared.workers) for shared in self.shared]
        self._require(
            reached, "a request waits for a worker to come back", lambda at: runs[self.states[at][0]]
        )

    def _is_answered(self, at: int) -> bool:
        for model, number in zip(self.models, self.states[at][1:], strict=True):
            log = self.sessions[number].log
            if has_unanswered(log) or sum(one.kind == "in" for one in log) < len(model.program):
                return False
        return True

    def _reach(self, goals: Sequence[int], backs: Sequence[list[list[int]]]) -> bytearray:
        reached = bytearray(len(self.states))
        queue = [*goals]
        for at in goals:
            reached[at] = 1
        while queue:
            at = queue.pop()
            for before in chain.from_iterable(back[at] for back in backs):
                if not reached[before]:
                    reached[before] = 1
                    queue.append(before)
        return reached

    def _require(self, reached: bytearray, what: str, where: Any) -> None:
        for at, is_reached in enumerate(reached):
            if not is_reached and where(at):
                raise ViolationError(what, self.trace(at))

    def trace(self, at: int) -> list[Label]:
        """Return the steps by which a state was first reached."""
        found = []
        while self._parents[at][0] >= 0:
            at, label = self._parents[at]
            found.append(label)
        return found[::-1]


def check_step(model: Model, shared: Shared, label: Label, before: Session, after: Session) -> str:
    """Return which invariant of a session a step breaks; empty if none."""
    if label[0] == "commit":
        return _check_result(model, before.log, after)
    if label[0] == "chunk":
        return _check_chunk(after, label[1], label[2])
    if label[0] in ("lose", "dequeue"):
        return _check_asked(after)
    num_busy = sum(map(at_work, after.memory)) if label[0] == "deliver" else 0
    is_calm = not shared.life and shared.num_faults == model.rules.num_faults
    if num_busy > 1 and is_calm and not model.rules.routes_freely:
        return "two workers are at work on a session"
    return ""


def _check_result(model: Model, log: tuple[Entry, ...], after: Session) -> str:
    new = after.log[-1]
    r, name = new.request, f"the result of request {new.request}"
    outs = [one for one in log if one.kind == "out" and not one.is_gone]
    if any(one.request == r for one in outs):
        return f"request {r} has two results"
    if not any(one.kind == "in" and one.request == r for one in log):
        return f"request {r} was never asked"
    if any(model.kind(one.request) == "F" and one.request > r and not one.fails for one in outs):
        return f"{name} is of a forgotten session"
    firsts = [one for one in outs if model.id_of(one.request) == model.id_of(r) and not one.repeats]
    since = max((one.request for one in outs if model.kind(one.request) == "F"), default=-1)
    if not new.repeats and any(one.request > since for one in firsts):
        return f"{name} is not the first of its id"
    last = outs[-1].after if outs else ()
    base = new.after[:-1] if len(new.after) and new.after[-1][0] == r else new.after
    is_close = model.kind(r) == "F" and not new.repeats
    if not is_close and DIVERGED not in (last, new.after) and base != last:
        return f"{name} was made from {base}, the log has {last}"
    waiting = [one.request for one in log if one.kind == "in" and not one.is_gone]
    answered = {one.request for one in outs}
    if any(one < r and one not in answered for one in waiting):
        return f"{name} comes before that of an earlier request"
    return _check_told(after, new)


def _check_told(session: Session, result: Entry) -> str:
    told = tuple(one.by for one in session.chunks[result.request] if one.base is not None)
    if not result.repeats and told != result.tokens[: len(told)]:
        return f"request {result.request} has the tokens {result.tokens}, and published {told}"
    return ""


def _check_chunk(after: Session, w: int, request: int) -> str:
    for one in after.log:
        is_its = one.kind == "out" and one.request == request and not one.is_gone
        if is_its and (wrong := _check_told(after, one)):
            return wrong
    memory = after.memory[w]
    seq = memory.seq if memory else 0
    is_there = 0 < seq <= len(after.log) and not after.log[seq - 1].is_gone
    outs = [one for one in after.log if one.kind == "out" and not one.is_gone]
    last = outs[-1].after if outs else ()
    base = after.chunks[request][-1].base
    answered = any(one.request == request for one in outs)
    if is_there and not answered and base not in (last, DIVERGED):
        return f"a chunk of request {request} is for {base}, the log has {last}"
    return ""


def _check_asked(session: Session) -> str:
    """Check that each request that was asked is in the queue, or has a result, or was forgotten."""
    told = [one for one in session.log if one.kind in ("in", "out")]
    known = {one.request for one in told if not one.is_gone or one.by == "forget"}
    for one in told:
        if one.request not in known:
            return f"request {one.request} is in neither queue nor results"
    return ""


def check_rest(model: Model, session: Session) -> str:
    """Return what is wrong with a session where nothing happens any more; empty if nothing is."""
    log = session.log
    if has_unanswered(log):
        return "a request has no result"
    if wrong := _check_asked(session):
        return wrong
    closes = [one.request for one in log if one.kind == "out" and model.kind(one.request) == "F"
              and not one.is_gone and not one.repeats]  # fmt: skip
    for close in closes:
        if any(one.request < close and not one.is_gone and one.kind != "note" for one in log):
            return "the log has entries of a forgotten session"
        if any(session.chunks[:close]):
            return "chunks of a forgotten session are left"
        if any(bits & ((1 << close) - 1) for bits in session.kv):
            return "a disk has KV of a forgotten session"
    return ""


__all__ = ["DEAD", "Exploration", "ViolationError", "check_rest", "check_step"]
