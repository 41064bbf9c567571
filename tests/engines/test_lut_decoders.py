"""Do both compiled decoders read lookup-table planes at every width that has a table?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, random_model
from lut_models import lut_packed

from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.weights import joined
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
IDS = torch.randint(1, 199, (2, 21), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize(("name", "stored", "least"), [("llama-tied-biases", 5, 2), ("phi3", 4, 3)])
def test_every_width_in_the_decoder_of_a_device_is_that_of_the_modules(name, stored, least):
    model = lut_packed(random_model(name, torch.bfloat16, **SHAPE), stored, least)
    decoder, outputs = CudaDecoder(model), []
    for count in range(stored, least - 1, -1):
        out = torch.stack(Lanes(decoder, 2).feed(IDS, bits=Bits(count, 16)))
        with precision_switch(model).at(f"planes{count}"), torch.no_grad():
            modules = model(torch.tensor(IDS)).logits
            assert torch.equal(torch.stack(Lanes(decoder, 2).feed(IDS)), outputs[0] if outputs else out)
        assert (out - modules).abs().max() < 0.08 * modules.abs().max(), count
        outputs.append(out)
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    with pytest.raises(ValueError, match=rf"are \({least - 1}, 16\), choose one of"):
        Lanes(decoder, 2).feed(IDS, bits=Bits(least - 1, 16))


def test_linears_that_are_multiplied_as_one_have_tables_of_the_same_widths():
    attention = lut_packed(random_model("llama", torch.bfloat16, **SHAPE), 4, 2).model.layers[0].self_attn
    modules = [getattr(attention, f"{name}_proj") for name in "qkv"]
    assert joined(modules, "qkv").out_features == sum(module.out_features for module in modules)
    other = lut_packed(random_model("llama", torch.bfloat16, **SHAPE), 4, 3).model.layers[0].self_attn
    modules[1] = other.k_proj
    with pytest.raises(UnknownArchitecture, match="qkv projections are 3 weights of 2 kinds"):
        joined(modules, "qkv")
