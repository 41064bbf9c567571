"""Are QSpec's fused tensors split into the layers they hold, row for row?"""

import pytest
import torch
from safetensors.torch import save_file

from hf_mlspec.checkpoints.qspec import StoredRows, sort_checkpoint
from hf_mlspec.checkpoints.safetensors_file import read_header
from tests.checkpoints.rotated_files import CONFIG, INDEXED, LAYER, folder, held, read

QWEN = {**CONFIG, "model_type": "qwen2_quarot"}
FUSED = {"self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
         "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}  # fmt: skip


def qwen_file():
    tensors, meant = folder()
    for whole, parts in FUSED.items():
        for kind in ("weight", "weight_scales"):
            rows = []
            for part in parts:
                rows += tensors.pop(f"{LAYER}.{part}.{kind}").tolist()
            dtype = torch.uint8 if kind == "weight" else torch.float16
            tensors[f"{LAYER}.{whole}.{kind}"] = torch.tensor(rows, dtype=dtype)
    tensors[f"{LAYER}.self_attn.qkv_proj.bias"] = torch.arange(288).half()
    return tensors, meant


def require_meant(checkpoint, meant):
    assert set(checkpoint.layers) == set(meant)
    for name, (ints, scale) in meant.items():
        plan = checkpoint.reader.plan(checkpoint.layers[name])
        assert plan.format == "int4"
        assert torch.equal(read(plan).weight.dequantize(), ints.float() * scale.float())


def test_the_llama_layout_is_quarots():
    tensors, meant = folder()
    require_meant(sort_checkpoint(held(tensors), CONFIG), meant)


def test_fused_rows_are_split_bit_for_bit():
    tensors, meant = qwen_file()
    checkpoint = sort_checkpoint(held(tensors), QWEN)
    require_meant(checkpoint, meant)
    assert checkpoint.rotation.down_proj == 96
    assert checkpoint.others[f"{LAYER}.self_attn.q_proj.bias"].load().tolist() == list(range(192))
    assert checkpoint.others[f"{LAYER}.self_attn.k_proj.bias"].load().tolist() == list(range(192, 240))
    assert checkpoint.others[f"{LAYER}.self_attn.v_proj.bias"].load().tolist() == list(range(240, 288))


def test_a_file_of_safetensors(tmp_path):
    tensors, meant = qwen_file()
    save_file(tensors, tmp_path / "model.safetensors")
    stored, _ = read_header(tmp_path / "model.safetensors")
    require_meant(sort_checkpoint({tensor.name: tensor for tensor in stored}, QWEN), meant)


def test_o_and_down_may_have_no_index():
    tensors, meant = qwen_file()
    for plain, indexed in INDEXED.items():
        for kind in ("weight", "weight_scales"):
            tensors[f"{LAYER}.{plain}.{kind}"] = tensors.pop(f"{LAYER}.{indexed}.{kind}")
    require_meant(sort_checkpoint(held(tensors), QWEN), meant)


def test_llamas_o_has_its_index():
    tensors, _ = folder()
    tensors[f"{LAYER}.self_attn.o_proj.weight"] = tensors.pop(f"{LAYER}.self_attn.o_proj.1.weight")
    with pytest.raises(ValueError, match=r"o_proj.1.weight is missing"):
        sort_checkpoint(held(tensors), CONFIG)


def test_a_slice_of_rows_is_a_stored_tensor():
    rows = StoredRows(held({"w": torch.arange(12).view(6, 2)})["w"], 2, 4)
    assert (rows.shape, rows.dtype, rows.place) == ((2, 2), torch.int64, "rows 2 to 3 of w in f")
    assert rows.load().tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.update({f"{LAYER}.mlp.gate_proj.weight": torch.ones(96, 96, dtype=torch.uint8)}),
     r"gate_up_proj.weight in f and model.layers.0.mlp.gate_proj.weight hold the same layer"),
    (lambda t: t.update({f"{LAYER}.mlp.gate_up_proj.weight": torch.ones(190, 96, dtype=torch.uint8)}),
     r"gate_up_proj.weight in f has shape \[190, 96\], expected 192 rows, 96 \+ 96"),
    (lambda t: t.update({f"{LAYER}.self_attn.o_proj.weight": torch.ones(192, 96, dtype=torch.uint8)}),
     r"o_proj.weight in f and model.layers.0.self_attn.o_proj.1.weight hold the same layer"),
    (lambda t: t.pop(f"{LAYER}.self_attn.qkv_proj.weight"), r"q_proj.weight is missing"),
    (lambda t: t.update({f"{LAYER}.mlp.up_gate_proj.weight": torch.ones(1)}), r"up_gate_proj.weight in f: this"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(change, message):
    tensors, _ = qwen_file()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        sort_checkpoint(held(tensors), QWEN)


@pytest.mark.parametrize("name", ["gate_up_proj", "up_gate_proj"])
def test_llama_with_a_fused_tensor_is_refused(name):
    tensors = {**folder()[0], f"{LAYER}.mlp.{name}.weight": torch.ones(1)}
    with pytest.raises(ValueError, match=rf"mlp.{name}.weight holds several layers in one tensor"):
        sort_checkpoint(held(tensors), CONFIG)


def test_another_model_is_refused():
    with pytest.raises(ValueError, match=r"model_type is 'llama', expected 'llama_quarot' or 'qwen2_quarot'"):
        sort_checkpoint({}, {"model_type": "llama"})


def test_a_missing_online_matrix_is_refused():
    tensors, _ = qwen_file()
    del tensors[f"{LAYER}.mlp.down_proj.0.had_rem_dim"]
    checkpoint = sort_checkpoint(held(tensors), QWEN)
    with pytest.raises(ValueError, match=r"down_proj: had_rem_dim is missing"):
        checkpoint.reader.plan(checkpoint.layers[f"{LAYER}.mlp.down_proj"])
