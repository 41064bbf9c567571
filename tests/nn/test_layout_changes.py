"""Is a weight read whole while another thread brings it into tiles? A cast is made, say, while a call begins."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.nested import NestedLinear
from hf_mlspec.nn.nested_experts import NestedExperts
from hf_mlspec.nn.packed import PackedModule

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
PATIENCE = 20.0  # seconds after which a thread hangs


def linear(kind) -> PackedModule:
    torch.manual_seed(0)
    options = {"group_size": 32} if kind is Int4Linear else {}
    return kind.from_linear(nn.Linear(64, 48, dtype=torch.bfloat16), **options)


def experts(kind) -> PackedModule:
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    config._experts_implementation = "eager"
    dense = MixtralExperts(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in dense.parameters():
        parameter.normal_(0, 0.2)
    return kind.from_module(dense)


@pytest.mark.parametrize("begins", ["prepack_", "unprepack_"])
@pytest.mark.parametrize(("make", "kind"), [(linear, Mxfp4Linear), (linear, Int4Linear), (linear, NestedLinear),
                                            (experts, PackedExperts), (experts, NestedExperts)])  # fmt: skip
def test_a_weight_is_of_one_layout_for_who_reads_it(monkeypatch, make, kind, begins):
    """The other thread begins as soon as the first part is read, and comes as far as it is let."""
    layer, parts, threads = make(kind), PackedModule.parts, []
    name = layer.names[0]
    right = [None if part is None else part.clone() for part in layer._on_disk(name)]
    if begins == "unprepack_":
        layer.prepack_()

    def slowly(self, name):
        found = parts(self, name)
        if not threads:
            threads.append(threading.Thread(target=getattr(layer, begins), daemon=True))
            threads[0].start()
            threads[0].join(0.2)
        return found

    monkeypatch.setattr(PackedModule, "parts", slowly)
    read = layer._on_disk(name)
    threads[0].join(PATIENCE)
    assert not threads[0].is_alive()
    assert layer.is_prepacked is (begins == "prepack_")
    assert all(torch.equal(one, other) for one, other in zip(read, right, strict=True) if other is not None)
