"""Which level lives where, and how many users does a node serve? Simulated, and compared with what was measured.

    python -m eval.simulate_gpus eval/configs/gpus_h200.toml
    python -m eval.simulate_gpus eval/configs/gpus_h200.toml --cached 4096 --each 20

Reads a file of measured costs of one GPU and of its links; one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

from .model import Chain, Node, Points, Shape, chained, fits, most_users, read_by, step, summing, told_apart


class CostsError(ValueError):
    """A file of costs that cannot be read; the message names what is wrong."""


def read(path: Path) -> tuple[Node, Chain, dict[str, Shape], list[dict[str, Any]]]:
    """Node, chain, shapes by name, and what was measured."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
        shapes = {name: Shape(**own) for name, own in told["shapes"].items()}
        cached = told["steps"]["cached"]
        fixed, paces = steps(told["steps"], shapes)
        sums = [(int(tokens), own) for tokens, own in told["links"].pop("sums").items()]
        node = Node(fixed=fixed, paces=paces, sums=sums, cached=cached, **told["gpu"], **told["links"])
        measured = told.get("measured", [])
        for one in measured:
            require_measured(one, shapes)
        return node, Chain(**told["chain"]), shapes, measured
    except OSError as error:
        raise CostsError(f"{path} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise CostsError(f"{path} has no {error}") from error
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise CostsError(f"{path}: {error}") from error


def require_measured(one: dict[str, Any], shapes: dict[str, Shape]) -> None:
    """ValueError for a measurement without what it is compared by."""
    for name, known in (("shape", sorted(shapes)), ("what", ["alone", "chain"])):
        if one.get(name) not in known:
            raise ValueError(f"{name} of a measurement is {one.get(name)!r}, known are {', '.join(known)}")
    for name in ("gpus", "rows", "ms", *(["part_ms"] if "part_ms" in one else [])):
        if not isinstance(one.get(name), int | float) or one[name] <= 0:
            raise ValueError(f"{name} of a measurement of {one['shape']} is {one.get(name)!r}, it must be above 0")


def steps(told: dict[str, Any], shapes: dict[str, Shape]) -> tuple[dict[str, Points], dict[str, Points]]:
    """What a layer takes beside its bytes, and a byte, by format and tokens; told: of a shape, the milliseconds of one
    GPU with all of it and with what each of several GPUs holds, by rows and tokens of each: "8x4" = [...].
    ValueError for steps that cannot be told apart."""
    shape, shares, cached = shapes[told.pop("shape")], told.pop("shares"), told.pop("cached")
    fixed: dict[str, Points] = {}
    paces: dict[str, Points] = {}
    for word, points in told.items():
        fixed[word], paces[word] = own = [], []
        for sizes, milliseconds in points.items():
            rows, width = map(int, sizes.split("x"))
            reads = [read_by(shape, word, rows, cached) / share for share in shares]
            found = told_apart(reads, [one / 1e3 for one in milliseconds], shape.layers)
            for line, one in zip(own, found, strict=True):
                line.append((rows * width, one))
    return fixed, paces


def compared(node: Node, chain: Chain, shapes: dict[str, Shape], measured: list[dict[str, Any]]
             ) -> Iterator[dict[str, Any]]:
    """Predicted beside measured. alone: milliseconds of a GPU's own part with nothing added up, where that was
    measured: then the second prediction adds the links to it."""
    for one in measured:
        shape, gpus, rows = shapes[one["shape"]], one["gpus"], one["rows"]
        by_chain = one["what"] == "chain"
        how = gpus, rows, *([] if by_chain else [1]), node.cached
        seconds = chained(node, shape, chain, *how) if by_chain else step(node, shape, "bf16", *how)
        found = {"kind": "compared", **one, "predicted_ms": round(1e3 * seconds, 3),
                 "off": round(1e3 * seconds / one["ms"] - 1, 3)}  # fmt: skip
        if "part_ms" in one:
            linked = one["part_ms"] + 1e3 * _links(node, shape, chain if by_chain else None, gpus, rows)
            found |= {"predicted_from_part_ms": round(linked, 3), "off_from_part": round(linked / one["ms"] - 1, 3)}
        yield found


def _links(node: Node, shape: Shape, chain: Chain | None, gpus: int, rows: int) -> float:
    if chain is None:
        return summing(node, shape, gpus, rows)
    checked = rows * (chain.casts * (chain.drafted + 1) + 1)
    return (summing(node, shape, gpus, checked)
            + chain.casts * summing(node, shape, gpus, rows * (chain.drafted + 1)))


def answers(node: Node, chain: Chain, shapes: dict[str, Shape], cached: float, each: float
            ) -> Iterator[dict[str, Any]]:
    """By shape and number of GPUs: what fits, a step, a pass of the chain, and users of a whole node."""
    for name, shape in shapes.items():
        for gpus in (1 << power for power in range(node.gpus.bit_length())):
            held = next((one for one in ("cast", "nested", "alone") if fits(node, shape, gpus, 1, cached, one)), None)
            line: dict[str, Any] = {"kind": "plan", "shape": name, "gpus": gpus, "held": held}
            if held is not None:
                line |= _alone(node, shape, gpus, cached, each)
            if held in ("cast", "nested"):
                line |= _with_levels(node, shape, chain, gpus, cached, each, held)
            yield line


def _alone(node: Node, shape: Shape, gpus: int, cached: float, each: float) -> dict[str, Any]:
    users = most_users(node, shape, None, gpus, cached, each, "alone")
    return {"alone_ms": round(1e3 * step(node, shape, "bf16", gpus, 1, 1, cached), 2),
            "users_of_node_alone": node.gpus // gpus * users}  # fmt: skip


def _with_levels(node: Node, shape: Shape, chain: Chain, gpus: int, cached: float, each: float, held: str
                 ) -> dict[str, Any]:
    """The level of 4 bits, by one GPU that has all of it and shared; the chain with it shared."""
    whole, shared = (step(node, shape, "mxfp4", count, 1, chain.drafted + 1, cached) for count in (1, gpus))
    passed = chained(node, shape, chain, gpus, 1, cached, held == "nested")
    users = most_users(node, shape, chain, gpus, cached, each, held)
    return {"level_ms_whole": round(1e3 * whole, 2), "level_ms_shared": round(1e3 * shared, 2),
            "pass_ms": round(1e3 * passed, 2), "tokens_per_second": round(chain.gained / passed, 1),
            "gain": round(chain.gained * step(node, shape, "bf16", gpus, 1, 1, cached) / passed, 2),
            "users_of_node_chain": node.gpus // gpus * users}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.simulate_gpus", description=__doc__.splitlines()[0])
    parser.add_argument("costs", type=Path, help="a TOML file of measured costs")
    parser.add_argument("--cached", type=float, default=2048, help="tokens of a user's cache (%(default)g)")
    parser.add_argument("--each", type=float, default=20, help="tokens a second of every user (%(default)g)")
    args = parser.parse_args(argv)
    if args.cached <= 0 or args.each <= 0:
        parser.error("--cached and --each are positive")
    try:
        node, chain, shapes, measured = read(args.costs)
        lines = [*compared(node, chain, shapes, measured), *answers(node, chain, shapes, args.cached, args.each)]
    except CostsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
