"""Is early_exit the first layers of the model, on the very same tensors?"""

import pytest
import torch

from hf_mlspec import direct_cast, early_exit, resident_bytes

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:direct_cast. .* stay as they are")


@pytest.mark.parametrize("name", ["llama", "qwen2-bias", "gemma2-tied", "gpt2-conv1d", "mixtral-experts"])
def test_runs_the_first_layers_on_shared_tensors(tiny_model, ids, name):
    model = tiny_model(name)
    config, logits = model.config.to_json_string(), model(ids).logits
    view = early_exit(model, 2)
    hidden = model(ids, output_hidden_states=True).hidden_states[2]
    norm = next(m for n, m in model.named_modules() if n in ("model.norm", "transformer.ln_f"))
    expected = model.lm_head(norm(hidden))
    cap = getattr(model.config, "final_logit_softcapping", None)
    expected = expected if cap is None else torch.tanh(expected / cap) * cap
    assert torch.allclose(view(ids).logits, expected, atol=1e-5)
    assert resident_bytes(view, shared_with=model) == 0
    assert view.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10)
    assert view.config.num_hidden_layers == 2
    assert model.config.to_json_string() == config
    assert torch.equal(model(ids).logits, logits)


def test_per_layer_lists_are_cut(tiny_model):
    model = tiny_model("gemma2-tied", eos_token_id=[5, 6, 7])
    assert len(model.config.layer_types) == 3
    view = early_exit(model, 1)
    assert view.config.layer_types == model.config.layer_types[:1]
    assert view.config.eos_token_id == [5, 6, 7]


def test_of_a_cast_and_a_cast_of_it(tiny_model, ids):
    model = tiny_model("llama")
    assert torch.equal(early_exit(direct_cast(model), 1)(ids).logits, direct_cast(early_exit(model, 1))(ids).logits)


@pytest.mark.parametrize("num_layers", [0, -1, 3, 4, 1.5, "2"])
def test_other_layer_counts_are_refused(tiny_model, num_layers):
    with pytest.raises(ValueError, match=rf"num_layers is {num_layers!r}, LlamaForCausalLM has 3: choose 1 to 2"):
        early_exit(tiny_model("llama"), num_layers)


def test_without_a_list_of_layers(tiny_model):
    model = tiny_model("llama")
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=r"no nn\.ModuleList of its 5 decoder layers"):
        early_exit(model, 2)
