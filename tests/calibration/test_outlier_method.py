"""Does Atom's method order inputs by size, round the last 128 to int8, and give a model that drafts for itself?"""

from __future__ import annotations

import pytest
import torch
from models import prompts, tiny, together
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.calibration import pipeline
from hf_mlspec.calibration.coding import factor_of, feedback_weight, outlier_weight
from hf_mlspec.calibration.rotation import rotate
from hf_mlspec.calibration.stream_order import stream_order
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.nn.int4_int8 import Int4Int8Linear
from hf_mlspec.nn.transforms import HADAMARD, ORDER
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROWS = [torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
IDS = torch.tensor(ROWS[:1])
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.1}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")


def model_of(kind: str = "llama", **options):
    return tiny(kind, dtype=torch.float32, **{**SHAPE, **options})


def quantize(model, method: str = "atom", **options):
    return hf_mlspec.quantize(model, method, **{"calibration": ROWS, **options})


@pytest.mark.parametrize(("kind", "method"), [("llama", "atom"), ("qwen2", "atom+gptq"), ("phi3", "atom"),
                                                ("qwen2", "quarot+atom+gptq")])
def test_saved_and_loaded_bit_for_bit_and_lossless_with_its_draft(tmp_path, kind, method):
    model = model_of(kind)
    before = model(IDS).logits
    found = quantize(model, method)
    after = model(IDS).logits
    assert (after - before).norm() < 0.5 * before.norm()
    assert min(layer.sqnr for layer in found.layers) > 12
    assert (found.record["method"], found.record["outliers"]) == (method, 128)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(IDS).logits, after)
    assert "quarot" not in method or again.model.layers[0].self_attn.q_proj.transform is HADAMARD
    if has_compiled_decoder():
        assert isinstance(decoder_of(again, "cpu"), CpuDecoder)
    inputs = prompts([9, 4, 17])
    options = {"max_new_tokens": 24}
    chain = together(again, inputs, ["w4a4"], **options)
    (level,) = hf_mlspec.last_stats(again).levels
    assert 0 < level.accepted <= level.drafted
    assert chain == together(again, inputs, [], **options)


def test_inputs_are_ordered_by_their_squares_and_codes_are_atoms(monkeypatch):
    seen, collect = [], pipeline.collect
    monkeypatch.setattr(pipeline, "collect", lambda *given: keep(seen, collect(*given)))
    model = model_of()
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize(model)
    for index, groups in enumerate(seen):
        for names, squares in groups:
            for name in names:
                layer = model.model.layers[index].get_submodule(name)
                assert type(layer) is Int4Int8Linear
                assert layer.transform is ORDER
                order = layer.transform_order.long()
                assert torch.equal(squares[order], squares.sort().values)
                assert torch.equal(order, squares.argsort(stable=True))
                weight = dense[f"model.layers.{index}.{name}.weight"][:, order]
                groups_of = weight[:, :-128].unflatten(1, (-1, 128)).double()
                scale = (0.85 * groups_of.abs().amax(-1) / 7).half().double()
                values = (groups_of / scale[..., None]).round().clamp(-8, 7) * scale[..., None]
                step = (weight[:, -128:].abs().amax(1).double() / 119).half().double()[:, None]
                outliers = (weight[:, -128:].double() / step).round().clamp(-119, 119) * step
                wanted = torch.cat([values.flatten(1), outliers], 1)
                # a scale or a quotient of float32 may lie on the other side of a rounding
                assert ((layer.dequantized(torch.float64) - wanted).abs() < 1e-9).double().mean() > 0.995


def keep(seen: list, found: list) -> list:
    seen.append([(list(inputs.names), inputs.squares.clone()) for inputs in found])
    return found


def test_gptq_leaves_outliers_out_of_its_loop_and_they_take_up_errors():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 384, generator=generator) @ torch.randn(384, 384, generator=generator) / 20
    x, weight = x * torch.logspace(-1, 1, 384), torch.randn(24, 384, generator=generator)
    factor = factor_of(x.T @ x, "up")
    fed, plain = (outlier_weight(weight, given, "up").validate(24, 384) for given in (factor, None))
    assert torch.equal(fed.weight_packed, feedback_weight(weight, factor, 128, True, "up").weight_packed[:, :-64])
    errors = [(x @ (packed.dequantize() - weight).T).square().sum() for packed in (fed, plain)]
    assert errors[0] < 0.6 * errors[1]
    assert (fed.dequantize() - weight)[:, -128:].abs().max() > fed.weight_outlier_scale.max()


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    whole, resumed = model_of(), model_of()
    quantize(whole, work_folder=tmp_path / "work")
    (tmp_path / "work" / "block_0001.safetensors").unlink()
    quantize(resumed, work_folder=tmp_path / "work")
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in resumed.state_dict().items())


@pytest.mark.parametrize(("given", "shape", "words"), [
    ({"format": "int4"}, {}, "method 'atom' does not fit format 'int4': it chooses codes of 'int4-int8'"),
    ({"method": "gptq", "format": "int4-int8"}, {}, "'gptq' does not fit format 'int4-int8'"),
    ({"method": "atom+gptq", "act_order": True}, {}, "two orders of a layer's inputs: leave act_order out"),
    ({"act_order": True}, {}, "act_order is GPTQ's"),
    ({"method": "quarot+atom", "format": "int4"}, {}, "'quarot\\+atom' does not fit format 'int4'"),
    ({"method": "quarot+atom", "rotations": "R.bin"}, {}, "rotations are of quarot and quarot\\+gptq"),
    ({"group_size": 64}, {}, "format 'int4-int8' has no group_size"),
    ({"symmetric": False}, {}, "format 'int4-int8' has no symmetric"),
    ({}, {"intermediate_size": 320}, "int4-int8, in blocks of 128, does not divide .*down_proj with in_features 320"),
    ({}, {"intermediate_size": 128}, r"down_proj: in_features is 128, int4-int8 takes multiples of 128 from 256 on")])
def test_what_does_not_fit_is_refused_before_a_layer_is_packed(given, shape, words):
    model = model_of(**shape)
    with pytest.raises(ValueError, match=words):
        quantize(model, **given)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_one_order_of_the_residual_stream_leaves_outputs_and_puts_its_outliers_last():
    model, seen = model_of("qwen2"), []
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] *= 40
        model.model.embed_tokens.weight[:, 100] *= 20
        model.model.layers[1].input_layernorm.weight.uniform_(0.5, 2)
    before = model(IDS).logits
    order = stream_order(model, [IDS])
    assert torch.equal(order @ order.T, torch.eye(256, dtype=torch.float64))
    assert order[7, -1] == order[100, -2] == 1
    rotate(model, residual=order)
    most = float(before.detach().abs().max())
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-4 * most)
    hook = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(IDS)
    hook.remove()
    squares = seen[0][0].square().mean(0)
    assert squares[:-128].mean() < squares[-128:].mean()
    assert squares[-2:].min() > 2 * squares.mean()


def test_an_order_of_a_stream_with_nan_names_the_block():
    model = model_of()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"model\.layers\.1 norms NaN or Inf"):
        stream_order(model, [IDS])


def test_a_rotated_model_is_refused():
    model = model_of()
    rotate(model)
    with pytest.raises(ValueError, match="has rotated inputs, whose order 'atom' cannot fold"):
        quantize(model)
