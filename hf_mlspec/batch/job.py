"""How does a batch come to its end? Workers take pieces of the input, one folder keeps what they answer.

At least once: what a lost worker had is answered by another one, and a file is written whole or not at all, so that
nothing is lost and nothing is there twice. Requests of several pieces are decoded side by side.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .folder import OutputFolder
from .source import Numbered, Piece
from .worker import Worker, WorkerLost

_AT_A_TIME = 2  # pieces a worker has: slots that one leaves free at its end go to the next
_MOST_LOST = 10  # workers that one piece, or all of them without an answer in between, may cost


class Answering(Protocol):
    """A worker, wherever it is. life: how many came before it in this place."""

    life: int

    async def load(self) -> dict[str, Any]: ...
    async def answer(self, lines: list[Numbered]) -> tuple[list[dict[str, Any]], list[str]]: ...
    def replace(self) -> None: ...
    def close(self) -> None: ...


class InProcess:
    """A worker in this process; one that is lost ends the job."""

    life = 0

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def load(self) -> dict[str, Any]:
        return self.worker.load()

    async def answer(self, lines: list[Numbered]) -> tuple[list[dict[str, Any]], list[str]]:
        return await self.worker.answer(lines)

    def replace(self) -> None:
        raise ValueError("decoding has ended, see above; what is finished stays: give the same command again")

    def close(self) -> None:
        self.worker.close()


@dataclass
class Summary:
    """What became of a job. lines: of the input; failed: those without an answer, by what is said of them; before:
    lines that an earlier run had answered; lost: workers; unread: fields that no request has."""

    lines: int = 0
    before: int = 0
    failed: int = 0
    new_tokens: int = 0
    lost: int = 0
    unread: set[str] = field(default_factory=set)
    first_failures: list[str] = field(default_factory=list)


class Job:
    """Pieces, workers and a folder. told: called with every `Summary.lines` gained."""

    def __init__(self, pieces: Iterator[Piece], folder: OutputFolder, workers: Sequence[Answering],
                 told: Callable[[int], Any] = lambda lines: None) -> None:
        self.pieces, self.folder, self.workers, self.told = pieces, folder, workers, told
        self.summary = Summary()
        self._back: deque[Piece] = deque()  # what lost workers had
        self._out = 0  # pieces that workers have
        self._costs: Counter[int] = Counter()  # workers, by the piece they had
        self._fruitless = 0  # workers lost since the last answer
        self._turn = asyncio.Condition()
        self._replacing = {id(worker): asyncio.Lock() for worker in workers}
        self._ready: dict[int, int] = {}  # the life of each worker that has loaded

    async def run(self) -> Summary:
        """To the end of the input; raises what no other worker would do better."""
        lanes = [asyncio.create_task(self._lane(worker)) for worker in self.workers for _ in range(_AT_A_TIME)]
        over = asyncio.create_task(self._over())
        try:
            done, _ = await asyncio.wait([over, *lanes], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return self.summary
        finally:
            for task in (over, *lanes):
                task.cancel()
            await asyncio.gather(over, *lanes, return_exceptions=True)
            for worker in self.workers:
                worker.close()

    async def _over(self) -> None:
        """Back when all is written."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._out and not self._back and self._next() is None)

    async def _lane(self, worker: Answering) -> None:
        """One piece after the other, for ever: who waits for a piece may get one that another worker had. Only a
        worker that has loaded takes one, for it may be that no machine has room for it."""
        while True:
            async with self._turn:
                await self._turn.wait_for(self._next)
            life = worker.life
            try:
                await self._loaded(worker)
            except WorkerLost as error:
                await self._replaced(worker, life, None, error)
                continue
            piece, life = await self._take(), worker.life
            if self._ready[id(worker)] != life:  # lost while this waited for a piece
                await self._put_down(piece)
                continue
            try:
                self._keep(piece, *await worker.answer(piece.lines))
                await self._put_down(None)
            except WorkerLost as error:
                await self._put_down(piece)
                await self._replaced(worker, life, piece, error)

    async def _take(self) -> Piece:
        async with self._turn:
            await self._turn.wait_for(self._next)
            self._out += 1
            return self._back.popleft()

    def _next(self) -> Piece | None:
        """The first piece that nobody has; those that an earlier run finished are counted on the way."""
        while not self._back:
            piece = next(self.pieces, None)
            if piece is None:
                return None
            counts = self.folder.finished(piece.index)
            if counts is None:
                self._back.append(piece)
            else:
                self.summary.before += len(piece.lines)
                self._count(len(piece.lines), counts)
        return self._back[0]

    async def _put_down(self, piece: Piece | None) -> None:
        """A piece that was taken is over, None, or to be answered by another worker."""
        async with self._turn:
            self._out -= 1
            if piece is not None:
                self._back.appendleft(piece)
            self._turn.notify_all()

    async def _loaded(self, worker: Answering) -> None:
        """Once for every life."""
        async with self._replacing[id(worker)]:
            if self._ready.get(id(worker)) != worker.life:
                self.folder.require_same(await worker.load())
                self._ready[id(worker)] = worker.life

    async def _replaced(self, worker: Answering, life: int, piece: Piece | None, error: WorkerLost) -> None:
        """Another worker in the place of one that was lost, however many pieces it had."""
        async with self._replacing[id(worker)]:
            if worker.life == life:
                worker.replace()
                self.summary.lost += 1
                self._fruitless += 1
        if piece is not None:
            self._costs[piece.index] += 1
        lost = max(self._costs[piece.index] if piece else 0, self._fruitless)
        if lost > _MOST_LOST:
            what = f"with lines {piece.lines[0][0]} to {piece.lines[-1][0]} of the input" if piece else "loading"
            raise ValueError(f"{lost} workers were lost {what}, the last said: {error}; is there memory enough? What "
                             "is finished stays")

    def _keep(self, piece: Piece, answers: list[dict[str, Any]], unread: list[str]) -> None:
        bad = [answer for answer in answers if answer["error"] is not None]
        counts = {"failed": len(bad), "new_tokens": sum(map(_new_tokens, answers))}
        self.folder.write(piece.index, answers, counts)
        self._fruitless = 0
        self.summary.unread |= set(unread)
        self.summary.first_failures += [f"line {one['line']}: {one['error']['message']}" for one in bad]
        self._count(len(answers), counts)

    def _count(self, lines: int, counts: dict[str, int]) -> None:
        self.summary.lines += lines
        self.summary.failed += counts["failed"]
        self.summary.new_tokens += counts["new_tokens"]
        self.told(lines)


def _new_tokens(answer: dict[str, Any]) -> int:
    body = (answer["response"] or {}).get("body", {})
    return body.get("usage", {}).get("completion_tokens", 0)
