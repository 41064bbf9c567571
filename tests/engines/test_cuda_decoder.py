"""Does the decoder of a device compute what the model's modules do, whatever stands beside a token in the call?"""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from decoders import CONFIGS, Lanes, capped, packed_model, ragged_rows_agree, random_model
from torch import nn
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines import architecture
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.capturing import capturing
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.served import require_bfloat16, require_served
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS, Bits

compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
LENGTH = 41


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


def random_ids(batch: int, length: int = LENGTH) -> list[list[int]]:
    return torch.randint(1, 199, (batch, length), generator=torch.Generator().manual_seed(7)).tolist()


def scored(model: nn.Module, ids: list[list[int]], bits: Bits = OWN_BITS) -> torch.Tensor:
    """All tokens of all rows in one call: `[batch, length, vocab]`."""
    return torch.stack(Lanes(CudaDecoder(model), len(ids)).feed(ids, bits=bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_within_twice_the_error_of_the_modules(name, dtype):
    model, ids = random_model(name, dtype), random_ids(2)
    with torch.no_grad():
        stock = model(torch.tensor(ids)).logits.double()
    decoder = CudaDecoder(model)
    out = capped(torch.stack(Lanes(decoder, 2).feed(ids)), decoder)
    with torch.no_grad():
        exact = model.double()(torch.tensor(ids)).logits
    assert (out - exact).abs().max() <= 2 * (stock - exact).abs().max()
    assert (stock - exact).abs().max() > 0


@compiled
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_compiled_decoder_of_the_cpu_but_for_rounding(name):
    model, ids = random_model(name, torch.float32), random_ids(2)
    decoder = CudaDecoder(model)
    out = capped(torch.stack(Lanes(decoder, 2).feed(ids)), decoder)
    runner = CpuEngine(model, CpuDecoder(model), capacity=LENGTH)
    runner.start(2, torch.device("cpu"))
    other = runner.feed([row[:1] for row in ids], Guess(torch.tensor(ids)[:, 1:], [LENGTH - 1] * 2))
    torch.testing.assert_close(out.float(), other, atol=1e-5, rtol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_do_not_depend_on_the_grouping(name, dtype):
    """One by one, in chunks, alone, beside rows of other lengths and rows at rest, behind padding: the same bits."""
    decoder, ids = CudaDecoder(random_model(name, dtype)), random_ids(3)
    together = torch.stack(Lanes(decoder, 3).feed(ids))
    single = Lanes(decoder, 3)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in ids])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), together)
    assert torch.equal(Lanes(decoder, 1, slots=200).feed(ids[1:2], padding=5)[0], together[1])
    ragged = Lanes(decoder, 3, rows=5)
    ragged_rows_agree(ragged, ids, together, 30, 9)
    assert (ragged.cache[:, :, 3:] == 1e4).all()  # rows that are not of the call


@compiled
@pytest.mark.parametrize("weights", ["int4", "mxfp4"])
def test_bits_of_a_packed_model_do_not_depend_on_the_grouping(weights):
    decoder, ids = CudaDecoder(packed_model("qwen3", weights)), random_ids(2)
    for bits in decoder.bit_choices:
        together = torch.stack(Lanes(decoder, 2).feed(ids, bits=bits))
        single = Lanes(decoder, 2)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids], bits=bits)) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together), bits


@pytest.mark.parametrize(("weights", "settings"), [("mxfp4", {}), ("int4", {}), ("int4", {"symmetric": False})])
@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3", "gemma3", "phi3"])
def test_packed_weights_are_near_their_modules(name, weights, settings):
    """At every width of activations, said by the call or by the switch, head packed or dense."""
    model, ids = packed_model(name, weights, keep_head=weights == "int4", **settings), random_ids(1)
    for bits, tolerance in ((16, 0.02), (8, 0.02), (4, 0.2)):
        if bits not in precision_switch(model).choices:
            continue
        out = scored(model, ids, Bits(4, bits))[0]
        with precision_switch(model).at(bits), torch.no_grad():
            modules = model(torch.tensor(ids)).logits[0]
            assert torch.equal(scored(model, ids)[0], out)
        assert (out - modules).abs().max() < tolerance * modules.abs().max(), bits


def test_dequantized_first_it_is_near_the_fused_product():
    model, ids = packed_model(dtype=torch.bfloat16), random_ids(1)
    fused, coarse = scored(model, ids), scored(model, ids, Bits(4, 8))
    precision_switch(model).multiply = "dequant"
    dequantized = scored(model, ids)
    assert 0 < (dequantized - fused).abs().max() < 0.1 * fused.abs().max()
    assert torch.equal(scored(model, ids, Bits(4, 8)), coarse)


def test_logits_of_all_tokens_or_of_those_asked_for():
    decoder = CudaDecoder(random_model("llama", torch.float32))
    ids = torch.tensor(random_ids(2, 5), dtype=torch.int32)
    zeros, counts = torch.zeros(2, dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32)
    whole = decoder.forward(ids, zeros, counts, new_kv(decoder, 2, 8))
    assert whole.shape == (10, decoder.vocab_size)
    picked = decoder.forward(ids, zeros, counts, new_kv(decoder, 2, 8), pick=torch.tensor([9, 4, 4]))
    torch.testing.assert_close(picked, whole[[9, 4, 4]])


def test_more_positions_than_at_first():
    """New tables, a new fingerprint, the same logits; longer than the first tables reach it still is the model."""
    model = random_model("llama", torch.float32, max_position_embeddings=4096)
    decoder, ids = CudaDecoder(model), random_ids(1, 1100)
    before = decoder.fingerprint
    decoder.reserve_positions(1100)
    assert decoder.positions == 2048
    assert decoder.fingerprint != before
    with torch.no_grad():
        torch.testing.assert_close(
            Lanes(decoder, 1, slots=1100).feed(ids)[0], model(torch.tensor(ids)).logits[0], atol=1e-4, rtol=1e-4
        )
    decoder.reserve_positions(2048)
    assert decoder.positions == 2048


def test_positions_end_where_the_rotation_changes():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    decoder = CudaDecoder(random_model("llama", torch.float32, rope_parameters=rope))
    decoder.reserve_positions(5000)
    assert decoder.positions == decoder.max_positions == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kv: {"kv": kv[:-1]}, r"kv has shape \[2, 2, 2, 2, 8, 16\], 2 rows of this model take \[3, 2, 2, "),
        (lambda kv: {"kv": kv[0]}, "kv has shape"),
        (lambda kv: {"kv": kv.bfloat16()}, "kv is torch.bfloat16 on cpu, the model is torch.float32 on cpu"),
        (lambda kv: {"bits": Bits(0, 8)}, r"bits .* are \(0, 8\), and no weights are packed"),
        (lambda kv: {"ids": torch.ones(2, dtype=torch.int32)}, r"ids has shape \[2\]"),
    ],
)
def test_operands_that_do_not_fit_are_named_before_anything_is_written(change, words):
    decoder = CudaDecoder(random_model("llama", torch.float32))
    kv, ones = new_kv(decoder, 2, 8), torch.ones(2, dtype=torch.int32)
    operands = {"ids": ones[:, None], "starts": ones, "counts": ones, "kv": kv, **change(kv)}
    with pytest.raises(ValueError, match=words):
        decoder.forward(**operands)
    assert not kv.any()


def test_a_width_is_one_of_the_weights():
    decoder = CudaDecoder(packed_model(weights="mxfp4"))
    with pytest.raises(ValueError, match=r"are \(0, 4\), choose one of \(4, 16\), \(4, 8\), or 0"):
        Lanes(decoder, 1).feed([[5]], bits=Bits(activation=4))


@pytest.mark.filterwarnings("ignore:direct_cast:UserWarning")  # 172 is no multiple of 32
def test_a_decoder_is_kept_until_the_weights_change():
    model = random_model("llama", torch.float32)
    first = decoder_of(model, "cuda")
    assert decoder_of(model, "cuda") is first
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    second = decoder_of(model, "cuda")
    assert second is not first
    assert second.fingerprint != first.fingerprint
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert decoder_of(model, "cuda") is None
    hf_mlspec.direct_cast(model, cast_head=False)  # another view of some of its tensors changes nothing
    assert decoder_of(model, "cuda") is second


def test_a_decoder_lets_go_of_weights_that_the_model_left():
    model = random_model("llama", torch.bfloat16)
    decoder = weakref.ref(decoder_of(model, "cuda"))
    assert decoder() is not None
    model.half()
    assert decoder_of(model, "cuda") is None
    assert decoder() is None


@compiled
def test_beside_the_decoder_of_the_cpu_neither_is_built_again():
    model = random_model("llama", torch.float32)
    decoder_of(model, "cuda")  # weights move once
    built = decoder_of(model, "cpu"), decoder_of(model, "cuda")
    assert built == (decoder_of(model, "cpu"), decoder_of(model, "cuda"))


def test_a_decoder_is_not_built_while_a_graph_is_captured():
    """To build one waits for the whole device, which spoils a capture of another thread."""
    model, built = random_model("llama", torch.float32), []
    thread = threading.Thread(target=lambda: built.append(decoder_of(model, "cuda")))
    with capturing:
        thread.start()
        thread.join(0.3)
        assert not built
    thread.join()
    assert built == [decoder_of(model, "cuda")]


def test_what_it_does_not_know_is_said_once(tiny_model, caplog):
    model = tiny_model("persimmon")
    assert decoder_of(model, "cuda") is None
    assert decoder_of(model, "cuda") is None
    assert caplog.text.count("PersimmonForCausalLM runs module by module: the compiled decoder does not know") == 1


def test_a_model_on_two_devices_is_said(caplog):
    model = random_model("llama", torch.float32)
    model.model.layers[1].to("meta")
    assert decoder_of(model, "cuda") is None
    assert "it is on meta" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 24}, "its heads have 24 elements, the attention kernel takes multiples of 16 up to 256"),
        ({"head_dim": 272}, "its heads have 272 elements, the attention kernel takes multiples of 16 up to 256"),
        ({}, "its down has 172 inputs, the GPU kernels take multiples of 8"),
    ],
)
def test_sizes_that_the_kernels_of_a_gpu_do_not_take(options, reason):
    found = architecture.outline(random_model("llama", torch.bfloat16, **options))
    with pytest.raises(UnknownArchitecture, match=reason):
        require_served(found)


def test_a_weight_that_starts_anywhere_is_not_loaded_by_wide_loads():
    model = random_model("llama", torch.bfloat16, intermediate_size=176)
    require_served(architecture.outline(model))
    down = model.model.layers[2].mlp.down_proj
    memory = torch.zeros(down.weight.numel() + 1, dtype=torch.bfloat16)
    down.weight.data = memory[1:].view_as(down.weight)
    with pytest.raises(UnknownArchitecture, match="its down does not start at a multiple of 16 bytes in memory"):
        require_served(architecture.outline(model))


def test_a_gpu_takes_bfloat16():
    with pytest.raises(UnknownArchitecture, match=r"its weights are torch\.float32, on cuda:0 load it in bfloat16"):
        require_bfloat16(random_model("llama", torch.float32), torch.device("cuda:0"))
    require_bfloat16(random_model("llama", torch.bfloat16), torch.device("cuda:0"))
