"""Sends requests of every kind to workers that are killed, paused and cut off, then checks the log.

    python tests/soak/cluster.py --workers 3 --faults 300 --requests 6000 --seed 1
    python tests/soak/cluster.py --nodes 3 --share --faults 300
    python tests/soak/cluster.py --workers 2 --images 500 --faults 150

A fault is a `kill -9`, a SIGTERM or a SIGSTOP of 0.3 to 6 s of a worker, or a `kill -9` of one of the NATS
servers (one or three). With `--share` the workers share snapshots in a remote tier. With `--cuts`, which
needs root, each worker has its own network namespace, and some faults cut its network for 0.3 to 6 s, or slow
it down for up to 12 s (16 to 256 kbit/s; packets wait up to 3 s). A worker that has ended is restarted. All
counts of faults should be 0.

With `--images N` clients hold N sessions about pictures instead, with a model that names them
(`tests/taught.py`). Each answer must be the one that a worker without faults gives to the same conversation.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
from attack import SESSIONS, TENANTS, Attack, settled
from harness import Heard, Target, Verdict, arguments, folder, read_log, report, tiny_model
from parts import free_port, nats_server_program

from tests import taught
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.images import image
from turnkeep_client.log import BUILD_HEADER, words
from turnkeep_client.messages import decode_request, encode
from turnkeep_client.retrying import retry
from turnkeep_client.session import Session

OPTIONS = ("--min-free-disk", "0", "--max-disk", "256MiB")
BRIDGE = "turnkeep0"
NETWORK = "10.111.77"
#: Each is shown in several sessions.
PICTURES = [taught.picture(seed) for seed in range(120)]
#: The numbers of sessions and of answers in one story.
STORY_SESSIONS, STORY_ANSWERS = 5, 11
#: The least share of right answers without faults: a model that names no picture would show no mistake.
LEAST_RIGHT = 0.8


class Nodes:
    """One NATS server, or a cluster of several, of which any one may be killed. Each has its own files."""

    def __init__(self, where: Path, num: int, host: str) -> None:
        self._where, self._host = where, host
        self._ports = [free_port() for _ in range(num)]
        self._routes = [free_port() for _ in range(num)]
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return ",".join(f"nats://{self._host}:{port}" for port in self._ports)

    def start(self) -> None:
        self._running = [self._started(number) for number in range(len(self._ports))]

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        config = f'jetstream {{ store_dir: "{self._where}/n{number}", sync_interval: always }}\n'
        if len(self._ports) > 1:
            listen = f'listen: "127.0.0.1:{self._routes[number]}", no_advertise: true'
            config += f"server_name: n{number}\ncluster {{ name: c, {listen}, routes: [{routes}] }}\n"
        path = self._where / f"n{number}.conf"
        path.write_text(config)
        where = ("-a", self._host, "-p", str(self._ports[number]))
        with path.with_suffix(".log").open("ab") as log:
            return subprocess.Popen([nats_server_program(), "-c", str(path), *where], stderr=log)

    async def kill_one(self, rng: random.Random) -> None:
        """Kill a random NATS server, and restart it after 0, 0.3 or 2 s."""
        number = rng.randrange(len(self._ports))
        self._running[number].kill()
        self._running[number].wait()
        await asyncio.sleep(rng.choice((0, 0.3, 2)))
        self._running[number] = self._started(number)

    def stop(self) -> None:
        for one in self._running:
            one.terminate()
            one.wait()


class Member(Target):
    """A worker of the cluster. With `host`, it runs in a network namespace of its own, named after `host`."""

    def __init__(self, where: Path, number: int, model: Path, url: str, host: str, *options: str) -> None:
        super().__init__(where / f"w{number}", model, *OPTIONS, "--worker", f"w{number}", *options)
        at = self.process.command.index("--nats-port")
        self.process.command[at : at + 2] = ["--nats", url]
        self._link = f"{host}-{number}"
        if host:
            _ip("netns", "add", self._link)
            _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._link)
            _ip("link", "set", self._link, "master", BRIDGE, "up")
            _ip("-n", self._link, "address", "add", f"{NETWORK}.{number + 2}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", self._link, "link", "set", device, "up")
            self.process.command = ["ip", "netns", "exec", self._link, *self.process.command]
            self.process.forks = False

    async def cut(self, seconds: float) -> None:
        """Cut the worker's network for some seconds."""
        _ip("link", "set", self._link, "down")
        await asyncio.sleep(seconds)
        _ip("link", "set", self._link, "up")

    async def slow(self, seconds: float, kbits: int) -> None:
        """Let so many kbit/s through in each direction for so long; what waits longer than 3 s is lost."""
        ends = [(), ("-n", self._link)]
        for end, device in zip(ends, (self._link, "eth0"), strict=True):
            limit = ("tbf", "rate", f"{kbits}kbit", "burst", "4kb", "latency", "3s")
            _run("tc", *end, "qdisc", "add", "dev", device, "root", *limit)
        await asyncio.sleep(seconds)
        for end, device in zip(ends, (self._link, "eth0"), strict=True):
            _run("tc", *end, "qdisc", "delete", "dev", device, "root")

    async def pause(self, seconds: float) -> None:
        """Pause the worker's process for some seconds, by SIGSTOP and SIGCONT, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.worker_pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(self.process.worker_pid, signal.SIGCONT)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


class Campaign(Attack):
    """A run's state. `struck` counts faults by kind; `ended` has logs of workers that no fault ended.

    `others` has answers that a worker without faults would not have given.
    """

    def __init__(
        self, members: Sequence[Member], nodes: Nodes, rng: random.Random, requests: int, faults: int
    ) -> None:
        super().__init__(members[0], rng, requests, faults, 0)
        self.members, self.nodes = members, nodes
        self.struck: Counter[str] = Counter()
        self.ended: list[str] = []
        self.others: list[str] = []
        self.moves = 0

    async def strike(self, kinds: Sequence[str]) -> None:
        """Inject faults of random kinds into random workers, spread over the run; restart ended workers."""
        rng = self.rng
        while self.kills < self.num_kills:
            await asyncio.sleep(rng.uniform(0, 2.0))
            while self.sent < self.num_requests * self.kills / (self.num_kills + 1):  # noqa: ASYNC110 - senders count it
                await asyncio.sleep(0.01)
            member, kind = rng.choice(self.members), rng.choice(kinds)
            match kind:
                case "kill":
                    member.process.kill()
                    await asyncio.sleep(rng.choice((0, 0.2, 2)))
                case "stop":
                    await asyncio.to_thread(member.process.stop)
                case "pause":
                    await member.pause(rng.choice((0.3, 3, 6)))
                case "cut":
                    await member.cut(rng.choice((0.3, 3, 6)))
                case "slow":
                    await member.slow(rng.choice((1, 4, 12)), rng.choice((16, 64, 256)))
                case "node":
                    await self.nodes.kill_one(rng)
            self.struck[kind] += 1
            self.kills += 1
            for one in self.members:
                if not one.process.running:
                    if one is not member:
                        self.ended.append(one.process.log[-600:])
                    one.start()
            if self.kills % 20 == 0:
                print(f"{dict(self.struck)}, {self.sent} sent", flush=True)


def shown(story: int) -> list[taught.Picture]:
    """Return the two pictures of a story."""
    return random.Random(story).sample(PICTURES, 2)


def truths(story: int) -> list[str]:
    """Return the answers of a story that are right."""
    one, two = (picture.answer for picture in shown(story))
    return [one, two, one, one, two, one, two, two, two, taught.NO_PICTURE, two]


class Stories(Campaign):
    """A campaign with stories: each shows two pictures in `STORY_SESSIONS` sessions of one tenant.

    `expected` has the answers of each story from a worker without faults.
    """

    def __init__(
        self, members: Sequence[Member], nodes: Nodes, rng: random.Random, num: int, faults: int
    ) -> None:
        super().__init__(members, nodes, rng, num * STORY_ANSWERS, faults)
        self.left = [*range(num)]
        self.expected: dict[int, list[str]] = {}

    async def rehearse(self, target: Target) -> None:
        """Play all stories on a worker without faults; raise `ValueError` if it names too few pictures."""
        target.start()
        try:
            await target.ready()
            async with connect(target.url) as client:
                expected = {number: await self.play(number, client) for number in self.left}
        finally:
            target.stop()
        right = [sum(map(str.__eq__, expected[number], truths(number))) for number in self.left]
        print(f"{sum(right)} of {self.num_requests} answers name the picture", flush=True)
        if sum(right) < LEAST_RIGHT * self.num_requests:
            raise ValueError("a model that names so few pictures does not show mistakes")
        self.expected, self.sent = expected, 0
        self.acked.clear()

    async def send(self, sender: int, heard: Heard, client: Client, names: list[str]) -> None:
        """Play stories until none is left; half of the senders publish on a raw connection."""
        while self.left:
            number = self.left.pop()
            try:
                said = await self.play(number, client, heard if sender % 2 == 0 else None)
            except TurnkeepError as error:
                self.client_faults.append(f"story {number} of {client.tenant}: {error!r}")
                self.sent += STORY_ANSWERS  # so that the faults go on
                continue
            if said != self.expected[number]:
                self.others.append(f"story {number}: {said} instead of {self.expected[number]}")

    async def play(self, number: int, client: Client, raw: Heard | None = None) -> list[str]:
        """Play a story; return its answers.

        Sessions show the same pictures in different orders, all of one size. One is forked; one is forgotten,
        but the others still have its picture.
        """
        one, two = shown(number)
        plain, both, swapped, gone = (client.session(f"{number}-{letter}") for letter in "abcd")

        async def all_of(*asked: tuple[Session, *tuple[taught.Picture, ...]]) -> list[str]:
            return await asyncio.gather(*(self.told(raw, *each) for each in asked))

        said = await all_of((plain, one), (both, one, two), (swapped, two, one), (gone, one))
        fork = await retry(lambda: plain.fork(f"{number}-e"), attempts=10)
        said += await all_of((plain, two), (fork,))
        await retry(lambda: gone.close(forget=True), attempts=10)
        await retry(gone.open, attempts=10)
        said += await all_of((plain,), (fork, two), (both,), (gone,), (swapped, two))
        return said

    async def told(self, raw: Heard | None, session: Session, *pictures: taught.Picture) -> str:
        """Show pictures and ask what the last one is; return the answer. Waits while faults are late."""
        due = self.num_requests / (self.num_kills + 1)
        while self.expected and self.kills < self.num_kills and self.sent > due * (self.kills + 1):  # noqa: ASYNC110 - `strike` counts them
            await asyncio.sleep(0.01)
        self.sent += 1
        question, messages = {"type": "text", "text": "What is this?"}, list[dict[str, Any]]()
        for picture in pictures:
            messages.append({"role": "user", "content": [question, image(picture.file)]})
            messages.append({"role": "assistant", "content": picture.answer})
        messages = messages[:-1] or [{"role": "user", "content": [question]}]

        async def once() -> str:
            name = f"r{self.rng.getrandbits(64):x}"
            body = {"type": "generate", "id": name, "messages": messages, "max_tokens": 12}
            request = decode_request(json.dumps(body).encode())
            if raw:
                seq = await raw.publish(session.key, json.dumps(body).encode())
                answer = session.follow(request, seq)
            else:
                answer = session.generate(messages=messages, max_tokens=12, request_id=name)
            try:
                return (await answer).text
            finally:
                if answer.seq is not None:
                    self.acked[answer.seq] = session.key, encode(request)

        return await retry(once, attempts=10)


async def campaign(
    where: Path,
    *,
    workers: int,
    nodes: int,
    requests: int,
    faults: int,
    share: bool,
    cuts: bool,
    seed: int,
    images: int = 0,
) -> tuple[Campaign, Verdict]:
    """Run the whole campaign; return its record and the oracle's verdict."""
    model = taught.write(where / "taught") if images else tiny_model(where, hidden_size=128)
    servers = Nodes(where, nodes, f"{NETWORK}.1" if cuts else "127.0.0.1")
    options = ["--log-replicas", str(nodes)] + (["--remote-tier", str(where / "shared")] if share else [])
    kinds = ["kill"] * 6 + ["pause"] * 2 + ["stop", "node"] + ["cut", "slow"] * (2 if cuts else 0)
    async with contextlib.AsyncExitStack() as stack:
        if cuts:
            _ip("link", "add", BRIDGE, "type", "bridge")
            stack.callback(_ip, "link", "delete", BRIDGE)
            _ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
        servers.start()
        stack.callback(servers.stop)
        members = []
        for number in range(workers):
            if cuts:
                stack.callback(_ip, "netns", "delete", f"tk-{number}")
            one = Member(where, number, model, servers.url, "tk" if cuts else "", *options)
            stack.callback(one.stop)
            one.start()
            members.append(one)
        for one in members:
            await one.ready()
        rng = random.Random(seed)
        if images:
            run: Campaign = Stories(members, servers, rng, images // STORY_SESSIONS, faults)
            await run.rehearse(Target(where / "alone", model, *OPTIONS))
        else:
            run = Campaign(members, servers, rng, requests, faults)
        verdict = await _judged(run, servers.url, kinds, model)
    for fault in run.client_faults:
        verdict.blame("contradicting", fault)
    verdict.faults["other answers"] = 0
    for other in run.others:
        verdict.blame("other answers", other)
    return run, verdict


async def _judged(run: Campaign, url: str, kinds: Sequence[str], model: Path) -> Verdict:
    heard = await Heard.on(url)
    async with contextlib.AsyncExitStack() as clients:
        senders = []
        for number in range(8 * len(TENANTS)):
            client = await connect(url, tenant=TENANTS[number % len(TENANTS)], connect_timeout_s=30)
            await clients.enter_async_context(client)
            names = [f"s{n}" for n in range(2 * SESSIONS)]
            senders.append(partial(run.send, number // len(TENANTS), heard, client, names))
        async with anyio.create_task_group() as tasks:  # repeats a cancel that nats-py swallows
            for one in (*senders, partial(run.strike, kinds)):
                tasks.start_soon(one)
        verdict = await settled(url, run, heard, model)
        run.moves = await _moves(url)
    await heard.nc.close()
    return verdict


async def _moves(url: str) -> int:
    """Count the results that come from another worker than the session's previous result."""
    last: dict[str, str] = {}
    num = 0
    for one in await read_log(url):
        if BUILD_HEADER in one.headers:
            worker = words(one.headers[BUILD_HEADER])["worker"]
            num += last.setdefault(one.headers["Nats-Subject"], worker) != worker
            last[one.headers["Nats-Subject"]] = worker
    return num


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 3))
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--images", type=int, default=0, help="sessions about pictures, instead of requests")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    begun_s = monotonic()
    async with folder() as where:
        run, verdict = await campaign(where, **vars(given))
        good = report(
            verdict,
            *vars(given).items(),
            ("minutes", f"{(monotonic() - begun_s) / 60:.1f}"),
            ("struck", dict(run.struck)),
            ("ended by themselves", len(run.ended)),
            ("requests sent", run.sent),
            ("results of another worker than the last one", run.moves),
        )
        for log in run.ended[:3]:
            print(log)
        if not good:
            raise SystemExit(1)
    return good


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
