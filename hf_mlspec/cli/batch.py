"""How are all lines of a file answered, on as many devices and machines as there are?"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..batch.folder import OutputFolder
from ..batch.group import worker_of
from ..batch.job import InProcess, Job, Summary
from ..batch.source import Source
from ..batch.worker import Settings, asked_of
from ..integration.levels.load import require_folder
from .request import chain_config, require_nestable

_SHOWN = 5  # lines without an answer that are told of


def run_batch(args: argparse.Namespace) -> int:
    config = chain_config(args)
    require_nestable(args)
    require_folder(args.model)
    source = Source(args.input)
    template = None if args.chat_template is None else Path(args.chat_template).read_text(encoding="utf-8")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(args.model, args.dtype, device, args.levels or [], args.served_model_name or args.model,
                        slots=args.slots, new_tokens=args.max_new_tokens, chat_template=template, seed=args.seed,
                        processes=args.tensor_parallel, config=config)
    asked = asked_of(settings, source.sha256, args.lines_per_file)
    bar = tqdm(total=source.count, unit="line", desc="mlspec batch", disable=True if args.json else None)
    with OutputFolder(args.output, asked) as folder, _workers(args, settings) as workers, bar:
        summary = asyncio.run(_run(source, folder, workers, args.lines_per_file, bar))
    _say(args, summary)
    return 2 if summary.failed else 0


async def _run(source: Source, folder: OutputFolder, workers: list[Any], size: int, bar: Any) -> Summary:
    return await Job(source.pieces(size), folder, workers, bar.update).run()


@contextmanager
def _workers(args: argparse.Namespace, settings: Settings) -> Iterator[list[Any]]:
    """One in this process, or as many actors of Ray as were asked for: without a number one a GPU, else one."""
    if args.ray is None and (args.workers or 1) == 1:
        yield [InProcess(worker_of(settings))]
        return
    try:
        from ..batch.ray_workers import RayWorker, ray_cluster
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    with ray_cluster(args.ray, args.workers) as resources:
        gpus = int(resources.get("GPU", 0))
        if args.device is None:
            settings = replace(settings, device="cuda" if gpus else "cpu")
        on_gpus = settings.device.startswith("cuda")
        each = settings.processes
        count = args.workers or (max(gpus // each, 1) if on_gpus else 1)
        if on_gpus and count * each > gpus:
            has = "one" if each == 1 else str(each)
            raise ValueError(f"--workers {count}: Ray knows of {gpus} GPUs, and a worker has {has} of its own; give "
                             f"--workers {gpus // each}" + ("" if gpus >= each else ", or --device cpu"))
        cores = max(1, (os.cpu_count() or 1) // count) if args.ray is None else 1
        yield [RayWorker(settings, cores) for _ in range(count)]


def _say(args: argparse.Namespace, summary: Summary) -> None:
    told = {"lines": summary.lines, "failed": summary.failed, "before": summary.before, "lost_workers": summary.lost,
            "new_tokens": summary.new_tokens, "unread_fields": sorted(summary.unread), "output": args.output}
    for failure in summary.first_failures[:_SHOWN]:
        print(f"mlspec batch: {args.input}, {failure}", file=sys.stderr)
    if summary.unread:
        print(f"mlspec batch: fields that were not read: {', '.join(told['unread_fields'])}", file=sys.stderr)
    if args.json:
        print(json.dumps(told))
        return
    lost = f", {summary.lost} workers lost and replaced" if summary.lost else ""
    print(f"{summary.lines} lines, {summary.before} of them answered before, {summary.failed} without an answer; "
          f"{summary.new_tokens} tokens in {args.output}/part-*.jsonl{lost}")
