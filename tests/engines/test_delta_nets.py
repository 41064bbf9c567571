"""Are states of gated delta nets and Mamba-2 those of the tokens before them, whatever is fed, taken back, moved?"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from decoders import HYBRIDS, PACKED_SHAPE, packed_model, random_model
from models import packed
from rows_with_states import LENGTH, ids, logits_behind, read_again

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.recurrent import MOST_WINDOW
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

CPU = torch.device("cpu")


def engine_over(model, rows: int = 1, follow: CpuEngine | None = None, decoder: CpuDecoder | None = None) -> CpuEngine:
    made = CpuEngine(model, decoder or CpuDecoder(model), follow=follow, capacity=LENGTH + 1)
    made.start(rows, CPU)
    return made


def alone(model, row: list[int]) -> torch.Tensor:
    return logits_behind(model, engine_over, row)


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3.5", torch.float32)


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_forward_is_that_of_the_modules(name):
    model, row = random_model(name, torch.float32), ids()[0]
    with torch.no_grad():
        stock = model(torch.tensor([row])).logits[0]
    found = engine_over(model).feed([row[:1]], Guess(torch.tensor([row[1:]]), [LENGTH - 1]))[0]
    assert float((found - stock).norm() / stock.norm()) < 1e-4
    half = random_model(name, torch.bfloat16)
    half = engine_over(half).feed([row[:1]], Guess(torch.tensor([row[1:]]), [LENGTH - 1]))[0]
    best = stock.gather(1, half.argmax(-1, keepdim=True))[:, 0]
    assert float(((stock.max(-1).values - best) / stock.std(-1)).median()) <= 0.05


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-taps", "qwen3-next", "mamba2", "granite-hybrid"])
@pytest.mark.parametrize("accepted", range(6))
def test_a_check_leaves_what_was_accepted(name, accepted):
    model, (row, other) = random_model(name, torch.bfloat16), ids(2)
    engine = engine_over(model)
    guess = row[20 : 20 + accepted] + [token % 190 + 5 for token in other[: 5 - accepted]]
    engine.score([row[:20]], [guess])
    engine.lengths = [20 + accepted]
    longer = row[: 21 + accepted]
    assert torch.equal(engine.feed([longer])[0, 0], alone(model, longer))
    assert engine.forwards == 2  # nothing was read again


def test_nothing_accepted_for_many_rounds(model):
    row, engine = ids()[0], engine_over(model)
    for round in range(12):
        engine.score([row[:20]], [ids(seed=round)[0][:7]])
        engine.lengths = [19 + round % 2]
    assert torch.equal(engine.feed([row[:20]])[0, 0], alone(model, row[:20]))


def test_many_single_tokens_then_a_step_back(model):
    row, engine = ids()[0], engine_over(model)
    for end in range(1, 41):
        engine.feed([row[:end]])
    engine.lengths = [38]  # one back: a state is there
    assert torch.equal(engine.feed([row[:39]])[0, 0], alone(model, row[:39]))


@pytest.mark.parametrize("back", [30, 3, 0])
def test_a_row_without_its_state_is_read_again(model, back):
    read_again(model, engine_over, back)


def test_a_row_that_begins_anew_knows_its_first_inputs(model):
    row, engine = ids(length=60)[0], engine_over(model)
    for end in range(1, 61):
        engine.feed([row[:end]])
    engine.lengths = [0]
    engine.score([row[:20]], [row[20:26]])
    engine.lengths = [4]
    before = engine.forwards
    assert torch.equal(engine.feed([row[:5]])[0, 0], alone(model, row[:5]))
    assert engine.lengths == [5]
    assert engine.forwards == before + 1
    engine.score([row[:5]], [row[5:45]])  # a wider window
    engine.lengths = [30]
    assert torch.equal(engine.feed([row[:31]])[0, 0], alone(model, row[:31]))


@pytest.mark.parametrize("length", [40, MOST_WINDOW + 60])
def test_long_drafts(model, length):
    row, engine = ids(length=MOST_WINDOW + 90)[0], engine_over(model)
    engine.score([row[:20]], [row[20 : 20 + length]])
    engine.lengths = [20 + length - 5]
    longer = row[: 20 + length - 4]
    assert torch.equal(engine.feed([longer])[0, 0], alone(model, longer))


def test_rows_are_moved_joined_and_forgotten(model):
    rows = ids(4)
    engine = engine_over(model, 3)
    engine.score([rows[0][:9], rows[1][:30], rows[2][:17]], [[], [5, 6, 7], [8]])
    engine.lengths = [9, 31, 17]
    engine.select([2, 1])
    engine.admit(2)
    engine.forget(0)
    fed = [rows[3][:11], [*rows[1][:30], 5, 9], rows[0][:3], rows[2][:6]]
    found = engine.feed(fed, alive=[True, True, False, True])[:, 0]
    for r in (0, 1, 3):
        assert torch.equal(found[r], alone(model, fed[r]))


@pytest.mark.parametrize(("name", "layers"), [("qwen3.5", None), ("qwen3.5", 2), ("qwen3.5", 1), ("mamba2", None),
                                              ("mamba2", 2), ("granite-hybrid", 1)])  # fmt: skip
def test_a_follower_begins_with_the_state_of_its_leader(name, layers):
    model = random_model(name, torch.float32)
    draft = model if layers is None else hf_mlspec.early_exit(model, layers)
    rows = ids(2)
    leader = engine_over(model, 2)
    follower = engine_over(draft, 2, follow=leader)
    fed = [rows[0][:20], rows[1][:9]]
    leader.score(fed, [[], []])
    for _ in range(2):
        follower.lengths = list(leader.lengths)
        drafted = follower.draft(fed, [5, 3], 0.0)
        for row, new in zip(fed, drafted, strict=True):
            own = engine_over(draft)
            assert own.draft([row], [len(new)], 0.0) == [new]
        found = leader.score(fed, drafted).best
        fed = [row + new[:2] + [best[2]] for row, new, best in zip(fed, drafted, found, strict=True)]
        leader.lengths = [len(row) - 1 for row in fed]
    assert leader.feed(fed).equal(torch.stack([alone(model, row) for row in fed])[:, None])


def test_an_interrupted_check(model, monkeypatch):
    row, engine = ids()[0], engine_over(model)
    engine.feed([row[:20]])
    with monkeypatch.context() as broken:
        broken.setattr("hf_mlspec.engines.cpu.engine.Scores", None)  # the call is done, what it says is lost
        with pytest.raises(TypeError):
            engine.score([row[:21]], [[4, 5, 6]])
    engine.lengths = [20]
    assert torch.equal(engine.feed([row[:22]])[0, 0], alone(model, row[:22]))


class Planes:
    """Where a model "streams" planes from that are always there; `left` readings more, then it fails."""

    top, left = 1, 10**6

    def __init__(self, model):
        for linear in model.modules():
            if isinstance(linear, PlanesLinear):
                linear.source = self

    def alone(self):
        return nullcontext()

    def resident(self, linears):
        return [(*linear.prepack_().parts("weight")[:2], linear.out_features) for linear in linears]

    @contextmanager
    def reading(self, linear, num_planes):
        self.left -= 1
        if self.left < 0:
            raise OSError("no more planes")
        yield


def test_a_check_whose_planes_could_not_be_had():
    model = packed_model("qwen3.5", "planes", num_planes=4)
    source, row = Planes(model), ids()[0]
    engine, fresh = engine_over(model), alone(model, row[:13])
    engine.feed([row[:20]])
    source.left = 9  # behind the first layer: what it keeps of tokens is overwritten
    with pytest.raises(OSError, match="no more planes"):
        engine.score([row[:20]], [row[20:44]])
    source.left, engine.lengths = 10**6, [12]
    assert torch.equal(engine.feed([row[:13]])[0, 0], fresh)


def test_rounds_of_more_tokens_than_can_be_taken_back(model):
    row, count = ids()[0], MOST_WINDOW + 30
    middle = engine_over(model)
    tiny = engine_over(hf_mlspec.early_exit(model, 2), follow=middle)
    how = {"num_draft_tokens": count, "tiny_threshold": 0.0, "threshold": 0.0}
    (found,), *_ = middle.draft_checked(tiny, [row], [count], **how)
    assert found == engine_over(model).draft([row], [count], 0.0)[0]


def test_weights_in_two_formats_of_which_one_is_dequantized():
    model = random_model("qwen3.5", torch.bfloat16, **PACKED_SHAPE)
    dense = {name: own for name, own in model.named_modules() if name.endswith(("in_proj_b", "in_proj_a"))}
    packed(model, "int4")
    for name, own in dense.items():
        model.set_submodule(name, own)
    row = ids()[0]
    fused = alone(model, row)
    next(own for own in model.modules() if isinstance(own, PackedLinear)).switch.multiply = "dequant"
    assert float((alone(model, row) - fused).norm() / fused.norm()) < 0.05


def test_no_adapter_where_none_is_added(model):
    handle = CpuDecoder(model).handle
    with pytest.raises(ValueError, match=r"delta_out\.adapter: only q, k"):
        handle.set_adapter("delta_out", torch.ones(2, 160), torch.ones(64, 2))
    handle.set_adapter("down", torch.ones(2, 172), torch.ones(64, 2))
    with pytest.raises(ValueError, match=r"down\.hadamard: set the linear first, no adapter"):
        handle.set_hadamard("down", None, 4, 1)


def test_a_state_that_is_not_there_is_an_error(model):
    engine = engine_over(model)
    with pytest.raises(ValueError, match="goes on behind 7 tokens, and there is a state of 0"):
        engine.decoder.handle.score(
            engine.cache.kv, [3], [1], [7], [1], False, False, 0, 0, 0, engine.states.tensors, [0]
        )


def test_nets_that_no_decoder_runs():
    model = random_model("qwen3.5", torch.float32, hidden_act="gelu")
    with pytest.raises(UnknownArchitecture, match="linear_attn of layer 0 says gelu"):
        CpuDecoder(model)
    model = random_model("qwen3.5", torch.float32, linear_key_head_dim=260)
    with pytest.raises(UnknownArchitecture, match="heads of 260 and 40 elements"):
        CpuDecoder(model)


@pytest.mark.parametrize("weights", ["mxfp4", "int4", "nested"])
@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid"])
def test_packed_mamba_layers_compute_what_their_modules_do(name, weights):
    shape = {"num_heads": 12} if name == "mamba2" else {"mamba_n_heads": 12, "shared_intermediate_size": 160}
    shape["hidden_size"] = 96
    model, row = random_model(name, torch.bfloat16, **shape), ids()[0]
    packed(model, weights)
    places = [path for path, module in model.named_modules() if isinstance(module, PackedLinear)]
    assert sum(path.endswith("out_proj") for path in places) == sum(path.endswith("in_proj") for path in places) > 0
    with torch.no_grad():
        stock = model(torch.tensor([row])).logits[0].float()
    found = engine_over(model).feed([row[:1]], Guess(torch.tensor([row[1:]]), [LENGTH - 1]))[0]
    assert float((found - stock).norm() / stock.norm()) < 0.05
    engine = engine_over(model)
    engine.score([row[:20]], [row[20:27]])
    engine.lengths = [24]
    assert torch.equal(engine.feed([row[:25]])[0, 0], alone(model, row[:25]))


def test_a_model_without_attention_runs():
    model, row = random_model("qwen3.5", torch.float32, layer_types=["linear_attention"] * 3), ids()[0]
    with torch.no_grad():
        stock = model(torch.tensor([row]), use_cache=False).logits[0]
    found = engine_over(model).feed([row[:1]], Guess(torch.tensor([row[1:]]), [LENGTH - 1]))[0]
    assert float((found - stock).norm() / stock.norm()) < 1e-4


def test_mamba_layers_that_no_decoder_runs():
    model = random_model("mamba2", torch.float32, time_step_limit=(0.1, 0.5))
    with pytest.raises(UnknownArchitecture, match=r"time steps of layer 0 are bounded by \(0\.1, 0\.5\)"):
        CpuDecoder(model)
    model = random_model("mamba2", torch.float32, hidden_act="gelu")
    with pytest.raises(UnknownArchitecture, match="mixer of layer 0 says gelu"):
        CpuDecoder(model)
    model = random_model("mamba2", torch.float32, state_size=260)
    with pytest.raises(UnknownArchitecture, match="heads of 260 and 16 elements"):
        CpuDecoder(model)
    model = random_model("granite-hybrid", torch.float32, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UnknownArchitecture, match="num_local_experts=4"):
        CpuDecoder(model)


def test_a_layer_of_mamba_needs_its_skip():
    handle = CpuDecoder(random_model("mamba2", torch.float32)).handle
    handle.add_layer([None] * 12, 0, 0, None)
    channels = 128 + 2 * 2 * 12
    numbers = torch.ones(4, channels), torch.ones(8), torch.ones(8), torch.ones(128), 1e-5
    with pytest.raises(ValueError, match="a layer of Mamba-2 has skip"):
        handle.set_delta(*numbers, None, None)
