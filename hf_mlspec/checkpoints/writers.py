"""Which writer makes a checkpoint of a kind, and does what it writes read back as the same weight?"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import PackedWeight
from .compressed_writer import CompressedWriter
from .gptq_writer import GptqWriter
from .layer import HeldTensor, ReadLayer, StoredLayer
from .readers import reader_for
from .writing import Writer

WRITERS: dict[str, Writer] = {writer.method: writer for writer in (CompressedWriter(), GptqWriter())}


def written(writer: Writer, weight: PackedWeight, order: Tensor | None = None) -> dict[str, Tensor]:
    """`Writer.tensors`, read back and compared: ValueError naming the layer where a value would be another one."""
    found = writer.tensors(weight, order)
    config = writer.config({weight.name: writer.kind(weight, order)}, [])
    held = {name: HeldTensor(f"{weight.name}.{name}", tensor) for name, tensor in found.items()}
    layer = StoredLayer(weight.name, weight.in_features, weight.out_features, held)
    plan = reader_for(config).plan(layer)
    again = plan.read({name: found[name] for name in plan.tensors})
    if not torch.equal(_values(again), _values(ReadLayer(weight, order))):
        raise ValueError(f"{weight.name}: {writer.title} files would hold other values than the model")
    return found


def _values(layer: ReadLayer) -> Tensor:
    """float32 ``[out, in]``, the inputs as they come."""
    weight = layer.weight
    values = weight.dequantize(torch.float32) if isinstance(weight, PackedWeight) else weight.float()
    return values if layer.order is None else values.index_select(-1, torch.argsort(layer.order.long()))
