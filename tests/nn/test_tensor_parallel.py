"""Does a model whose weights processes share write with levels what it writes alone, on all of them?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lora import add_lora
from ranks import require_parts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_mlspec import demo_pair, direct_cast
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.cuda.ranks import exchange_of
from hf_mlspec.engines.own_part import OwnPart
from hf_mlspec.engines.ranks import Ranks
from hf_mlspec.nn.linear import Mxfp4Linear
from hf_mlspec.ops import ranks as boxes

OTHER = "this transformers has another tensor parallelism"
PROGRAM = Path(__file__).resolve().parents[1] / "ranks.py"


@pytest.fixture
def mesh():
    """Of two processes, of which this is the second; nothing is sent."""
    pytest.importorskip("transformers.distributed.parallel_utils", reason=OTHER)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def split(model, mesh, plan: dict[str, str]):
    """A model whose linears are shared as a plan says, the way transformers does it."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    model._tp_plan, model._tp_size = plan, 2
    for path, style in plan.items():
        for name, module in model.named_modules():
            if name.endswith(path.rpartition("*")[2]) and isinstance(module, nn.Linear):
                axis = 1 if style.startswith("rowwise") else 0
                module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(axis)],
                                                               src_data_rank=None), requires_grad=False)
                ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
    return model


PLAN = {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}


def test_each_process_casts_its_part(tiny_model, mesh):
    whole = direct_cast(tiny_model("llama"))
    model = split(tiny_model("llama"), mesh, PLAN)
    forwards = [vars(module).get("forward") for module in model.modules()]
    cast = direct_cast(model)
    for index in range(3):
        own, expected = cast.model.layers[index].self_attn, whole.model.layers[index].self_attn
        parts, codes = expected.q_proj.packed_weight(), own.q_proj.packed_weight()
        assert all(torch.equal(a, b[b.shape[0] // 2 :]) for a, b in zip(codes.parts, parts.parts, strict=True))
        parts, codes = expected.o_proj.packed_weight(), own.o_proj.packed_weight()
        assert all(torch.equal(a, b[:, b.shape[1] // 2 :]) for a, b in zip(codes.parts, parts.parts, strict=True))
        assert (own.q_proj.out_features, own.o_proj.in_features) == (64, 64)
        assert isinstance(own.k_proj, Mxfp4Linear)
        x = torch.randn(3, 64)
        assert torch.equal(own.q_proj(x), expected.q_proj(x)[:, 32:])
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    with pytest.raises(ValueError, match="is of a weight that processes share: pack and save the whole model"):
        cast.state_dict()


@pytest.mark.parametrize("word", ["int3", "ternary"])
def test_each_process_casts_its_part_to_bit_planes(tiny_model, mesh, word):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    whole = direct_cast(tiny_model("llama", **sizes), word)
    cast = direct_cast(split(tiny_model("llama", **sizes), mesh, PLAN), word)
    for own, expected in zip(cast.model.layers, whole.model.layers, strict=True):
        own, expected = own.self_attn, expected.self_attn
        assert torch.equal(own.q_proj.dequantized(), expected.q_proj.dequantized()[64:])
        assert torch.equal(own.o_proj.dequantized(), expected.o_proj.dequantized()[:, 64:])
        x = torch.randn(2, 3, 128)
        assert torch.equal(own.q_proj(x), expected.q_proj(x)[..., 64:])
        assert own.q_proj.at_rows(x, [1, 2]).shape == (2, 3, 64)


def test_parts_of_blocks_are_refused_with_both_numbers(tiny_model, mesh):
    model = split(tiny_model("llama"), mesh, {"model.layers.*.mlp.down_proj": "rowwise"})
    with pytest.raises(ValueError, match=r"mlp\.down_proj has 96 inputs, 48 on each of 2 processes, which blocks"):
        direct_cast(model)


def test_other_styles_are_refused(tiny_model, mesh):
    model = split(tiny_model("llama"), mesh, PLAN)
    model._tp_plan = {**PLAN, "model.layers.*.self_attn.q_proj": "packed_colwise"}
    with pytest.raises(ValueError, match="q_proj is sharded as packed_colwise, known are colwise"):
        direct_cast(model)
    model = split(tiny_model("llama"), mesh, PLAN)
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    with pytest.raises(ValueError, match=r"runs model\.layers\.1\.mlp as one"):
        direct_cast(model)


def test_adapters_beside_parts_are_refused_by_name(tiny_model, mesh):
    model = split(tiny_model("llama"), mesh, PLAN)
    add_lora(model, ("q_proj",))
    with pytest.raises(UnknownArchitecture, match=r"share it and its model\.layers\.0\.self_attn\.q_proj carries ada"):
        OwnPart(model, None)


class Said(Ranks):
    """The second of two processes on one machine, whose other one says the same."""

    def __init__(self):
        self.group, self.device, self.index, self.count = None, torch.device("cuda:0"), 1, 2

    def told(self, said):
        return [said, said]


class NoHandle:
    def handle(self):
        raise RuntimeError("no handle")


@pytest.mark.parametrize("problem", [ValueError("boxes are of 2 to 8 ranks"), RuntimeError("no memory"), None])
def test_processes_without_boxes_all_add_up_another_way(monkeypatch, problem):
    """None is left waiting for what another one has to say."""
    def new_boxes(*_):
        if problem is not None:
            raise problem
        return NoHandle()

    monkeypatch.setattr(boxes, "new_boxes", new_boxes)
    ranks = Said()
    assert exchange_of(ranks) is ranks


def started(*words: str) -> subprocess.CompletedProcess:
    pytest.importorskip("transformers.distributed.parallel_utils", reason=OTHER)
    target, draft = map(str, demo_pair())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM),
               target, draft, *words]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def told(done: subprocess.CompletedProcess) -> dict:
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.slow
def test_chains_of_a_shared_model_write_what_it_writes_alone():
    done = started()
    assert done.returncode == 0, done.stderr
    found = told(done)
    for name in ("alone", "stock", "cast", "draft", "both", "exit", "int3", "sampled", "packed", "passes"):
        assert found[name][0] == found[name][1], name
    for name in ("stock", "cast", "draft", "both", "exit", "int3"):
        assert found[name] == found["alone"], name
    assert found["engine"] == ["cpu", "cpu"]  # the compiled decoder
    assert all(chain == found["alone"] for chain in (*found["together"], *found["device"]))
    assert found["stream"] == [sorted(ids) for ids in found["alone"]]
    assert found["sampled"] == found["sampled alone"]
    assert found["packed"] == found["packed whole"]
    assert found["gap of casts"] < 1e-2  # inputs are rounded to int8, after sums in another order


@pytest.mark.slow
def test_models_that_cannot_be_shared_are_refused_on_all_processes():
    done = started("odd")
    assert done.returncode == 0, done.stderr
    found = told(done)
    for errors in found.values():
        assert errors[0] == errors[1]
    assert "differ in their weights: " in found["weights"][0]
    assert "differ in their weights: " in found["draft"][0]
    assert "has 1 key heads, which 2 processes of tensor parallelism do not divide" in found["heads"][0]


@pytest.mark.slow
def test_experts_and_nested_weights_are_shared_and_all_raise_where_one_process_fails():
    done = started("parts-and-fails")
    assert done.returncode == 0, done.stderr
    found = told(done)
    require_parts(found["parts"], "cpu")
    assert "up_proj.weight holds 1 NaN or Inf" in found["nan on one"][1]
    assert found["nan on one"][0].startswith("RankFailed: rank 1 of 2 that share the model failed: ValueError: nest:")
    assert found["as before"] == [True, True]
    require_failures(found["fails"])


def require_failures(found: dict) -> None:
    """All raise, and later calls are right."""
    for name, own in found.items():
        assert own["right"] == [True, True], name
        assert max(own["seconds"]) < 30
        if name == "on_all":
            assert all("num_beams" in error for error in own["errors"])
            continue
        other, failed = own["errors"]
        assert failed == "OutOfMemoryError: no memory, says the test", name
        assert other == f"RankFailed: rank 1 of 2 that share the model failed: {failed}", name


@pytest.mark.slow
def test_a_process_that_dies_ends_all_within_half_a_minute():
    done = started("die")
    assert done.returncode != 0
    assert time.time() - told(done)["died"] < 30
