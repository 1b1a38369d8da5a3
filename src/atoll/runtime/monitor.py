"""The monitor, which receives the heartbeats of all ranks and sends the first error of one rank to all.

It runs in one process: the parent of local ranks, or rank 0. Each rank keeps one connection to it and reports its state
a few times a second (`atoll.runtime.verdict`). If the run has ended, it answers with the reason: the first reported
error, a rank whose process has died, or a verdict on the rank that keeps the others waiting.

The rendezvous store of torch.distributed cannot do this, because a call to it has no time limit: a rank that is cut off
from its host would wait in it forever. Here every read has a limit, on both sides.

[Note: who may speak] The monitor sends a random challenge to each client, and accepts only clients that answer it with
the run's secret (HMAC-SHA-256). Messages are JSON, bounded in length, and never unpickled. They are not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from atoll.base.documents import parse_json
from atoll.runtime.page import View, own_page, read_page, status_of
from atoll.runtime.verdict import LONGEST_SECONDS, OUTSIDE, SHORTEST_SECONDS, SILENT_SECONDS, RankState, judge, named

BEAT_SECONDS = 0.25
"""Seconds between two heartbeats of a rank, in worlds of up to `CROWD` ranks; larger ones send as many in total."""
CROWD = 256
LINE_BYTES = 1 << 18
"""Maximum length of a line, in bytes."""
ANSWER_SECONDS = 5.0
"""Time limit for a client to answer the challenge, and for every read of an answer."""
STRANGERS = 64
"""Maximum number of connections that have not answered the challenge; further ones are closed immediately."""
GONE_SECONDS = 1.0
"""Seconds for a rank to reconnect, or for its cause to be reported, after a connection ends without a last word. It has
one if its process closes it: "bye" at the end of the run, "again" to reconnect to a monitor that is slow to answer."""
STACK_SECONDS = 1.0
"""Time limit for a blamed rank to send its stack."""

KEY = "failure"
"""Key of the report that ends the run. Refusals that all ranks agree on have other keys and end nothing."""

Words = dict[str, Any]
"""A JSON object."""


def proof(secret: str, challenge: str, rank: int) -> str:
    """Return the answer to a challenge."""
    return hmac.new(secret.encode(), f"{challenge} {rank}".encode(), "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a monitor, and its secret."""

    host: str
    port: int
    secret: str

    def dump(self) -> str:
        """Return the address as one word, for an environment variable or a store."""
        return f"{self.secret}@{self.host}:{self.port}"

    @staticmethod
    def parse(word: str) -> Address:
        """Parse the output of `dump`. Raises ValueError for any other text."""
        secret, _, place = word.partition("@")
        host, _, port = place.rpartition(":")
        return Address(host, int(port), secret)


class Monitor:
    """Accepts connections until it is closed.

    limit: seconds of silence, or of waiting, after which a rank is blamed; None: derived from measured durations.
    clock, sleep: how it measures time and waits; they do not limit reads from a connection.
    """

    def __init__(
        self,
        world: int,
        *,
        host: str,
        limit: float | None,
        secret: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
        self.address = Address(host, self._listener.getsockname()[1], secret or secrets.token_hex(16))
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        now = clock()
        self._states = {
            rank: RankState("its start", waits_for=(), host="", pid=0, heard=now, since=now) for rank in range(world)
        }
        self._marks: dict[int, object] = {}
        self._left: dict[int, float] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._missed: set[asyncio.Task[None]] = set()
        self._reports: dict[str, Words] = {}
        self._stacks: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._unseen: dict[int, RankState] = {}
        self._seen: dict[int, tuple[str, str]] = {}
        self._views: dict[int, tuple[int, View]] = {}
        self._strangers = 0
        self._over = asyncio.Event()
        self._serves: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="atoll-monitor", daemon=True)
        self._thread.start()
        self._loop = self._serves.get()

    # ---- called by the process that hosts it

    @property
    def failure(self) -> Words | None:
        """Error that ended the run, or None."""
        return self._reports.get(KEY)

    def report(self, report: Words, key: str = KEY) -> None:
        """Take a report from this process."""
        self._reports.setdefault(key, report)

    def close(self) -> None:
        """Stop listening. Ranks that are still connected are no longer watched."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(timeout=2.0)

    # ---- the thread

    async def _serve(self) -> None:
        self._serves.put(asyncio.get_running_loop())
        server = await asyncio.start_server(self._meet, sock=self._listener, limit=LINE_BYTES)
        judging = asyncio.create_task(self._judge())
        await self._over.wait()
        judging.cancel()
        server.close()
        for writer in self._writers.values():
            _write(writer, {"closed": True})
        await asyncio.sleep(0)
        for writer in self._open.values():
            writer.close()
        if self._open:
            await asyncio.wait(list(self._open), timeout=1.0)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None, "streams are served in tasks"
        self._open[task] = writer
        try:
            await self._serve_one(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            del self._open[task]

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= STRANGERS:
            return
        rank: int | None = None
        self._strangers += 1
        try:
            rank = await self._recognise(reader, writer)
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            self._strangers -= 1
        if rank is None:
            return
        self._writers[rank] = writer
        words: Words = {}
        try:
            while not words.keys() & {"bye", "again"}:
                words = read_words(await reader.readline())
                _write(writer, self.answer(rank, words))
                await writer.drain()
        except (OSError, ValueError):
            pass
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
                if "bye" in words:
                    self._states.pop(rank, None)
                    self._left[rank] = self._clock()
                elif "again" not in words:
                    missed = asyncio.create_task(self._miss(rank))
                    self._missed.add(missed)
                    missed.add_done_callback(self._missed.discard)

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        challenge = secrets.token_hex(16)
        _write(writer, {"challenge": challenge})
        words = read_words(await asyncio.wait_for(reader.readline(), ANSWER_SECONDS))
        rank, said = words.get("rank"), words.get("proof")
        if not isinstance(rank, int) or not isinstance(said, str) or rank not in self._states:
            return None
        if not hmac.compare_digest(said.encode(), proof(self.address.secret, challenge, rank).encode()):
            return None
        _write(writer, {"welcome": [*process_of_this(), own_page().descriptor]})
        return rank

    def answer(self, rank: int, words: Words) -> Words:
        """Handle the message of a rank and return the answer. Raises ValueError for an invalid message."""
        try:
            if "beat" in words:
                self._hear(rank, words["beat"])
            elif "report" in words:
                self._take(rank, words["report"], key=str(words.get("key", KEY)))
            elif "stack" in words:
                self._stacks[rank] = str(words["stack"])
            elif "seen" in words:
                self._see(rank, words["seen"])
        except (LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"not what a rank says: {error}") from error
        found = self._reports.get(str(words.get("key", KEY)))
        wants_stack = rank in self._wanted - set(self._stacks)
        looks_at = [[other, state.pid, state.page] for other, state in self._unseen_by(rank).items()]
        return {
            "found": found,
            "failure": self.failure,
            "wants_stack": wants_stack,
            "looks_at": looks_at,
            "left": sorted(self._left),
        }

    def _unseen_by(self, rank: int) -> dict[int, RankState]:
        """Return the silent ranks on the machine of `rank` that no rank has inspected."""
        host = self._states[rank].host if rank in self._states else ""
        return {
            other: state
            for other, state in self._unseen.items()
            if other not in self._seen and other != rank and state.host == host
        }

    def _see(self, rank: int, seen: list[Any]) -> None:
        """Store what a rank observed of others on its machine."""
        for other, doing, status in seen:
            if other in self._unseen_by(rank):
                self._seen[other] = str(doing), str(status)

    def _take(self, rank: int, report: Words, key: str) -> None:
        words = {"exit_code": int(report["exit_code"]), "message": str(report["message"])}
        self._reports.setdefault(key, {**report, **words, "rank": rank})

    def _hear(self, rank: int, beat: Words) -> None:
        now = self._clock()
        before = self._states.get(rank)
        said = str(beat["doing"]), tuple(int(peer) for peer in beat["waits_for"])
        mark = (*said, beat["mark"])
        since = before.since if before is not None and self._marks.get(rank) == mark else now
        self._marks[rank] = mark
        patience = min(LONGEST_SECONDS, max(SHORTEST_SECONDS, float(beat["patience"])))
        self._states[rank] = RankState(
            *said,
            host=str(beat["host"]),
            pid=int(beat["pid"]),
            heard=now,
            since=since,
            patience=patience,
            page=int(beat["page"]),
            program=int(beat["program"]),
            at=int(beat["at"]),
        )
        self._open_page(rank, self._states[rank])
        self._part(rank, self._states[rank])

    def _open_page(self, rank: int, state: RankState) -> None:
        """Open the page of a process of this machine now: it cannot be opened once the process has ended."""
        known = self._views.get(rank)
        if state.host == process_of_this()[0] and (known is None or known[0] != state.pid):
            with contextlib.suppress(OSError):
                self._views[rank] = state.pid, View(state.pid, state.page)

    def place_of(self, rank: int) -> str:
        """Return the last known position of a rank."""
        seen = self._views[rank][1].read() if rank in self._views else ""
        return seen or (self._states[rank].doing if rank in self._states else "")

    async def _miss(self, rank: int) -> None:
        """Blame a rank whose connection ended without a goodbye, unless it reconnects."""
        await self._sleep(GONE_SECONDS)
        state = self._states.get(rank)
        if state is None or rank in self._writers or self._over.is_set():
            return
        message = (
            f"rank {rank} is gone: its process ended in {self.place_of(rank)} without a word. Its launcher may know "
            "why; a process that nobody killed may have run out of memory"
        )
        self.report({"rank": rank, "exit_code": 1, "message": message, "speaker": self._speaker((rank,))})

    def _part(self, rank: int, state: RankState) -> None:
        """Blame a rank that exited in order, as with `sys.exit` between two steps, while `rank` waits for it."""
        gone = [peer for peer in state.waits_for if state.heard - self._left.get(peer, state.heard) > GONE_SECONDS / 2]
        if gone and state.doing != OUTSIDE:
            message = (
                f"{named(gone)} left the run while rank {rank} waits for it in {state.doing}: its program ended, as by "
                "sys.exit. All ranks leave behind the same step"
            )
            self.report({"rank": gone[0], "exit_code": 1, "message": message, "speaker": self._speaker((gone[0],))})

    def _speaker(self, blamed: tuple[int, ...]) -> int | None:
        """Return the rank that prints why the run ended: the first one that is alive and not to blame."""
        now = self._clock()
        living = [
            rank for rank, state in self._states.items() if rank in self._writers and now - state.heard < SILENT_SECONDS
        ]
        return min([rank for rank in living if rank not in blamed] or living, default=None)

    def _has_neighbour(self, rank: int) -> bool:
        """Return True if a rank of the same machine still sends heartbeats."""
        host = self._unseen[rank].host
        return any(
            other in self._writers and other not in self._unseen and state.host == host
            for other, state in self._states.items()
        )

    async def _judge(self) -> None:
        """Find a late rank, request its stack, and report the verdict."""
        while self.failure is None:
            before = self._clock()
            await self._sleep(BEAT_SECONDS)
            states, now = dict(self._states), self._clock()
            if now - before > SILENT_SECONDS:  # this process was late itself: first it reads what it has not heard
                await self._sleep(SILENT_SECONDS)
                continue
            found = judge(states, now, self._limit)
            if found is None:
                continue
            silent = {rank for rank in found.ranks if now - states[rank].heard > SILENT_SECONDS}
            self._wanted = {rank for rank in found.ranks if rank in self._writers} - silent
            self._unseen = {rank: states[rank] for rank in silent if states[rank].host}
            own = process_of_this()[0]
            for rank, state in self._unseen.items():
                if state.host == own:
                    self._seen[rank] = self.place_of(rank), status_of(state.pid)
            for _ in range(10):
                awaited = {rank for rank in self._unseen if rank not in self._seen and self._has_neighbour(rank)}
                if self._wanted <= set(self._stacks) and not awaited:
                    break
                await self._sleep(STACK_SECONDS / 10)
            for rank, (doing, status) in self._seen.items():
                states[rank] = replace(states[rank], doing=doing or states[rank].doing, status=status)
            found = judge(states, now, self._limit) or found  # the same, with the result of the inspection
            stacks = [f"\nrank {rank}:\n{self._stacks[rank]}" for rank in found.ranks if rank in self._stacks]
            self.report(
                {
                    "rank": found.ranks[0],
                    "exit_code": 1,
                    "message": found.message + "".join(stacks),
                    "speaker": self._speaker(found.ranks),
                    # Ranks that are still connected receive this and exit; one of them may have to print it.
                    "ends": [[states[rank].host, states[rank].pid] for rank in found.ranks if rank in silent],
                }
            )


@cache
def process_of_this() -> tuple[str, int]:
    """Return what identifies this process on its machine: the boot, the namespace of process numbers, and its
    number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: other processes cannot identify this one
        return f"{socket.gethostname()} {secrets.token_hex(8)}", os.getpid()
    return f"{boot} {space}", os.getpid()


def look(process: int, page: int) -> tuple[str, str]:
    """Return the position of a silent process of this machine, and its status."""
    return read_page(process, page), status_of(process)


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _write(writer: asyncio.StreamWriter, words: Words) -> None:
    writer.write(json.dumps(words).encode() + b"\n")


def read_words(line: bytes) -> Words:
    """Read a JSON object on a line. Raises ValueError for anything else, and at the end of the connection."""
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended")
    words = parse_json(line)
    if not isinstance(words, dict):
        raise ValueError("no JSON object")
    return words
