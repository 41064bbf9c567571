"""Do engines compute what codes of keys and values say, row by row as if alone, and hold so many bytes less?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import near, tiny
from warned import forget_warnings

from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.cuda.served import require_read
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.foreseen import why_not_decoded
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.modules.engine import ModuleEngine, bare_forward
from hf_mlspec.engines.rows import DecoderCache, require_memory
from hf_mlspec.formats import CACHE_FORMATS
from hf_mlspec.formats.cache import INT4, INT8
from hf_mlspec.nn.replace import direct_cast
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.checker import Checker, roll_back
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.rounds.caches import adopt
from hf_mlspec.speculation.rounds.chain import borrowed
from hf_mlspec.speculation.rounds.plan import round_levels
from hf_mlspec.speculation.sampling import Sampler

compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
CPU = torch.device("cpu")
ROWS = [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 5, 131)]
INT8_CONFIG = {"quant_method": "mlspec", "format": None, "kv_cache": "int8"}
LARGEST = {INT8: 254, INT4: 15}  # codes that a row whose ends are of one size has, at least
RECORDS = pytest.mark.parametrize("record", CACHE_FORMATS.values(), ids=CACHE_FORMATS)


def with_word(model, record=INT8):
    model.config.quantization_config = {**INT8_CONFIG, "kv_cache": record.word}
    return model


def require_codes_of(record, kept, seen) -> None:
    """That rows of codes are those of plain ones, but for what BF16 arithmetic rounds on the way."""
    if seen.dtype == torch.float32:
        assert torch.equal(kept, record.quantize(seen))
    step = 2 * seen.float().abs().amax(-1, keepdim=True) / LARGEST[record]
    assert ((record.dequantize(kept, torch.float32) - seen.float()).abs() <= step).all()


def started(model, batch: int, engine: str = "cpu", **options):
    if engine == "cpu":
        one = CpuEngine(model, CpuDecoder(model), **options)
    elif engine == "cuda":
        one = CudaEngine(model, CudaDecoder(model), **options)
    else:
        one = ModuleEngine(model, forward=bare_forward(model), **options)
    one.start(batch, CPU)
    return one


def fed(one, rows, guess=None):
    with torch.no_grad(), ragged_attention_on([one.model] if one.can.by_module else []):
        return one.feed(rows, guess)


@pytest.mark.parametrize("engine", [pytest.param("cpu", marks=compiled), "modules"])
@RECORDS
def test_half_the_bytes_or_a_third(engine, record):
    model = with_word(tiny(dtype=torch.bfloat16, head_dim=32), record)
    one = started(model, 3, engine)
    fed(one, ROWS)
    assert one.cache_format is record is one.kept_in
    row = {INT8: 36, INT4: 20}[record]
    assert one.bytes_per_token == 2 * 2 * 2 * row  # layers, keys and values, heads
    assert one.cache_bytes == one.bytes_per_token * 3 * 256
    del model.config.quantization_config
    assert started(model, 3, engine).bytes_per_token == 2 * 2 * 2 * 64


def test_memory_is_asked_for_rows_of_codes(monkeypatch):
    monkeypatch.setattr("hf_mlspec.engines.memory.available", lambda device: 2**27)
    model = tiny(dtype=torch.bfloat16, head_dim=512)
    slots = int(1.5 * 2**27 / ModuleEngine(model).bytes_per_token)
    with pytest.raises(torch.OutOfMemoryError):
        require_memory([ModuleEngine(model)], 1, CPU, longest=slots)
    assert require_memory([ModuleEngine(with_word(model))], 1, CPU, longest=slots) == ""


@compiled
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@RECORDS
def test_the_first_layer_holds_the_codes_of_what_a_plain_cache_holds(kind, dtype, record):
    model = tiny(kind, dtype=dtype)
    plain = started(model, 3)
    fed(plain, ROWS)
    coded = started(with_word(model, record), 3)
    fed(coded, ROWS)
    for row, tokens in enumerate(ROWS):
        require_codes_of(record, *(one.cache.kv[0, :, row, :, : len(tokens)] for one in (coded, plain)))
    assert not coded.cache.kv[..., 131:, :].any()  # nothing behind the rows


@compiled
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma3"])
@RECORDS
def test_compiled_steps_compute_what_modules_compute(kind, record):
    """Up to what instruction sets round over codes, which is far less than what codes change."""
    model = tiny(kind, dtype=torch.float32)
    plain = fed(started(model, 3), ROWS)[:, -1]
    with_word(model, record)
    ours, theirs = (fed(started(model, 3, engine), ROWS)[:, -1] for engine in ("cpu", "modules"))
    assert (ours - plain).norm() > 0
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
    assert (ours - theirs).norm() < (ours - plain).norm() * 2


@compiled
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@RECORDS
def test_a_token_has_the_same_bits_in_any_batch_and_any_width(kind, record):
    model = with_word(tiny(kind, dtype=torch.bfloat16), record)
    together = fed(started(model, 3), ROWS)[:, -1]
    for row, whole in zip(ROWS, together, strict=True):
        steps = started(model, 1)
        for end in range(1, len(row) + 1):
            last = fed(steps, [row[:end]])
        assert torch.equal(last[0, -1], whole)
        guessed = started(model, 1)
        fed(guessed, [row[:-4]])
        lines = fed(guessed, [row[:-3]], Guess(torch.tensor([row[-3:]]), [3]))
        assert torch.equal(lines[0, -1], whole)


@compiled
@RECORDS
def test_a_rollback_and_a_level_in_the_targets_cache_leave_its_bits(record):
    """The level computes with bfloat16 weights of its own and writes codes; the check writes its own over them."""
    model = with_word(tiny(seed=2, dtype=torch.bfloat16), record)
    cast = direct_cast(model)
    above = CpuEngine(model, CpuDecoder(model))
    below = CpuEngine(cast, CpuDecoder(cast), follow=above)
    checker = Checker(above, Sampler(64), "target", keep_logits=False)
    level = CheckedDrafter(checker, ModelDrafter(below, Sampler(64), "cast"), num_draft_tokens=3, threshold=0.0)
    level.start(2, CPU)
    assert below.cache is above.cache
    assert below.kept_in is record
    assert below.cache_bytes == 0
    rows = [list(ROWS[0]), list(ROWS[1])]
    settled = level.propose(rows, [6, 6])
    alone = started(model, 2)
    for row, tokens, count in zip(range(2), settled.tokens.tolist(), settled.lengths, strict=True):
        written, one = list(rows[row]), CpuEngine(model, alone.decoder)
        one.start(1, CPU)
        for token in tokens[:count]:
            best = one.score([written], [[]]).best[0][0]
            assert token == best
            written.append(token)
        end = len(written) - 1
        assert torch.equal(above.cache.kv[:, :, row, :, :end], one.cache.kv[:, :, 0, :, :end])


@compiled
@RECORDS
def test_rows_move_grow_and_leave_as_plain_keys_and_values(record):
    model = with_word(tiny(dtype=torch.bfloat16), record)
    one = started(model, 3)
    fed(one, ROWS)
    before = one.cache.kv.clone()
    one.cache.reserve(600)
    assert one.cache.kv.dtype == record.dtype
    assert torch.equal(one.cache.kv[..., :256, :], before)
    one.select([2, 0])
    assert torch.equal(one.cache.kv[:, :, 0, :, :131], before[:, :, 2, :, :131])
    one.admit(1)
    one.shrink(200)
    layers = one.cache.row(0, 0, 131)
    assert layers[0][0].dtype == torch.bfloat16
    other = DecoderCache.new(one.decoder, 1, 256, record)
    other.load([(keys[None], values[None]) for keys, values in layers], 131)
    assert torch.equal(other.kv[:, :, 0, :, :131], before[:, :, 2, :, :131])


@RECORDS
def test_modules_hold_codes_and_give_them_back(record):
    model = with_word(tiny("qwen3"), record)
    one = started(model, 2, "modules")
    fed(one, ROWS[:2])
    lane = one.cache.layers[1]
    assert lane.keys.dtype == record.dtype
    layers = one.cache.row(0, 0, 70)
    assert layers[0][0].dtype == torch.float64
    again = started(model, 1, "modules")
    again.cache.load([(keys[None], values[None]) for keys, values in layers], 70)
    for ours, theirs in zip(again.cache.layers, one.cache.layers, strict=True):
        assert torch.equal(ours.keys[0, :, :70], theirs.keys[0, :, :70])
        assert torch.equal(ours.values[0, :, :70], theirs.values[0, :, :70])
    one.select([1])
    one.admit(1)
    logits = fed(one, [ROWS[1] + [9], [4, 5]])
    roll_back(one, [3, 2])
    torch.testing.assert_close(fed(started(model, 1, "modules"), [ROWS[1] + [9]])[0, -1], logits[0, -1])


@compiled
@pytest.mark.parametrize(("change", "error", "said"), [
    (lambda kv: kv[..., :8].contiguous(), ValueError, r"the cache has shape .* 256, 8\], expected .* slots, 12\]"),
    (lambda kv: torch.zeros((*kv.shape[:5], 13), dtype=torch.int8), ValueError, r"slots, 12\]"),
    (lambda kv: kv.to(torch.uint8), ValueError, r"expected .* slots, 8\]"),  # codes of 4 bits
    (lambda kv: kv.to(torch.int16), TypeError, "the cache is Short"),
    (lambda kv: kv.float(), (ValueError, TypeError), "the cache"),
])  # fmt: skip
def test_a_cache_of_another_kind_is_refused(change, error, said):
    one = started(with_word(tiny(dtype=torch.bfloat16)), 1)
    one.cache.kv = change(one.cache.kv)
    with pytest.raises(error, match=said):
        one.score([[5]], [[]])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@RECORDS
def test_steps_of_a_gpu_write_the_codes_of_what_a_plain_cache_holds(kind, dtype, record):
    """Here over the CPU's ops. The decoder is the same with and without the word; the cache's dtype says it."""
    model = tiny(kind, dtype=dtype)
    plain = started(model, 3, "cuda")
    fed(plain, ROWS)
    with_word(model, record)
    coded = engine_of(model, name="cuda")
    assert coded.name == "cuda"
    coded.start(3, CPU)
    logits = fed(coded, ROWS)
    assert coded.bytes_per_token == 2 * 2 * 2 * {INT8: 12, INT4: 8}[record]
    assert coded.cache_bytes == coded.bytes_per_token * 3 * 256
    for row, tokens in enumerate(ROWS):
        require_codes_of(record, *(one.cache.kv[0, :, row, :, : len(tokens)] for one in (coded, plain)))
        alone = started(model, 1, "cuda")
        assert torch.equal(fed(alone, [tokens])[0, -1], logits[row, -1])  # as the reference goes row by row
    if dtype == torch.float32:
        theirs = fed(started(model, 3, "modules"), ROWS)[:, -1]
        close = {INT8: 0.02, INT4: 0.1}[record]  # another order of sums may give the next code
        torch.testing.assert_close(logits[:, -1], theirs, rtol=close, atol=close * float(theirs.abs().max()))


@pytest.mark.parametrize(("change", "said"), [
    (lambda kv: kv[..., :8].contiguous(), r"kv has shape .* 8\], 1 rows of this model take .* 12\]"),
    (lambda kv: kv.to(torch.uint8), r"kv has shape .* 12\], 1 rows of this model take .* 8\]"),
    (lambda kv: kv.to(torch.int16), "kv is torch.int16 on cpu, the model is torch.bfloat16"),
    (lambda kv: kv.bfloat16(), r"kv has shape .* 12\], 1 rows of this model take .* 8\]"),
    (lambda kv: kv[..., :8].float(), "kv is torch.float32 on cpu"),
])  # fmt: skip
def test_a_cache_of_another_kind_is_refused_by_steps_of_a_gpu(change, said):
    one = started(with_word(tiny(dtype=torch.bfloat16)), 1, "cuda")
    one.cache.kv = change(one.cache.kv)
    with pytest.raises(ValueError, match=said):
        fed(one, [[5]])


def test_memory_of_captured_rounds_is_that_of_codes():
    """Chains with and without the word are kept side by side, each with caches of its own."""
    model, sizes = tiny(dtype=torch.bfloat16), []
    for word in (False, True, False):
        if word:
            with_word(model)
        engine = engine_of(model, name="cuda")
        checker = Checker(engine, Sampler(64), "target", keep_logits=False)
        levels = round_levels(checker, None, num_draft_tokens=1, batch=1, longest=64)
        with borrowed([model], levels, rows=2, slots=256) as chain:
            adopt(chain, checker, None, 2)
            assert engine.cache.format is (INT8 if word else None)
            assert engine.cache.dtype == torch.bfloat16
            sizes.append(chain.cache_bytes)
        if word:
            del model.config.quantization_config
    assert sizes[1] * 16 == sizes[0] * 12 == sizes[2] * 12


@pytest.mark.parametrize(("config", "error"), [
    ({**INT8_CONFIG, "kv_cache": "int5"}, ValueError),
    ({**INT8_CONFIG, "kv_cache": 8}, TypeError),
])  # fmt: skip
def test_a_word_that_is_none(config, error):
    model = tiny(dtype=torch.float32)
    model.config.quantization_config = config
    with pytest.raises(error, match="kv_cache of the model's quantization_config is"):
        engine_of(model)


def test_the_quantization_of_others_says_nothing():
    model = near(tiny(dtype=torch.float32), 0.05)
    model.config.quantization_config = {"quant_method": "quark", "kv_cache": {"anything": 1}}
    assert engine_of(model).cache_format is None


def test_codes_that_the_kernels_of_a_gpu_do_not_read(monkeypatch, caplog):
    """A GPU is asked for none: what a model says of its cache is looked at before anything is built or moved."""
    forget_warnings()
    gpu, said = torch.device("cuda:0"), "the kernels on cuda:0 read 'int8' or keys and values as they are computed"
    for kept in (None, INT8, INT4):
        require_read(kept, gpu)
    of_cpus = replace(INT4, on_gpus=False)
    monkeypatch.setitem(CACHE_FORMATS, "int4", of_cpus)
    require_read(of_cpus, CPU)
    with pytest.raises(UnknownArchitecture, match=f"keys and values as int4, and {said}"):
        require_read(of_cpus, gpu)
    model = tiny(dtype=torch.bfloat16)
    one = CudaEngine(model, CudaDecoder(model))
    one.device = gpu
    one.keep_in(INT8)
    with pytest.raises(ValueError, match=said):
        one.keep_in(of_cpus)
    assert one.cache_format is INT8
    monkeypatch.setattr("hf_mlspec.engines.cuda.decoder.device_of", lambda model: gpu)
    with_word(model, INT4)
    assert engine_of(model, name="cuda", required=False).name == "modules"
    assert [record.getMessage() for record in caplog.records] == [
        "LlamaForCausalLM runs module by module: it is to keep keys and values as int4, and " + said]  # fmt: skip
    with pytest.raises(ValueError, match=f"engine 'cuda' cannot run this LlamaForCausalLM: .* int4, and {said}"):
        engine_of(model, name="cuda")
    monkeypatch.setattr("hf_mlspec.ops.why_no_cuda_kernels", lambda: None)
    assert "as int4, and the kernels on cuda read 'int8'" in why_not_decoded(model.to("meta"), "cuda")
    assert why_not_decoded(with_word(model, INT8), "cuda") is None
