"""Are all tokens right while threads and streams share models for hours, and does anything grow?

    python -m eval.soak --minutes 120 --log soak.jsonl     # goes on until the time is over; SIGTERM ends it before
    python -m eval.soak --table soak.jsonl                 # what a log says, also while it is being written

Eight threads ask four models, the demo pair among them, by `generate` and by `generate_stream`, alone, in batches,
greedy and sampled with a seed, with levels of their own choice; requests of streams come one by one and some are
cancelled. A ninth thread prepares, restores and clears the models and makes levels of them meanwhile. Every answer is
compared with what the target alone wrote in the beginning. Between two phases, when no call runs, the models are
restored and cleared, memory, threads, file handles and captured graphs are counted, and after every fourth one of the
models is nested, or plain again. Exit status 1 for a wrong token or an error.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eval.own_costs import own_costs

_COUNTED = ("calls", "requests", "tokens", "cancelled", "changes")
_WARM = 0.1  # of the time: what is made once is there behind it


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="of traffic (%(default)s)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="a line of JSON for each phase goes here")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show what this log says, and nothing else")
    parser.add_argument("--threads", type=int, default=8, help="that ask (%(default)s)")
    parser.add_argument("--calls", type=int, default=12, help="of each thread in a phase (%(default)s)")
    parser.add_argument("--torch-threads", type=int, default=1, help="of a call (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    args = parser.parse_args(argv)
    if min(args.threads, args.calls, args.torch_threads) < 1:
        parser.error("--threads, --calls and --torch-threads are at least 1")
    return args


def told(lines: list[dict]) -> str:
    """What the phases of a log come to. Sizes are those behind phases in which all models were plain."""
    if not lines:
        return "no phase has ended yet"
    last = lines[-1]
    late = [one for one in lines if one["seconds"] >= _WARM * last["seconds"] and not one["nested"]] or [last]
    sums = {name: sum(one[name] for one in lines) for name in _COUNTED}
    said = [f"{last['seconds'] / 60:.1f} minutes, {len(lines)} phases, "
            + ", ".join(f"{count:,} {name}" for name, count in sums.items())
            + f"; {sum(len(one['wrong']) for one in lines)} wrong"]  # fmt: skip
    for name in last["sizes"]:
        seen = [one["sizes"][name] for one in late]
        middle = sorted(seen)[len(seen) // 2]
        moves = max(max(seen) - middle, middle - min(seen)) / middle if middle else 0.0
        said.append(f"{name:12} {lines[0]['sizes'][name]:>14,} first, {seen[0]:>14,} warm, {seen[-1]:>14,} last; "
                    f"{min(seen):,} to {max(seen):,}: {100 * moves:.2f} % off the median")  # fmt: skip
    return "\n".join(said)


@contextmanager
def _quiet() -> Iterator[None]:
    """Only what the soak itself finds is told."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _ended_by(over: threading.Event) -> Iterator[None]:
    """SIGTERM sets `over`, where the process may have handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table is not None:
        print(told([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    over = threading.Event()
    with _quiet(), _ended_by(over), own_costs():
        import torch

        from .traffic import traffic

        torch.set_num_threads(args.torch_threads)
        lines = []
        for line in traffic(60 * args.minutes, args.threads, args.calls, args.seed, args.device, over):
            lines.append(line)
            if args.log is not None:
                with args.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            for wrong in line["wrong"]:
                print(f"WRONG: {wrong}", flush=True)
    print(told(lines))
    return int(any(line["wrong"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
