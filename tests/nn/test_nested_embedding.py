"""Are rows of a table that is nested in the output head the table's own, and do the two stay together?"""

import copy
import io

import pytest
import torch
from decoders import random_model
from torch import nn

import hf_mlspec
from hf_mlspec.nn.coded_embedding import is_table
from hf_mlspec.nn.nested import NestedEmbedding, NestedLinear

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": True}
IDS = torch.tensor([[3, 7, 1], [0, 198, 7]])


def tied(rows: int = 43, columns: int = 64) -> tuple[nn.Linear, nn.Embedding]:
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows, bias=False).to(torch.bfloat16).requires_grad_(False)
    linear.weight[7, 1] = 2.0**-70  # escapes
    linear.weight[42, :2] = -(2.0**-90)
    table = nn.Embedding(rows, columns, padding_idx=0, dtype=torch.bfloat16)
    table.weight = linear.weight
    return linear, table


def test_rows_are_those_of_the_table():
    linear, table = tied()
    nested = NestedEmbedding(NestedLinear.from_linear(linear), table)
    none, few = torch.tensor([], dtype=torch.int64), torch.tensor([[7, 42], [0, 7]], dtype=torch.int32)
    for ids in (torch.arange(43), few, none):
        rows = nested(ids)
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows, table(ids))
    for token in (-1, 43):
        with pytest.raises(IndexError, match=f"token {token} is outside of the 43 rows"):
            nested(torch.tensor([5, token]))


def test_it_has_no_tensors_and_follows_its_head():
    linear, table = tied()
    head = NestedLinear.from_linear(linear)
    both = nn.ModuleDict({"table": NestedEmbedding(head, table), "head": head})
    saved = both.state_dict()
    assert all(name.startswith("head.") for name in saved)
    assert sum(p.numel() for p in both["table"].parameters()) == 0
    buffer = io.BytesIO()
    torch.save(both, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(both), torch.load(buffer, weights_only=False)):
        assert twin["table"].shares(twin["head"])
        assert not twin["table"].shares(head)
        assert torch.equal(twin["table"](IDS % 43), table(IDS % 43))
    other = torch.flip(linear.weight, [0]).contiguous()
    flipped = nn.Linear(64, 43, bias=False).to(torch.bfloat16)
    flipped.weight = nn.Parameter(other, requires_grad=False)
    both["table"](IDS % 43)  # in tiles
    both.load_state_dict({f"head.{n}": t for n, t in NestedLinear.from_linear(flipped).state_dict().items()})
    assert torch.equal(both["table"](IDS % 43), other[IDS % 43])
    both.half()
    assert torch.equal(both["table"](IDS % 43), other[IDS % 43])
    back = both["table"].dense(nn.Parameter(other, requires_grad=False))
    assert (type(back), back.padding_idx, back.training) == (nn.Embedding, 0, table.training)
    assert torch.equal(back(IDS % 43), other[IDS % 43])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_scaled_table_is_scaled_as_ever(name):
    model = random_model(name, torch.bfloat16, **SHAPE)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert is_table(table)
    nested = NestedEmbedding(NestedLinear.from_linear(head), table)
    with torch.no_grad():
        assert torch.equal(nested(IDS), table(IDS))
    if hasattr(table, "embed_scale"):
        assert f"embed_scale={float(table.embed_scale.bfloat16()):g}" in repr(nested)
    back = nested.dense(head.weight)
    assert type(back) is type(table)
    with torch.no_grad():
        assert torch.equal(back(IDS), table(IDS))


def test_views_of_a_nested_model_keep_head_and_table_together():
    model = hf_mlspec.nest(random_model("llama", torch.bfloat16, **SHAPE))
    for view in (hf_mlspec.early_exit(model, 2), copy.deepcopy(model)):
        table = view.get_input_embeddings()
        assert table.shares(view.lm_head)
        assert torch.equal(table(IDS), model.get_input_embeddings()(IDS))
    exit_view = hf_mlspec.early_exit(model, 1)
    assert exit_view.lm_head.weight_low is model.lm_head.weight_low


def test_what_does_more_than_look_up_is_refused():
    head = NestedLinear.from_linear(tied()[0])
    with pytest.raises(ValueError, match=r"the table is \[44, 64\] on cpu, the head's weight \[43, 64\] on cpu"):
        NestedEmbedding(head, nn.Embedding(44, 64))

    class Shifted(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 1)

    for odd in (Shifted(43, 64), nn.Embedding(43, 64, max_norm=1.0)):
        assert not is_table(odd)
        with pytest.raises(TypeError, match=f"a {type(odd).__name__} may do more than look up rows and scale them"):
            NestedEmbedding(head, odd)


def test_a_cast_takes_the_head_that_its_table_reads_along():
    model = hf_mlspec.nest(random_model("llama", torch.bfloat16, **SHAPE))
    draft = hf_mlspec.direct_cast(model, "mxfp4").to("meta")
    hidden = draft.get_input_embeddings().head
    assert draft.get_output_embeddings() is not hidden
    assert all(parameter.is_meta for parameter in hidden.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
