"""Does a probe recognise the form of a class that nobody described, and none in one that computes something else?"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import types

import pytest
import torch
from decoders import CPU_CONFIGS, random_model
from torch import nn
from transformers import LlamaForCausalLM

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture, described, known, recognise
from hf_mlspec.engines.architecture.probe import _candidates
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

LENGTH = 31


@pytest.fixture(autouse=True)
def nothing_recognised(monkeypatch):
    monkeypatch.setattr(known, "RECOGNISED", found := {})
    monkeypatch.setattr(sys.modules["hf_mlspec.engines.architecture.probe"], "RECOGNISED", found)


def homemade(kind: str, *changes: tuple[str, str], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model of a class of our own: what transformers computes for `kind`, under another name and with these
    texts of its source changed."""
    theirs = type(random_model(kind, torch.float32))
    place = theirs.__module__
    source = inspect.getsource(importlib.import_module(place))
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    source = re.sub(r"^from \.\.\. ", "from transformers ", source, flags=re.MULTILINE)
    source = re.sub(r"^from \.\.\.", "from transformers.", source, flags=re.MULTILINE)
    source = re.sub(r"^from \.\.", "from transformers.models.", source, flags=re.MULTILINE)
    source = re.sub(r"^from \.", f"from {place.rpartition('.')[0]}.", source, flags=re.MULTILINE)
    module = types.ModuleType("homemade")
    module.__file__ = sys.modules[place].__file__  # where decorators of transformers look for docstrings
    sys.modules["homemade"] = module
    exec(compile(source, "homemade.py", "exec"), vars(module))
    own = vars(module)[theirs.__name__]
    own.__name__ = "HomemadeForCausalLM"
    model = random_model(kind, dtype)
    made = own(model.config)
    made.load_state_dict(model.state_dict())
    return made.to(dtype).eval()


def logits_by_the_decoder(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    runner = CpuEngine(model, CpuDecoder(model), capacity=LENGTH + 1)
    runner.start(1, torch.device("cpu"))
    return runner.feed([ids[0, :1].tolist()], Guess(ids[:, 1:], [ids.shape[1] - 1]))[0].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CPU_CONFIGS)
def test_every_described_class_is_recognised_without_its_description(kind, dtype):
    """The decoder that reads what the probe found computes what the modules do."""
    model = random_model(kind, dtype)
    model.__class__ = type("HomemadeForCausalLM", (type(model),), {"__module__": "transformers.models.homemade"})
    evidence = recognise(model)
    assert evidence.of_layers <= 2e-5
    assert evidence.of_logits <= 2e-5
    assert described(model) is evidence.entry
    model = model.float()
    ids = torch.randint(1, 199, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(ids).logits[0].double()
    gap = (logits_by_the_decoder(model, ids) - expected).abs().max() / expected.abs().max()
    assert gap < 2e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "olmo2", "gpt-neox", "gpt2"])
def test_a_class_of_our_own_runs_compiled(kind, caplog):
    model = homemade(kind)
    assert engine_of(model).name == "modules"
    stock = model.generate(torch.tensor([[5, 9, 40]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    with caplog.at_level(logging.WARNING):
        hf_mlspec.prepare(model)
    assert engine_of(model).name == "cpu"
    said = [record.message for record in caplog.records if "random ids" in record.message]
    assert len(said) == 1
    assert "HomemadeForCausalLM has no description, and computes what" in said[0]
    for levels in ([], ["mxfp4"], ["early_exit:1"], None):
        given = {} if levels is None else {"assistant_models": levels}
        found = model.generate(torch.tensor([[5, 9, 40]]), max_new_tokens=12, do_sample=False, pad_token_id=0, **given)
        assert torch.equal(found, stock)
    hf_mlspec.prepare(homemade(kind))  # another of its class


OTHER = {
    "scale of attention": ("scaling=self.scaling", "scaling=1.01 * self.scaling"),
    "a rotation the other way": ("return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"),
    "an addend between blocks": ("hidden_states = residual + hidden_states\n\n",
                                 "hidden_states = residual + 1.001 * hidden_states\n\n"),
    "behind the layers": ("hidden_states = self.norm(hidden_states)", "hidden_states = self.norm(hidden_states * 2)"),
    "logits": ("logits = self.lm_head(", "logits = 1.01 * self.lm_head("),
    "embeddings": ("hidden_states = inputs_embeds", "hidden_states = inputs_embeds * 1.01"),
    "a layer that is not run": ("self.layers[: self.config.num_hidden_layers]",
                                "self.layers[: self.config.num_hidden_layers - 1]"),
    "epsilon": ("self.variance_epsilon = eps", "self.variance_epsilon = 100 * eps"),
    "far positions": ("hidden_states = self.input_layernorm(hidden_states)",
                      "hidden_states = self.input_layernorm(hidden_states) * "
                      "(1 + 0.01 * (position_ids > 200))[..., None]"),
    "what is cached": ("key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)",
                       "key_states, value_states = past_key_values.update(key_states, 1.01 * value_states, "
                       "self.layer_idx)"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_class_that_computes_something_else_is_not_taken(what, dtype, caplog):
    old, new = OTHER[what]
    model = homemade("llama", (old, new), dtype=dtype)
    with pytest.raises(UnknownArchitecture, match="no description, and a probe recognises none"):
        recognise(model)
    with caplog.at_level(logging.WARNING):
        hf_mlspec.prepare(model)
    assert engine_of(model).name == "modules"
    assert any("one by one: its class has no description" in record.message for record in caplog.records)


def test_what_a_description_reads_from_the_model_may_be_its_own():
    """A scale that the attention names, and rotary tables."""
    changes = [("self.scaling = self.head_dim**-0.5", "self.scaling = self.head_dim**-0.7"),
               ("cos = emb.cos() * self.attention_scaling",
                "cos = emb.cos() * (1 + 0.01 * (position_ids[..., None] > 200))")]  # fmt: skip
    model = homemade("llama", *changes)
    assert recognise(model).like == "LlamaForCausalLM"
    ids = torch.randint(1, 199, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(ids).logits[0].double()
    assert (logits_by_the_decoder(model, ids) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_windows_are_seen():
    """Rows of 24 tokens do not reach past a window of 4,096: it is made short for the probe, and is as before."""
    model = homemade("mistral")
    model.config.sliding_window = 4096
    evidence = recognise(model)
    assert evidence.entry.windows == "every layer"
    assert model.config.sliding_window == 4096
    unwindowed = homemade("mistral", ("mask_function = create_causal_mask if self.config.sliding_window is None else "
                                      "create_sliding_window_causal_mask", "mask_function = create_causal_mask"))
    with pytest.raises(UnknownArchitecture, match="recognises none"):
        recognise(unwindowed)  # whose cache has windows, and whose masks have none


class Overridden(LlamaForCausalLM):
    def forward(self, *words, **named):
        return super().forward(*words, **named)


class Renamed(LlamaForCausalLM):
    """Of another name alone."""


def test_a_subclass_of_a_known_class():
    model = random_model("llama", torch.float32)
    model.__class__ = Overridden
    with pytest.raises(UnknownArchitecture, match="it is a Overridden, which changes what LlamaForCausalLM computes"):
        recognise(model)
    model.__class__ = Renamed
    assert recognise(model).like == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["attention_chunk_size", "local_window_size"])
def test_what_short_rows_do_not_show_is_not_taken(name):
    model = homemade("llama")
    setattr(model.config, name, 8192)
    with pytest.raises(UnknownArchitecture, match=f"{name}=8192, which a probe of short rows does not"):
        recognise(model)


def test_another_config_of_a_recognised_class_is_probed_anew():
    first = homemade("llama")
    recognise(first)
    other = type(first)(type(first.config)(**{**first.config.to_dict(), "rms_norm_eps": 1e-3})).eval()
    assert engine_of(first).name == "cpu"
    assert engine_of(other).name == "modules"
    fewer = type(first)(type(first.config)(**{**first.config.to_dict(), "num_hidden_layers": 1})).eval()
    assert engine_of(fewer).name == "cpu"
    count = first.config.num_hidden_layers + 1
    more = type(first)(type(first.config)(**{**first.config.to_dict(), "num_hidden_layers": count})).eval()
    assert engine_of(more).name == "modules"


def test_layers_of_another_kind_are_probed_anew():
    """All layers of the first have a window, which "every layer" describes, too."""
    first = homemade("ministral")
    given = {name: said for name, said in first.config.to_dict().items() if name != "layer_types"}
    both = first.config
    windowed = type(first.config)(**given, layer_types=["sliding_attention"] * 3)
    recognise(type(first)(windowed).eval())
    other = type(first)(both).eval()
    assert engine_of(other).name == "modules"
    assert recognise(other).entry.windows == "by layer type"


def test_a_model_is_as_it_was_behind_a_probe():
    model = homemade("gemma2", dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recognise(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_each_form_is_asked_once():
    for kind in ("llama", "gemma2"):
        found = [entry for entry, _ in _candidates(random_model(kind, torch.float32))]
        assert len(found) > 4
        assert all(one not in found[:at] for at, one in enumerate(found))
