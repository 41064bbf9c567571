"""Does compute-sanitizer report anything of the kernels of GPUs, at small shapes, and which kernels did it see?

    python tests/cuda/sanitized.py --seconds 600 --out FOLDER      # all tools and families, some processes at a time
    python tests/cuda/sanitized.py --tools racecheck --families linear attention

A family is some of the tests of this folder, a process for each tool and family. It runs by itself first, under
torch's profiler, which lists the kernels that it launches. Every tool has to report a fault of its own kind
(planted.cu) before it is believed. A line for each: what was reported, whether the tests passed, how many kernels they
launch. Exit status 1 for a report, a failed test, or a tool that missed its planted fault.

Memory of tensors comes from the driver and not from torch's cache (but in the family "graphs"), so that each has
ends of its own and is unwritten when it comes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_NAME = re.compile(r"mlspec::(?:\(anonymous namespace\)::|\w+::)*(\w+)")
_LINEAR = r"test_linear.py::test_product_and_bits.*\[(bf16|mxfp4-a16|mxfp4-a8|int4-g32z-a8|int4-g128-a16|int4-g64-a4)-"
# By name: patterns of tests, each with the most that are taken.
FAMILIES: dict[str, tuple[tuple[str, int], ...]] = {
    "rows": (
        (r"test_row_kernels.py::test_rms_norm\[(8|1001|2048|20000)-weight_dtype0", 4),
        (r"test_row_kernels.py::test_gated\[(1-8|3-7|2-513)-", 12), (r"test_embed_rows", 3),
        (r"test_ordered_rows\[1-", 2), (r"test_low_rank_added\[(1-64|3-200)", 2),
        (r"test_rope_write_rows\[1-", 4), (r"test_rope_leaves_alone", 1),
        (r"test_codes_are_those_of_the_ref.*\[int8-1-", 2), (r"test_codes_are_those_of_the_ref.*\[int4-1-", 2),
        (r"test_normed_and_rotated_keys", 2), (r"test_quantized_rows.*\[(1|31|100)-", 18),
        (r"test_codes_in_one_kernel.py::test_(gated|normed)_rows.*\[(1|9)-896\]", 4),
    ),
    "hadamard": (
        (r"test_gated_rows_have_the_bits.*\[1-", 4), (r"test_widths_of_models.*\[1-", 3), (r"test_every_order", 13),
        (r"test_matrices_across_heads_and_those_that_no_kernel_codes", 1),
    ),
    "linear": ((_LINEAR + r"\((128, 128|200, 160)\)", 12),),
    "prefill": ((r"test_linear.py::test_product_and_bits.*\[bf16-\(4096, 2048\)", 1),),
    "portable": (
        (_LINEAR + r"\(200, 160\)", 6), (r"test_draft_is_the_product.*\[\(131, 160\)", 2),
        (r"test_exact_weights_have.*\[\(7, 96\)", 1), (r"test_every_prefix_of_planes.*\[\(7, 96, 32\)", 8),
        (r"test_every_width_and_bits.*\[\(7, 96\)", 6), (r"test_int8_outliers.py::test_product.*\[\(7, 256\)", 3),
    ),
    "nested": (
        (r"test_draft_is_the_product.*\[\((7, 96|131, 160)\)", 8), (r"test_rows_of_a_table", 3),
        (r"test_exact_weights_have.*\[\((7, 96|131, 160)\)", 2),
    ),
    "planes": (
        (r"test_every_prefix_of_planes.*\[\((7, 96, 32|128, 128, 128)\)", 16),
        (r"test_a_token_has_the_bits_of_a_product.*320-512", 4), (r"test_planes_that_lie_apart_are_read.*320-512", 1),
    ),
    "lut": ((r"test_every_width_and_bits.*\[\((7, 96)\)", 12),),
    "zipper": (
        (r"test_zipper_kernels.py::test_the_high_part_alone", 3), (r"test_sums_of_the_low_part", 4),
        (r"test_values_beyond_five_bits", 1), (r"test_int8_outliers.py::test_product.*\[\(7, 256\)", 3),
        (r"test_zipper_ends_on_gpu.py::test_rows_are.*\[1.0-(37-160|9-8288)-exact", 2),
    ),
    "experts": (
        (r"test_products_of_experts.*\[6-2-176-64-", 15), (r"test_tokens_go_where.*\[6-2-64-", 4),
        (r"test_a_row_that_is_normed.*\[6-2-64-", 4), (r"test_summed_and_normed.*-64\]", 8),
        (r"test_pairs_that_are_gated.*-6\]", 15), (r"test_sigmoids.*\[6-2-64-", 4), (r"test_a_token_is_summed", 3),
        (r"test_nested_experts.py::test_exact_products.*\[64-128-1-", 2),
        (r"test_nested_experts.py::test_drafts_follow.*\[64-128-1-", 2), (r"test_plan_rows_has_the_pairs", 1),
    ),
    "attention": (
        (r"test_attention.py::test_shapes\[(1-4-4-64|3-4-2-112|1-32-1-128)\]", 3),
        (r"test_attention.py::test_sinks", 2), (r"test_attention.py::test_against_float64\[1-", 5),
        (r"test_attention.py::test_prefill", 1),
        (r"test_attention_draft_window.py::test_shapes\[1-", 3),
    ),
    "codes": (
        (r"test_coded_attention.py::test_shapes\[int8", 3), (r"test_coded_attention.py::test_shapes\[int4", 3),
        (r"test_coded_attention.py::test_a_prompt\[int8-64", 2),
        (r"test_coded_attention.py::test_a_prompt\[int4-64", 2),
    ),
    "delta": (
        (r"test_tokens_of_mamba", 3), (r"test_tokens_are_those_of_the_plain_op", 3),
        (r"test_delta_on_gpu.py::test_gates", 1),
        (r"test_long_prompts_have.*\[\[2, 2, 64, 40\]", 2), (r"test_a_row_without_its_state", 1),
    ),
    "rounds": (
        (r"test_every_op_keeps_the_books\[[15]-", 8), (r"test_a_check_keeps", 30),
        (r"test_choose.py::test_against", 4),
        (r"test_choose.py::test_a_row_alone.*1001", 1), (r"test_masked_tokens", 1), (r"test_the_first_of_equals", 1),
        (r"test_rows_with_seeds_of_their_own", 1),
    ),
    "graphs": (
        (r"test_decoder.py::test_a_captured_step_is_the_step", 1), (r"test_a_chain_of_ops_in_a_graph", 1),
        (r"test_steps_choose_for_themselves", 1), (r"test_linear.py::test_a_captured_chain.*\[1-bf16\]", 1),
        (r"test_windowed_rounds.py::test_the_window_decides", 1), (r"test_a_token_of_many_rows_has", 1),
        (r"test_delta_on_gpu.py::test_captured_chains", 2), (r"test_mixtures_on_gpu.py::test_a_captured_step", 1),
    ),
    "ranks": ((r"test_shared_models.py::test_gpus_that_share_a_model", 1),),
}  # fmt: skip


def environment(family: str) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "MLSPEC_REQUIRE_CUDA": "1",
             "OMP_NUM_THREADS": "1"}  # fmt: skip
    if family not in ("graphs", "ranks"):
        found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if family == "portable":
        found["MLSPEC_CUDA_KERNELS"] = "portable"
    return found


def chosen(ids: list[str]) -> dict[str, list[str]]:
    """The tests of each family."""
    return {family: list(dict.fromkeys(one for pattern, most in patterns
                                       for one in [i for i in ids if re.search(pattern, i)][:most]))
            for family, patterns in FAMILIES.items()}  # fmt: skip


def collected() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(HERE)]
    text = subprocess.run(command, cwd=ROOT, env=environment(""), capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if "::" in line]


def run_tests(file: Path, names: Path | None) -> int:
    """The tests of a list. names: where the kernels that they launch are written."""
    import pytest

    sys.path.insert(0, str(ROOT))
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *json.loads(file.read_text())]
    if names is None:
        return int(pytest.main(words))
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        status = int(pytest.main(words))
    names.write_text(json.dumps(sorted({one.key for one in seen.key_averages() if "mlspec" in one.key})))
    return status


def in_library() -> set[str]:
    """The kernels that were compiled, by the names in their sources; empty without cuobjdump."""
    tool, library = shutil.which("cuobjdump"), next((ROOT / "hf_mlspec").glob("_CUDA*.so"), None)
    if tool is None or library is None:
        return set()
    text = subprocess.run([tool, "--dump-resource-usage", str(library)], capture_output=True, text=True).stdout
    names = sorted(set(re.findall(r"Function (\S+?):", text)))
    shown = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout
    return {found[1] for line in shown.splitlines() if (found := _NAME.search(line))}


class Sanitizer:
    """compute-sanitizer with a filter of kernels that it takes. None: it is not here."""

    def __init__(self, out: Path) -> None:
        places = ("compute-sanitizer", *map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")))
        self.program = next(filter(None, map(shutil.which, places)), None)
        self.out, self.filter = out, []

    def plant(self) -> dict[str, int]:
        """What each tool reports of its planted fault, with the first filter under which memcheck finds one."""
        program = self.out / "planted"
        subprocess.run(["nvcc", "-arch=native", "-lineinfo", "-o", str(program), str(HERE / "planted.cu")], check=True)
        for words in (["--kernel-regex", "kns=mlspec"], ["--kernel-name", "kernel_substring=mlspec"],
                      ["--filter", "kernel_substring=mlspec"], []):  # fmt: skip
            self.filter = words
            if (self._of([str(program), "0"], "memcheck", 60)[0] or 0) > 0:
                break
        numbers = {"memcheck": "0", "racecheck": "1", "initcheck": "2", "synccheck": "3"}
        return {tool: self._of([str(program), numbers[tool]], tool, 60)[0] or 0 for tool in TOOLS}

    def _of(self, command: list[str], tool: str, seconds: float, env: Any = None) -> tuple[int | None, str]:
        """Reports, None where it did not end; and all that was said."""
        # What torch's own kernels wrote must be known to be written: initcheck looks at all kernels.
        words = [self.program, "--tool", tool, *([] if tool == "initcheck" else self.filter), "--print-limit", "30"]
        text = _ended([*words, *command], seconds, env)
        found = [int(one[0] or one[1]) for one in _SUMMARY.findall(text)]
        return (sum(found) if found else None), text

    def look(self, family: str, file: Path, tool: str, seconds: float, end: float) -> dict[str, Any]:
        begin = time.monotonic()
        seconds = min(seconds, end - begin)
        reports, text = self._of([sys.executable, __file__, "--run", str(file)], tool, seconds, environment(family))
        (self.out / f"{family}-{tool}.txt").write_text(text[-400_000:])
        passed = re.findall(r"(\d+) passed", text)
        so_far = len(re.findall(r"(?m)^=+ (?:Error|Warning|Invalid|Uninitialized|Barrier error|Program hit)", text))
        reports = f"at least {so_far}, not ended:" if reports is None else reports
        bad = re.search(r"\d+ failed|\d+ errors? in |INTERNALERROR|no tests ran", text)
        died = isinstance(reports, int) and not passed  # a process that dies says neither
        return {"family": family, "tool": tool, "reports": reports, "passed": int(passed[-1]) if passed else 0,
                "failed": bool(bad) or died, "seconds": round(time.monotonic() - begin)}  # fmt: skip


def _ended(command: list[str], seconds: float, env: Any = None) -> str:
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", start_new_session=True)  # fmt: skip
    try:
        return process.communicate(timeout=max(seconds, 1))[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return (process.communicate()[0] or "") + "\nended: out of time\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/cuda/sanitized.py", description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=900.0, help="of everything (%(default)s)")
    parser.add_argument("--each", type=float, default=240.0, help="of one tool over one family (%(default)s)")
    parser.add_argument("--processes", type=int, default=8, help="at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("sanitized"), help="a folder for what the tools say")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--names", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        return run_tests(args.run, args.names)
    end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    sanitizer = Sanitizer(args.out.resolve())
    if sanitizer.program is None:
        print("compute-sanitizer is not here")
        return 2
    planted = sanitizer.plant()
    print(f"planted faults: {planted}, filter {sanitizer.filter}", flush=True)
    tests, files = chosen(collected()), {}
    for family in args.families:
        files[family] = sanitizer.out / f"{family}.json"
        files[family].write_text(json.dumps(tests[family]))
        print(f"{family}: {len(tests[family])} tests", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        names = {family: pool.submit(_launched, sanitizer.out, family, files[family], end) for family in args.families}
        known = pool.submit(in_library)
        looks = [pool.submit(sanitizer.look, family, files[family], tool, args.each, end)
                 for tool in args.tools for family in args.families]  # fmt: skip
        bad = any(planted[tool] == 0 for tool in args.tools)
        launched = {family: one.result() for family, one in names.items()}
        for one in concurrent.futures.as_completed(looks):
            found = one.result()
            bad |= found["failed"] or found["reports"] != 0
            of = launched[found["family"]]
            print(f"{found['tool']} {found['family']}: {found['reports']} reports, {found['passed']} tests passed"
                  f"{', SOME FAILED' if found['failed'] else ''}, {len(of)} kernels of {len(_sources(of))} sources, "
                  f"{found['seconds']} s", flush=True)  # fmt: skip
    seen, all_ = set().union(*map(_sources, launched.values())), known.result()
    print(f"launched: {len(seen)} kernels by name: {', '.join(sorted(seen))}")
    print(f"in the library: {len(all_)}; never launched: {', '.join(sorted(all_ - seen)) or 'none'}")
    return int(bad)


def _launched(out: Path, family: str, file: Path, end: float) -> list[str]:
    """The kernels of a family."""
    names = out / f"{family}-kernels.json"
    command = [sys.executable, __file__, "--run", str(file), "--names", str(names)]
    text = _ended(command, min(120.0, end - time.monotonic()), environment(family))
    (out / f"{family}-alone.txt").write_text(text[-100_000:])
    said = text.strip().splitlines()
    found = json.loads(names.read_text()) if names.exists() else []
    print(f"alone {family}: {said[-1] if said else 'nothing said'}; {len(found)} kernels", flush=True)
    return found


def _sources(names: list[str]) -> set[str]:
    """Names in sources, without the words of templates."""
    return {found[1] for name in names if (found := _NAME.search(name))}


if __name__ == "__main__":
    sys.exit(main())
