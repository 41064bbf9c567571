"""Does a router choose a width per block and query, and is a file of another model refused?"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import packed, tiny
from routed import differing, pair, queries
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.routing.blocks import average_bits, blocks_of
from hf_mlspec.routing.features import pooled
from hf_mlspec.routing.passes import Routed, at_widths
from hf_mlspec.routing.router import Router


def test_blocks_are_attention_and_mlp_of_each_layer():
    _, model = pair()
    blocks = blocks_of(model)
    assert [b.name for b in blocks] == [f"model.layers.{i}.{p}" for i in range(len(model.model.layers))
                                        for p in ("self_attn", "mlp")]
    assert sum(b.weights for b in blocks) == sum(m.in_features * m.out_features for b in blocks
                                                 for m in b.linears.values())
    assert average_bits([4] * len(blocks), blocks) == 4


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match="holds no bit-planes"):
        blocks_of(tiny("llama"))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj is a Int4Linear"):
        blocks_of(packed(tiny("llama", dtype=torch.float32), "int4"))


def test_pooling_ignores_what_stands_behind_a_query_and_beside_it():
    hidden = torch.randn(3, 9, 5)
    found = pooled(hidden, [9, 4, 1], "b")
    torch.testing.assert_close(found[1], hidden[1, :4].mean(0))
    assert torch.equal(found[2], hidden[2, 0])
    changed = hidden.clone()
    changed[1, 4:] = float("nan")
    assert torch.equal(pooled(changed, [9, 4, 1], "b"), found)
    assert torch.equal(pooled(hidden[1:2, :4], [4], "b")[0], found[1])


def test_features_whose_sum_overflows_are_no_error():
    hidden = torch.full((1, 2, 5), 3e38)
    assert pooled(hidden, [1], "b").eq(3e38).all()


def test_nan_in_features_is_refused():
    hidden = torch.zeros(2, 3, 4)
    hidden[1, 0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match=r"input of model\.layers\.0\.mlp is NaN or infinite in row 1"):
        pooled(hidden, [3, 3], "model.layers.0.mlp")


def test_rows_of_a_batch_read_their_own_widths():
    _, model = pair()
    blocks, rows = blocks_of(model), queries(3, 7)
    widths = [[2, 8, 3] for _ in blocks]
    with torch.no_grad():
        with at_widths(model, blocks, widths):
            mixed = model(input_ids=rows).logits
        for r in range(3):
            with at_widths(model, blocks, [[line[r]] for line in widths]):
                alone = model(input_ids=rows[r : r + 1]).logits
            torch.testing.assert_close(mixed[r : r + 1], alone, rtol=1e-5, atol=1e-5)
        with precision_switch(model).at("planes2"):
            torch.testing.assert_close(mixed[:1], model(input_ids=rows[:1]).logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mixed, model(input_ids=rows).logits, atol=1e-3)


def test_a_layer_refuses_rows_that_do_not_fit():
    _, model = pair()
    linear = model.model.layers[0].mlp.up_proj
    with pytest.raises(ValueError, match="2 rows, x has shape"):
        linear.at_rows(torch.zeros(3, 1, linear.in_features), [4, 4])
    with pytest.raises(ValueError, match="these weights are int4"), \
            precision_switch(packed(tiny("llama", dtype=torch.float32))).sent_through(lambda layer, x: x):
        pass


def test_layers_outside_of_the_blocks_compute_as_ever():
    model = packed(tiny("llama", dtype=torch.float32), "planes", keep_head=False)
    blocks, rows = blocks_of(model), queries(1, 5)
    with torch.no_grad(), at_widths(model, blocks, [[8] for _ in blocks]):
        assert torch.equal(model(input_ids=rows).logits, model(input_ids=rows).logits)
    with torch.no_grad():
        plain = model(input_ids=rows).logits
        with at_widths(model, blocks, [[8] for _ in blocks]):
            assert torch.equal(model(input_ids=rows).logits, plain)


def test_another_thread_reads_all_planes_meanwhile():
    _, model = pair()
    blocks, rows = blocks_of(model), queries(1, 5)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        plain = pool.submit(_scored, model, rows).result()  # a thread has its own number of helpers
        with at_widths(model, blocks, [[2] for _ in blocks]):
            assert torch.equal(pool.submit(_scored, model, rows).result(), plain)
            assert not torch.equal(model(input_ids=rows).logits, plain)


def _scored(model, rows):
    with torch.no_grad():
        return model(input_ids=rows).logits


def test_a_choice_depends_on_the_query_alone():
    _, model = pair()
    blocks, rows, router = blocks_of(model), queries(4, 9), differing(model)
    with torch.no_grad():
        with Routed(router, blocks, [9] * 4).over(model) as together:
            logits = model(input_ids=rows).logits
        chosen = {tuple(line[r] for line in together.widths) for r in range(4)}
        assert len(chosen) > 1
        for r in range(4):
            with Routed(router, blocks, [9]).over(model) as alone:
                own = model(input_ids=rows[r : r + 1]).logits
            assert [line[r] for line in together.widths] == [line[0] for line in alone.widths]
            torch.testing.assert_close(logits[r : r + 1], own, rtol=1e-5, atol=1e-5)


def test_nothing_is_left_behind_a_pass():
    _, model = pair()
    blocks, router = blocks_of(model), differing(model)
    with torch.no_grad():
        before = model(input_ids=queries(1, 5)).logits
        with pytest.raises(ValueError, match="query lengths are of"), \
                Routed(router, blocks, [5, 5]).over(model):
            model(input_ids=queries(1, 5))
        assert precision_switch(model).through is None
        assert torch.equal(model(input_ids=queries(1, 5)).logits, before)


def test_a_saved_router_chooses_the_same(tmp_path):
    _, model = pair()
    blocks, router, path = blocks_of(model), differing(model, temperature=0.25), tmp_path / "r.safetensors"
    router.save(path)
    again = Router.load(path, blocks)
    assert (again.widths, again.temperature, again.names) == (router.widths, 0.25, router.names)
    features = torch.randn(20, blocks[0].features)
    for place in range(len(blocks)):
        assert again.choose(place, features) == router.choose(place, features)
        assert torch.equal(again.probabilities(place, features), router.probabilities(place, features))
    assert [one.name for one in tmp_path.iterdir()] == ["r.safetensors"]


def test_routers_of_other_models_and_widths_are_refused(tmp_path):
    _, model = pair()
    path = tmp_path / "r.safetensors"
    differing(model).save(path)
    with pytest.raises(ValueError, match="router of a model with the same shapes and other weights"):
        Router.load(path, blocks_of(pair(seed=1)[1]))
    fewer = packed(tiny("llama", dtype=torch.float32), "planes", num_planes=6)
    with pytest.raises(ValueError, match=r"router of another model: for model\.layers\.0\.self_attn\.q_proj"):
        Router.load(path, blocks_of(fewer))
    with pytest.raises(ValueError, match=r"chooses among \[2, 3, 4, 6, 8\] planes, \[2, 4\] were asked for"):
        Router.load(path, blocks_of(model), [2, 4])
    for bad in ([4], [4, 2], [2, 9], [2, 2.5]):
        with pytest.raises(ValueError, match="two or more rising numbers of planes"):
            Router(blocks_of(model), bad)


def test_damaged_files_are_refused(tmp_path):
    _, model = pair()
    path = tmp_path / "r.safetensors"
    differing(model).save(path)
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["mlspec_router"])
    tensors, blocks = load_file(path), blocks_of(model)

    def refused(words, tensors, told):
        save_file(tensors, path, told and {"mlspec_router": json.dumps(told)})
        with pytest.raises(ValueError, match=words):
            Router.load(path, blocks)

    refused("is no router", tensors, {})
    refused("version 7", tensors, told | {"version": 7})
    refused("holds NaN", tensors | {"of.0.mean": tensors["of.0.mean"] * float("nan")}, told)
    refused("is missing", {k: v for k, v in tensors.items() if k != "of.1.mean"}, told)
    refused("rising numbers", tensors, told | {"widths": [8, 2]})
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="is no router"):
        Router.load(path, blocks)
    with pytest.raises(FileNotFoundError):
        Router.load(tmp_path / "none.safetensors", blocks)
