"""How long does a step with adapters take beside one of the base?"""

from __future__ import annotations

import statistics
import time

import torch


def step_ratio(base, model, batch: int, repeats: int) -> dict[str, float]:
    """Medians of tokens decoded one by one, by the base and with the adapter, in turn."""
    ids = torch.randint(5, 90, (batch, 8)).to(model.device)
    options = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False, "assistant_models": []}
    seconds: dict[str, list[float]] = {"base": [], "adapter": []}
    for turn in range(repeats + 1):
        for name, one in (("base", base), ("adapter", model)):
            begin = time.perf_counter()
            one.generate(input_ids=ids, **options)[0, -1].item()  # waits for the device
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    ratios = [b / a for a, b in zip(seconds["base"], seconds["adapter"], strict=True)]
    medians = {name: statistics.median(own) / 24 * 1e3 for name, own in seconds.items()}
    return {"batch": batch, **{f"{name}_ms": round(own, 4) for name, own in medians.items()},
            "ratio": round(statistics.median(ratios), 4)}
