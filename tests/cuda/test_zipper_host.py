"""On a GPU: is the high part that the CPU adds that of the weight, on every row, or is its failure the call's?"""

from __future__ import annotations

import warnings

import pytest
import torch
from linear_cases import DEVICE
from models import prompts
from test_zipper_on_gpu import WHOLE, on_gpu
from torch import nn

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import HEADER, LOW, MODES
from hf_mlspec.formats.zipper import WHOLE as BOTH
from hf_mlspec.nn import zipper_host
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.nn.zipper_host import HostWorker, worker_of

pytestmark = pytest.mark.usefixtures("kernels_are_required")
OPTIONS = {"do_sample": False, "max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0}


def layer(out: int = 200, size: int = 1152, dense: torch.Tensor | None = None, **options) -> ZipperLinear:
    draw = torch.Generator().manual_seed(out)
    dense = torch.randn(out, size, generator=draw) / size**0.5 if dense is None else dense
    weight = ZipperWeight.from_dense(dense, high_part="host", **options)
    bias = nn.Parameter(torch.randn(len(dense), generator=draw), requires_grad=False)
    return ZipperLinear(weight, bias, PrecisionSwitch("zipper")).to(DEVICE)


@pytest.mark.parametrize("mode", MODES)
def test_both_parts_are_the_whole_weight_and_a_row_stands_alone(mode):
    module = layer(mode=mode)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(33, 1152, device=DEVICE)
    y = module(x)
    assert len(module.weight_split) == HEADER  # the terms are in the host's memory
    assert module.high_on_host().split.device.type == "cpu"
    weight = module.dequantized(torch.float32).double().to(DEVICE)
    exact = x.bfloat16().double() @ weight.T + module.bias.double()
    assert (y.double() - exact).abs().max() < 2e-5 * exact.abs().max()
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(32, 33)):
        assert torch.equal(module(x[rows]), y[rows])
    assert torch.equal(module(x.view(3, 11, 1152)), y.view(3, 11, -1))
    again = module.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    back = module.cpu().state_dict()
    assert all(torch.equal(back[name], tensor.cpu()) for name, tensor in saved.items())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_low_part_meets_integers_and_the_hosts_part_does_not(bits):
    module, x = layer(mode="paper"), torch.randn(9, 1152, device=DEVICE)
    on_device = ops.prepack_zipper(*(part.to(DEVICE) for part in module.packed_weight().parts))
    expected = ops.zipper_linear(x, on_device, 200, module.bias, how=module.how, activation_bits=bits)
    with module.switch.at(BOTH._replace(activation=bits)):
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_without_a_high_part_never_calls_the_worker(monkeypatch):
    monkeypatch.setattr(zipper_host, "worker_of", lambda device: pytest.fail("the worker was called"))
    dense = torch.zeros(40, 64)
    dense[:, 1] = 1.0  # 31 steps: a high part
    with pytest.raises(pytest.fail.Exception, match="the worker was called"):
        layer(dense=dense)(torch.ones(2, 64, device=DEVICE))
    module = layer(dense=torch.zeros(40, 64))
    assert torch.equal(module(torch.ones(2, 64, device=DEVICE)), module.bias.expand(2, -1))


def test_a_worker_that_fails_is_the_error_of_the_call(monkeypatch):
    module, x = layer(), torch.randn(3, 1152, device=DEVICE)
    before = module(x)

    def broken(seen, weights, sums):
        raise MemoryError("no memory for tables")

    with monkeypatch.context() as patch:
        patch.setattr(zipper_host, "high_sums", broken)
        with pytest.raises(MemoryError, match="no memory for tables"):
            module(x)
    assert torch.equal(module(x), before)


def test_an_error_of_the_device_in_flight_is_the_error_of_the_call(monkeypatch):
    """What CUDA reports where the worker waits for x: nothing is added, and the next call has its room again."""
    module, x = layer(), torch.randn(3, 1152, device=DEVICE)
    before = module(x)

    def lost(event):
        raise RuntimeError("CUDA error: unspecified launch failure")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Event, "synchronize", lost)
            with pytest.raises(RuntimeError, match="CUDA error: unspecified launch failure"):
                module(x)
        assert torch.equal(module(x), before)


def test_a_worker_that_fails_in_a_chain_gives_no_token(monkeypatch):
    model = hf_mlspec.prepare(host_model(), engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9]).items()}
    alone = model.generate(**inputs, **OPTIONS, assistant_models=[])
    calls, own = [0], zipper_host.high_sums

    def dies_late(seen, weights, sums):
        calls[0] += 1
        if calls[0] == 40:
            raise SystemExit("the worker dies")
        own(seen, weights, sums)

    with monkeypatch.context() as patch:
        patch.setattr(zipper_host, "high_sums", dies_late)
        with pytest.raises(BaseException, match="the worker dies"):
            model.generate(**inputs, **OPTIONS, assistant_models=["zipper-low"])
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_models=["zipper-low"]), alone)


def test_without_pinned_memory_copies_are_slow_and_right(monkeypatch):
    module, x = layer(), torch.randn(3, 1152, device=DEVICE)
    expected, worker, empty = module(x), HostWorker(x.device), torch.empty

    def refused(*shape, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(zipper_host, "worker_of", lambda device: worker)
    monkeypatch.setattr(torch, "empty", refused)
    with pytest.warns(RuntimeWarning, match="zipper: no pinned memory on the host"):
        assert torch.equal(module(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch.equal(module(x), expected)


def test_a_graph_cannot_hold_it():
    module, x = layer(), torch.randn(3, 1152, device=DEVICE)
    module(x)
    refused = pytest.raises(RuntimeError, match="cannot be captured in a graph: use high_part='device'")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(x)
    torch.cuda.synchronize()
    assert module(x).isfinite().all()


def test_one_thread_and_many_give_the_same_bits():
    module, x, threads = layer(), torch.randn(9, 1152, device=DEVICE), torch.get_num_threads()
    many = module(x)
    try:
        torch.set_num_threads(1)
        assert torch.equal(module(x), many)
    finally:
        torch.set_num_threads(threads)
    assert worker_of(x.device) is worker_of(x.device)


def host_model(**options) -> nn.Module:
    return on_gpu(shape=WHOLE, high_part="host", **options)


@pytest.mark.parametrize("engine", ["cuda", "modules"])
def test_chains_write_what_the_target_alone_writes(engine):
    model = hf_mlspec.prepare(host_model(), engine=engine)
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40]).items()}
    alone = model.generate(**inputs, **OPTIONS, assistant_models=[])
    chain = model.generate(**inputs, **OPTIONS, assistant_models=["zipper-low"])
    assert torch.equal(chain, alone) or engine == "modules"  # torch's attention there is not the same in every batch
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0


def test_a_decoder_shares_what_the_host_holds_and_captures_drafts_alone():
    model = host_model()
    decoder = CudaDecoder(model)
    assert decoder.extra_bytes == 0
    assert not decoder.captures(BOTH)
    assert decoder.captures(LOW)
    attention = model.model.layers[0].self_attn
    assert len(attention.q_proj.weight_split) == HEADER
    device = CudaDecoder(on_gpu(shape=WHOLE))
    assert device.captures(BOTH)
    x = torch.randn(5, WHOLE["hidden_size"], device=DEVICE).bfloat16()
    ours, theirs = decoder._layers[0].qkv(x, BOTH), device._layers[0].qkv(x, BOTH)
    assert (ours.float() - theirs.float()).abs().max() <= 2**-7 * theirs.float().abs().max()


def test_the_op_on_the_device_gives_the_same_number():
    module, x = layer(mode="exact"), torch.randn(3, 1152, device=DEVICE)
    weight = module.packed_weight()
    tiles = ops.prepack_zipper(*weight.parts)
    on_device = ops.zipper_linear(x, tiles, 200, module.bias, how=weight.how)
    torch.testing.assert_close(module(x), on_device, rtol=1e-5, atol=1e-5)
