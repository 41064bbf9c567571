"""Does a router stored with a model pick the planes of each prompt, and elsewhere those of a draft alone?"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from models import prompts, tiny
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.engines.choose import built_decoder
from hf_mlspec.engines.cuda.adapted import AdaptedLinear
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.evaluation import certificate_subject
from hf_mlspec.integration.levels.resolve import resolve
from hf_mlspec.integration.request import router_of
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing import compiled_engine
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.compiled_engine import (
    _KEPT,
    ADAPTED,
    ORDERED,
    OTHER_BLOCKS,
    RoutedCudaEngine,
    why_not_compiled,
)
from hf_mlspec.routing.engine import WHY_BY_MODULE, RoutedEngine
from hf_mlspec.routing.host_choice import ChosenOnHost
from hf_mlspec.routing.passes import Routed, recorded
from hf_mlspec.routing.router import Router

PLANES = {"format": "planes", "group_size": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model, and a router for it in bit-planes whose choices differ between prompts."""
    folder = tmp_path_factory.mktemp("routed")
    tiny("llama", dtype=torch.float32).save_pretrained(folder / "dense")
    model = loaded(folder / "dense")
    blocks = blocks_of(model)
    torch.manual_seed(5)
    router = Router(blocks)
    rows = torch.randint(3, 61, (16, 12))
    with torch.no_grad(), recorded(model, blocks, [12] * 16) as found:
        model(input_ids=rows, use_cache=False)
    for place, own in enumerate(router.of):
        own.mean.copy_(found[place].mean(0))
        own.spread.copy_(found[place].std(0))
        torch.nn.init.normal_(own.outer.weight)
    router.save(folder / "router.safetensors")
    return folder


def loaded(folder, **settings):
    config = hf_mlspec.MLSpecConfig(**PLANES, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


@pytest.fixture
def model(folders):
    return loaded(folders / "dense", router=folders / "router.safetensors")


@pytest.fixture
def plain(folders):
    return loaded(folders / "dense")


INPUTS = prompts([9, 3, 6])


def reference(model, ids: list[int], new: int) -> list[int]:
    """Greedy tokens, all of the row in one pass each time, at the widths that its prompt chose."""
    blocks, row, known = blocks_of(model), list(ids), None
    for _ in range(new):
        lengths = [len(ids)] if known is None else [0]
        with torch.no_grad(), Routed(router_of(model), blocks, lengths, known).over(model) as routed:
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits
        known = routed.widths
        row.append(int(logits[0, -1].argmax()))
    return row[len(ids) :]


def rows_of(inputs):
    return [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def generated(model, inputs=INPUTS, **options):
    options = {"do_sample": False, **options}
    out = model.generate(**inputs, max_new_tokens=8, eos_token_id=None, pad_token_id=0, **options)
    return [row[inputs["input_ids"].shape[1] :].tolist() for row in out]


def test_generate_routes_every_row_by_its_own_prompt(model):
    found = generated(model)
    assert found == [reference(model, row, 8) for row in rows_of(INPUTS)]
    hf_mlspec.route(model, None)
    assert found != generated(model)


def test_widths_differ_between_rows_and_follow_them(model):
    engine = RoutedEngine(model, router_of(model))
    seen = []
    step = RoutedEngine.step

    def spied(self, *args):
        logits = step(self, *args)
        seen.append(copy.deepcopy(self.chosen))
        return logits

    RoutedEngine.step = spied
    try:
        generated(model, speculation_config={"engine": "modules"})
    finally:
        RoutedEngine.step = step
    assert len({tuple(own) for own in seen[0]}) > 1
    assert all(chosen == seen[0] for chosen in seen)
    engine.start(2, torch.device("cpu"))
    engine.chosen = [[2], [3]]
    engine.cache.select = lambda keep, slots: None
    engine.select([1, 0])
    assert engine.chosen == [[3], [2]]
    engine.forget(0)
    engine.cache.extend_rows = lambda count: None
    engine.admit(1)
    assert engine.chosen == [None, [2], None]


def test_a_batch_in_any_company_writes_what_a_row_alone_writes(model):
    rows = generated(model)
    for index, row in enumerate(rows_of(INPUTS)):
        assert generated(model, {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))}) == [
            rows[index]
        ]


@pytest.mark.parametrize("engine", [None, "modules", "cuda"])
def test_a_given_cache_is_read_again_to_route_the_whole_prompt(model, engine):
    ids, how = torch.tensor([rows_of(INPUTS)[0]]), {"assistant_models": [], "speculation_config": {"engine": engine}}
    whole = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **how)
    first = model.generate(ids[:, :5], max_new_tokens=1, return_dict_in_generate=True, do_sample=False, pad_token_id=0,
                           eos_token_id=None, **how)  # fmt: skip
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert generated(model, given, past_key_values=first.past_key_values, **how) == whole


def test_a_routed_target_checks_drafts_at_its_own_widths(model):
    found = generated(model)
    for levels in (["planes2"], ["prompt_lookup"], ["planes4", "planes2"]):
        assert generated(model, assistant_models=levels) == found


@pytest.mark.parametrize("levels", [[], ["planes2"], ["prompt_lookup"], ["planes4", "planes2"]])
def test_the_decoder_of_gpus_routes_as_modules_do(model, levels):
    """Here over a model on the CPU: rows of a batch read planes of their own."""
    wanted = generated(model, speculation_config={"engine": "modules"})
    config = {"engine": "cuda", "num_draft_tokens": 3}
    assert generated(model, assistant_models=levels, speculation_config=config) == wanted
    for index, row in enumerate(rows_of(INPUTS)):
        alone = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))}
        assert generated(model, alone, assistant_models=levels, speculation_config=config) == [wanted[index]]


def test_a_call_knows_what_prompts_of_earlier_calls_chose(model, monkeypatch):
    """Of streamed planes: an engine lives as long as its call, and what is likely does not end with it."""
    wanted, waited, at = generated(model, speculation_config={"engine": "modules"}), [], ChosenOnHost.at
    planes = [module for module in model.modules() if isinstance(module, PlanesLinear)]
    held = sum(part.nbytes for own in planes for part in own.parts("weight")[:2])
    hf_mlspec.stream_planes(model, held * 95 // 100, top_planes=2)
    monkeypatch.setattr(ChosenOnHost, "at", lambda *given: waited.append(given[1]) or at(*given))
    assert generated(model, speculation_config={"engine": "cuda"}) == wanted
    assert len(waited) >= len(blocks_of(model))  # nothing was likely as yet
    waited.clear()
    hf_mlspec.clear(model)
    assert generated(model, speculation_config={"engine": "cuda"}) == wanted
    assert not waited


def test_rows_of_the_decoder_choose_what_modules_choose(model):
    decoder = built_decoder(model, "cuda")
    compiled, modules = RoutedCudaEngine(model, decoder, router_of(model)), RoutedEngine(model, router_of(model))
    rows = rows_of(INPUTS)
    for engine in (compiled, modules):
        engine.start(len(rows), torch.device("cpu"))
    with torch.inference_mode(), ragged_attention_on([model]):
        found, wanted = compiled.feed(rows), modules.feed(rows)
    assert compiled.chosen == modules.chosen
    assert len({tuple(own) for own in compiled.chosen}) > 1
    torch.testing.assert_close(found, wanted.float(), atol=1e-3, rtol=1e-3)
    compiled.select([2, 0])
    compiled.admit(1)
    with torch.inference_mode():
        again = compiled.feed([rows[2] + [5], rows[0] + [7], rows[1]])
    assert compiled.chosen == [modules.chosen[place] for place in (2, 0, 1)]
    torch.testing.assert_close(again[2], found[1])


def test_a_prompt_that_memory_is_short_for_is_read_part_by_part_to_the_same_choices(model, monkeypatch):
    decoder = built_decoder(model, "cuda")
    row, asked, forward = [3 + n % 50 for n in range(80)], [], decoder.forward
    engine = RoutedCudaEngine(model, decoder, router_of(model))

    def short_of_memory(*operands, at_once=0, **how):
        asked.append(at_once)
        if at_once > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*operands, at_once=at_once, **how)

    monkeypatch.setattr(compiled_engine, "LEAST_CHUNK", 5)
    with torch.inference_mode():
        engine.start(1, torch.device("cpu"))
        wanted, chosen = engine.feed([row]), engine.chosen
        monkeypatch.setattr(decoder, "forward", short_of_memory)
        engine.start(1, torch.device("cpu"))
        engine._choose(0, row, 1)
        assert asked == [compiled_engine.CHUNK, 40, 20]
        assert engine.chosen == chosen
        bits = engine._bits_of_rows()
        assert forward(*operands_of(row), engine._kv(1), bits=bits, at_once=7)[-1].equal(wanted[0, 0])
        monkeypatch.setattr(compiled_engine, "LEAST_CHUNK", 40)
        engine.start(1, torch.device("cpu"))
        with pytest.raises(torch.OutOfMemoryError):
            engine._choose(0, row, 1)


def operands_of(row: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(own, dtype=torch.int32) for own in ([row], [0], [len(row)])]


def test_choices_of_rows_that_left_are_let_go_with_the_graphs_that_hold_their_places(model):
    engine = RoutedCudaEngine(model, built_decoder(model, "cuda"), router_of(model))
    engine.start(2, torch.device("cpu"))
    steps, blocks, seen = engine._steps, len(engine.blocks), set()
    for number in range(3 * _KEPT):
        engine.chosen = [[2 + number % 6] * blocks, [2 + number // 6 % 6] * blocks]
        engine.chosen[0][0] = 2 + number // 36
        seen.add(engine._bits_of_rows().key)
        assert engine._bits_of_rows() is engine._row_bits[engine._bits_of_rows().key]
        assert len(engine._row_bits) <= _KEPT
        assert (engine._steps is steps) == (len(seen) <= _KEPT)
    assert len(seen) > 2 * _KEPT


def test_a_decoder_whose_blocks_are_others_is_refused_with_the_reason(model):
    decoder = built_decoder(model, "cuda")
    assert why_not_compiled(model, decoder) == ""
    layer = decoder._layers[0]
    decoder._layers[0] = replace(layer, qkv_order=torch.arange(32, dtype=torch.int32))
    assert why_not_compiled(model, decoder) == ORDERED
    decoder._layers[0] = replace(layer, o=layer.gate_up)
    assert why_not_compiled(model, decoder) == OTHER_BLOCKS
    decoder._layers[0] = replace(layer, o=AdaptedLinear(layer.o, *torch.zeros(3, 1, 1)))
    assert why_not_compiled(model, decoder) == ADAPTED
    decoder._layers[0] = layer


def test_adapters_beside_planes_change_no_name_of_a_block(model):
    names = [list(block.linears) for block in blocks_of(model)]
    mlp = model.model.layers[0].mlp
    holder = nn.Module()
    holder.base_layer = mlp.up_proj
    mlp.up_proj = holder
    try:
        assert [list(block.linears) for block in blocks_of(model)] == names
    finally:
        mlp.up_proj = holder.base_layer


@pytest.mark.parametrize("engine", [None, "modules", "cuda"])
def test_a_stream_routes_as_generate_does(model, engine):
    rows = generated(model)
    prompts = rows_of(INPUTS)
    how = {"max_batch": 2, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None,
           "speculation_config": {"engine": engine}}  # fmt: skip
    done = {tuple(one.request.input_ids): one.new_tokens
            for one in hf_mlspec.generate_stream(model, [*prompts, prompts[0][:4]], **how)}  # fmt: skip
    assert [done[tuple(prompt)] for prompt in prompts] == rows
    assert done[tuple(prompts[0][:4])] == reference(model, prompts[0][:4], 8)


@pytest.mark.parametrize("engine", [None, "modules", "cuda"])
def test_draft_routing_changes_no_token(plain, folders, engine):
    if engine is not None:
        hf_mlspec.prepare(plain, engine=engine)  # of levels, too
    config = {"router": str(folders / "router.safetensors"), "num_draft_tokens": 3}
    wanted = generated(plain, assistant_models=[])
    assert generated(plain, assistant_models=["routed"], speculation_config=config) == wanted
    stats = hf_mlspec.last_stats(plain)
    assert stats.levels[0].name == "routed"
    assert stats.levels[0].accepted > 0
    assert generated(plain, assistant_models=["routed"],
                     speculation_config={"router": config["router"]}) == wanted  # lengths chosen
    sampled = {"do_sample": True, "temperature": 1.5}
    torch.manual_seed(7)
    wanted = generated(plain, assistant_models=[], **sampled)
    torch.manual_seed(7)
    assert generated(plain, assistant_models=["routed"], speculation_config=config, **sampled) == wanted


def test_a_certificate_says_how_a_routed_draft_runs(plain, folders):
    config = hf_mlspec.SpeculationConfig(router=str(folders / "router.safetensors"))
    levels = resolve(plain, ["routed"], None, config)
    chain = certificate_subject.chain_of(plain, None, config, levels)
    told = certificate_subject._decoding(plain, chain.runners[0], config)
    assert told == {"how": certificate_subject.COMPILED, "reason": None}
    config = replace(config, prepare=False)
    chain = certificate_subject.chain_of(plain, None, config, resolve(plain, ["routed"], None, config))
    told = certificate_subject._decoding(plain, chain.runners[0], config)
    assert told == {"how": certificate_subject.BY_MODULE, "reason": WHY_BY_MODULE}
    assert certificate_subject._kind("routed", levels[0]) == "the target at the planes that a router picks"


def test_a_saved_model_routes_the_same(model, tmp_path):
    rows = generated(model)
    model.save_pretrained(tmp_path / "saved")
    told = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert told["router"] == "router.safetensors"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert generated(again) == rows
    assert generated(copy.deepcopy(again)) == rows
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice/router.safetensors").read_bytes() == (tmp_path / "saved/router.safetensors").read_bytes()
    (tmp_path / "saved/router.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no router\.safetensors: copy it"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)


def test_a_model_without_a_router_is_saved_without_one(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    assert not (tmp_path / "router.safetensors").exists()
    assert "router" not in json.loads((tmp_path / "config.json").read_text())["quantization_config"]


def test_routers_of_other_models_are_refused(folders, tmp_path, plain):
    tiny("llama", seed=1, dtype=torch.float32).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="same shapes and other weights"):
        loaded(tmp_path / "other", router=folders / "router.safetensors")
    with pytest.raises(ValueError, match="router of another model"):
        loaded(folders / "dense", router=folders / "router.safetensors", num_planes=6)
    with pytest.raises(FileNotFoundError):
        loaded(folders / "dense", router=tmp_path / "none")
    shutil.copy(folders / "dense/model.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="is no router"):
        hf_mlspec.route(plain, tmp_path / "weights.safetensors")
    assert router_of(plain) is None


@pytest.mark.parametrize(("settings", "error", "words"), [
    ({"format": "int4", "router": "r"}, ValueError, "it picks bit-planes: use it with format='planes'"),
    ({"format": "planes", "router": 3}, TypeError, "must be the path"),
    ({"format": "planes", "bits": 6, "num_planes": 4}, ValueError, "give one of them"),
    ({"format": "planes", "bits": 9}, ValueError, "num_planes"),
])  # fmt: skip
def test_bad_configs_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        hf_mlspec.MLSpecConfig(**settings)


def test_bits_is_another_word_for_planes():
    assert hf_mlspec.MLSpecConfig(format="planes", bits=6).num_planes == 6
    assert hf_mlspec.MLSpecConfig(format="bitplanes", bits=8, num_planes=8).num_planes == 8


def test_calls_that_cannot_be_routed_say_so(model, plain, folders, caplog):
    router = str(folders / "router.safetensors")
    with pytest.raises(ValueError, match="no level: name one"):
        generated(plain, assistant_models=["planes4"], speculation_config={"router": router})
    with pytest.raises(ValueError, match="level 'routed' reads the planes that a router picks"):
        generated(plain, assistant_models=["routed"])
    with pytest.raises(ValueError, match="for a target that reads all planes"):
        generated(model, assistant_models=["routed"], speculation_config={"router": router})
    with pytest.raises(TypeError, match="router is 3"):
        hf_mlspec.SpeculationConfig(router=3)
    with pytest.raises(ValueError, match="not in bit-planes"):
        hf_mlspec.route(tiny("llama"), router)
    with pytest.raises(TypeError, match="router is 3"):
        hf_mlspec.route(plain, 3)
    caplog.clear()
    generated(model)
    generated(model)
    said = [record.message for record in caplog.records if "module by module where it is routed" in record.message]
    assert len(said) <= 1
    generated(model, num_beams=2)
    assert "is routed, but transformers' own loop runs this call" in caplog.text
    assert "module by module, and reads all planes" in caplog.text
