"""How do several processes of one machine answer lines as one worker? They share the model by tensor parallelism.

The first process has the lines, and tells the others which request comes next, each time that its stream asks: all of
them decode one stream. Where one of them ends, the worker is lost as a whole.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..evaluation.harness_system import chain_identity
from ..integration.hook import enable
from ..integration.levels.load import hide_progress_bars, load_shared_lm
from ..integration.levels.resolve import nested_for
from ..integration.stream.request import Request
from ..integration.stream.stream import stream_in_rounds
from ..serving.backend import Backend, Ticket
from .worker import PREFILL_CHUNK, Settings, Worker

_MEETING = timedelta(seconds=120)  # for all processes to be there: they import, on a busy machine
_WAITING = timedelta(days=30)  # for the next request
_ENDING = 5.0  # seconds that others have to end
_OVER = "over"


class Group:
    """Processes of this machine, of which this is number `rank`, that meet at `port`."""

    def __init__(self, rank: int, size: int, port: int, device: str) -> None:
        """ValueError where they do not meet."""
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))  # fmt: skip
        how: dict[str, Any] = {"backend": "gloo"}
        if device == "cuda":
            torch.cuda.set_device(rank)
            how = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
        try:
            dist.init_process_group(**how, timeout=_MEETING)
            self._telling = dist.new_group(backend="gloo", timeout=_WAITING)
        except RuntimeError as error:
            raise ValueError(f"{size} processes that are to share the model do not meet: {error}") from error
        self.rank, self.size = rank, size

    def tell(self, said: Any = None) -> Any:
        """What the first process says, on all of them."""
        told = [said]
        dist.broadcast_object_list(told, 0, group=self._telling)
        return told[0]

    def leave(self) -> None:
        dist.destroy_process_group()


class GroupBackend(Backend):
    """A backend whose stream is also decoded by others. tell_others: hands them what comes next. What ends a stream
    ends the backend, for others may be anywhere in it."""

    def __init__(self, *words: Any, tell_others: Callable[[Any], Any], **named: Any) -> None:
        super().__init__(*words, **named)
        self._tell_others = tell_others

    def _arriving(self) -> Iterator[Ticket | None]:
        for ticket in super()._arriving():
            self._tell_others(None if ticket is None else (ticket.input_ids, ticket.seed, ticket.logprobs,
                                                           ticket.options))  # fmt: skip
            yield ticket
        self._tell_others(_OVER)

    def _after(self, error: Exception) -> bool:
        if super()._after(error):
            self._give_up(error)
        return False


class GroupWorker(Worker):
    """A worker whose model `settings.processes` processes share: this one, and others that it starts."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._group: Group | None = None
        self._others: list[subprocess.Popen] = []

    def load(self) -> dict[str, Any]:
        asked = self.settings
        if asked.device not in ("cpu", "cuda"):
            raise ValueError(f"--tensor-parallel {asked.processes} and --device {asked.device}: each process has a "
                             "device of its own; say cpu or cuda")
        gpus = torch.cuda.device_count()
        if asked.device == "cuda" and gpus < asked.processes:
            raise ValueError(f"--tensor-parallel {asked.processes}: this machine has {gpus} GPUs, and each process "
                             "has one of its own")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(1, asked.processes):
            other = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE,
                                     stdout=subprocess.DEVNULL)  # fmt: skip
            self._others.append(other)
            other.stdin.write(pickle.dumps((asked, rank, port)))
            other.stdin.flush()  # it stays open: its end tells the other that this process is gone
        self._group = Group(0, asked.processes, port, asked.device)
        return super().load()

    def _read_model(self) -> tuple[Any, Any]:
        return load_shared_lm(self.settings.model, self.settings.dtype, self.settings.processes, self.settings.device)

    def _make_backend(self, *words: Any, **named: Any) -> Backend:
        return GroupBackend(*words, tell_others=self._group.tell, **named)

    def close(self) -> None:
        super().close()
        for other in self._others:
            with suppress(OSError):
                other.stdin.close()
            try:
                other.wait(_ENDING)
            except subprocess.TimeoutExpired:
                other.kill()
        if self._group is not None:
            self._group.leave()


def worker_of(settings: Settings) -> Worker:
    """Of one process, or of as many as the settings say."""
    return Worker(settings) if settings.processes == 1 else GroupWorker(settings)


def follow(asked: Settings, group: Group) -> None:
    """Decode what the first process is asked for, until it says that this is over."""
    enable()
    hide_progress_bars()
    model, tokenizer = load_shared_lm(asked.model, asked.dtype, asked.processes, asked.device)
    model = nested_for(model, asked.levels)
    chain_identity(model, tokenizer, asked.levels)

    def arriving() -> Iterator[Request | None]:
        while (told := group.tell()) != _OVER:
            if told is None:
                yield None
                continue
            ids, seed, logprobs, options = told
            yield Request(ids, seed=seed, logprobs=logprobs, **options)

    for _ in stream_in_rounds(model, arriving(), max_batch=asked.slots, tokenizer=tokenizer, prefix_cache=None,
                              assistant_models=asked.levels, speculation_config=asked.config,
                              prefill_chunk=PREFILL_CHUNK):  # fmt: skip
        pass


def _end_with_the_first() -> None:
    """This process has nothing to do where the one that started it is gone."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    asked, rank, port = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    try:
        follow(asked, Group(rank, asked.processes, port, asked.device))
    except Exception as error:  # which the first process raises, too, or is told
        print(f"process {rank} of {asked.processes} that share {asked.model}: {type(error).__name__}: {error}",
              file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # threads of others' libraries may wait for their peers


if __name__ == "__main__":
    main()
