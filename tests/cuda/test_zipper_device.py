"""On a GPU: do both parts of zipper weights multiply as on the CPU, row by row, and is the part of a host refused?"""

from __future__ import annotations

import pytest
import torch
from models import prompts, tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig, ops
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES

# plain torch adds the high part there
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel for zipper_high_linear on cuda")
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("mode", MODES)
def test_products_rows_and_tiles(mode):
    draw = torch.Generator().manual_seed(0)
    weight = ZipperWeight.from_dense(torch.randn(200, 1152, generator=draw), mode=mode)
    x = torch.randn(33, 1152, generator=draw)
    on_disk = tuple(part.cuda() for part in weight.parts)
    tiles = ops.prepack_zipper(*on_disk)
    again = ops.unprepack_zipper(*tiles, 200)
    assert all(torch.equal(own, other) for own, other in zip(again, on_disk, strict=True))
    for low_only in (False, True):
        y = ops.zipper_linear(x.cuda(), tiles, 200, how=weight.how, low_only=low_only)
        exact = x.bfloat16().double() @ weight.dequantize(torch.float64, low_only=low_only).T
        bound = 2.0**-7 * exact.abs().amax()  # a low part is rounded to bfloat16 by kernels that write no float32
        assert ((y.cpu().double() - exact).abs() <= bound).all()
        for row in (0, 7, 32):
            alone = ops.zipper_linear(x[row : row + 1].cuda(), tiles, 200, how=weight.how, low_only=low_only)
            assert torch.equal(alone, y[row : row + 1])


def model_of(folder, **options):
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny(seed=2, dtype=torch.bfloat16, **shape).save_pretrained(folder)
    config = MLSpecConfig("zipper", **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    return model.eval().cuda()


def test_a_model_runs_module_by_module_and_drafts(tmp_path, caplog):
    model = model_of(tmp_path, mode="clamp")
    inputs = {name: tensor.cuda() for name, tensor in prompts([8, 5]).items()}
    written = model.generate(**inputs, **GREEDY, assistant_models=["zipper-low"])
    assert written.shape[1] == inputs["input_ids"].shape[1] + 24
    assert hf_mlspec.last_stats(model).levels[0].accepted > 0
    assert "linears are zipper, which the CUDA decoder does not read" in caplog.text
    saved = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in saved.items())


def test_the_part_of_the_host_is_refused(tmp_path):
    model = model_of(tmp_path, high_part="host")
    with pytest.raises(ValueError, match="high_part='host' on a GPU is not built yet"):
        model(prompts([8])["input_ids"].cuda())
