"""Which lines do the programs of eval/ write? One of every kind, for the tests of the report."""

from __future__ import annotations

CARD = {"processor": "Some CPU", "cores": 8, "threads": 2, "torch": "2.13", "transformers": "5.23",
        "commit": "abc1234", "time": "2026-11-20T10:00:00Z"}
CHAIN = ["mxfp4", "/models/tiny"]


def line(kind: str, **values) -> dict:
    return {"kind": kind, "name": "toy", "machine": CARD, **values}


def decode(contender: str, speed: float, over: float, *, batch: int = 1, data: str = "HumanEval", **more) -> dict:
    levels = CHAIN if contender == "chain" else []
    seconds = {"total": 10.0, "target": 5.0, "levels": [3.0, 1.0][: len(levels)], "other": 5.0 - 2 * len(levels)}
    return line("decode", contender=contender, levels=levels, data=data, batch=batch, tokens_per_second=speed,
                num_draft_tokens=[8, 4] if levels else None, over={"target alone": over}, seconds=seconds,
                bandwidth_share=0.5, **more)


def acceptance(**more) -> dict:
    places = [{"position": at, "tested": 100 - 50 * at, "accepted": 90 - 50 * at} for at in (0, 1)]
    return line("acceptance", levels=CHAIN, level="mxfp4", level_index=0, data="HumanEval", batch=1,
                num_draft_tokens=[8, 4], drafted=200, tested=150, accepted=135, acceptance=0.9, tokens_per_pass=6.5,
                by_position=places, **more)


def of_every_kind() -> list[dict]:
    """One line of every kind that a program writes, with numbers that can be found again."""
    return [
        line("task", system="QSpec", task="mlspec_gsm8k", metric="exact_match", value=0.4321, stderr=0.0123,
             items=77, seconds=5.0, identical_items=77),
        line("fidelity", system="W4A4", reference="W4A16", data="GSM8K", prompts=40, equal=10, equal_share=0.25,
             mean_first_difference=31.5, tokens=5120, max_new_tokens=128),
        line("perplexity", system="W4A4", data="wikitext2", tokens=9876, token_perplexity=12.345,
             word_perplexity=54.321, bits_per_byte=1.2345),
        line("probabilities", system="W4A4", reference="W4A16", data="wikitext2", tokens=3, pearson_r=0.9876,
             points=[[0.1, 0.2], [0.5, 0.4], [0.9, 0.95]]),
        decode("target alone", 100.0, 1.0), decode("target alone", 150.0, 1.0, batch=4),
        decode("chain", 311.0, 2.0), decode("chain", 333.0, 8.0, batch=4),
        acceptance(),
        *(line("ablation", levels=CHAIN, data="HumanEval", num_draft_tokens=[k, 4], tokens_per_second=200.5 + k,
               acceptance=[0.9, 0.8], tokens_per_pass=3.25 + k) for k in (4, 8)),
        line("memory", contender="chain", batch=1, weights_bytes=200e6, kv_bytes=3e6, peak_bytes=512.5e6),
        *of_benchmarks(),
    ]


def of_benchmarks() -> list[dict]:
    """Those of programs without a plan, and of eval.lossless."""
    return [
        {"op": "mxfp4_linear", "m": 64, "k": 128, "n": 2, "contender": "ours", "ours": True, "ms": 0.125,
         "weight_bytes": 4352, "probe_bytes_per_second": 2e10, "share_of_probe": 0.75, "machine": CARD},
        {"op": "mxfp4_linear", "m": 64, "k": 128, "n": 2, "contender": "ggml", "ours": False, "missing": "no folder",
         "machine": CARD},
        {"contender": "[mxfp4]", "runs": 3, "runs_without_decode": 0, "tokens_per_second": 421.5, "data": "MBPP",
         "over target alone, prepared": 2.5, "over target alone, prepared with prefill": 2.25,
         "tokens_per_target_pass": 5.5, "levels": [{"level": "mxfp4", "acceptance": 0.876}], "machine": CARD,
         "asked": {"model": "/models/other"}},
        {"kind": "decode", "batch": 2, "contender": "QSpec w4a8", "gamma": 3, "reference": "w4a16", "machine": CARD,
         "tokens_per_second": 77.25, "over": {"w4a16": 1.5}, "rows_compared": 2, "rows_differing": 1,
         "ms_per_token": {"draft": 2.0, "verify": 1.0, "other": 1.0}},
        {"kind": "average", "contender": "QSpec w4a8", "reference": "w4a16", "gamma": "best", "batches": [1, 2],
         "over_reference": 1.375, "over_reference_small": 1.5, "machine": CARD},
        {"contender": "stream", "levels": [], "requests": 32, "max_batch": 8, "tokens_per_second": 615.5,
         "mean_wait_seconds": 1.875, "machine": CARD},
        {"benchmark": "quantize", "format": "int4 g128", "quantize_seconds": 2.625, "save_seconds": 0.5,
         "reload_seconds": 0.25, "packed": 51e6, "peak": 55e6, "bound": 204e6, "identical": True, **CARD},
        line("paired acceptance", pair="x.fitted", target="x", data="GSM8K", draft="nested4a8", against="mxfp4",
             codebook="fitted", prompts=300, tokens=36655, acceptance=0.9637, acceptance_against=0.9606,
             difference=0.0031, lower_bound=0.0011, margin=0.003),
        line("nested", model="x", tensor="all linears", weights=21102592, escapes=3, bytes_ratio=1.0156,
             run_time_ratio=1.0159, relative_errors={"lloyd_max": 0.0994, "MXFP4 cast": 0.1155}, identical=True),
        {"asked": {"target": "{models}/x"}, "data": "GSM8K", "batch_size": 8, "batch": 0, "chain": ["mxfp4"],
         "prompts": 8, "tokens_compared": 1016, "differences": []},
        {"way": "prepared", "shape": "tiny", "weights": 1e6, "before": 2e6, "peak": 3.5e6},
    ]
