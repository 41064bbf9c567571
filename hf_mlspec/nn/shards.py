"""How is a layer cast of whose weight every process holds a part? Each casts its own, and the layer keeps its style.

transformers' tensor parallelism replaces the forward of a layer by one that splits inputs or sums outputs, as the
layer's style says. A weight split along its outputs has whole rows in every part; one split along its inputs is cast
to the same values if no block lies in two parts.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_CASTS = ("mxfp4",)  # formats whose layers know no width of the whole
_STYLES = ("colwise", "colwise_rep", "colwise_gather_output", "rowwise")


def shards(model: nn.Module) -> list[str]:
    """Parameters that are shared between processes."""
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]


def is_shared(model: nn.Module) -> bool:
    """Whether tensor parallelism runs a model in several processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """The processes that tensor parallelism runs a model in."""
    mesh = model._device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def is_sharded(module: nn.Module) -> bool:
    """Whether processes share the weight of a layer."""
    return isinstance(getattr(module, "weight", None), DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, brought together where processes share it: each of them has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; all of one that is not shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_castable_shards(model: PreTrainedModel, format: str, block: int, paths: list[str]) -> None:
    """ValueError for a sharded model of which a cast would compute something else.

    paths: of the layers to be cast. Names the layer and both numbers where the number of processes leaves parts of
    a block, the style of a layer whose forward is not known here, and formats without parts.
    """
    if not shards(model):
        return
    if format not in _CASTS:
        raise ValueError(f"direct_cast: {format} layers stay whole, and the model is sharded over processes: cast to "
                         f"{', '.join(_CASTS)}, or load the model without tp_plan")
    for name, module in model.named_modules():
        inside = [path for path in paths if path.startswith(f"{name}.")]
        if "forward" in vars(module) and inside:  # of the model itself, which would run its own layers
            raise ValueError(f"direct_cast: tensor parallelism runs {name} as one ({style_of(model, name)}), and its "
                             f"{inside[0]} cannot be replaced there: load the model without tp_plan")
    for path in paths:
        module = model.get_submodule(path)
        if not is_sharded(module):
            continue
        style = style_of(model, path)
        if style not in _STYLES:
            raise ValueError(f"direct_cast: {path} is sharded as {style}, known are {', '.join(_STYLES)}: load the "
                             "model without tp_plan")
        width, processes = local(module.weight).shape[1], module.weight.device_mesh.size()
        if width % block:
            raise ValueError(f"direct_cast: {path} has {module.in_features} inputs, {width} on each of {processes} "
                             f"processes, which blocks of {block} do not divide: use a tensor-parallel size that "
                             f"divides {module.in_features // block}")


def style_of(model: PreTrainedModel, path: str) -> str | None:
    """How tensor parallelism splits the layer at a path, in transformers' words."""
    plan = getattr(model, "_tp_plan", None) or {}
    return plan.get(path) or plan.get(re.sub(r"\d+", "*", path))


def local_linear(linear: nn.Linear) -> nn.Linear:
    """A linear of this process's part of the weight, without the bias."""
    weight = local(linear.weight.detach())
    own = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    own.weight = nn.Parameter(weight, requires_grad=False)
    return own.train(linear.training)


def split_as(packed: nn.Module, linear: nn.Linear, style: str) -> nn.Module:
    """The packed layer of a part, in the place of a sharded linear: its bias, its widths and its style."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    packed.register_parameter("bias", linear.bias)
    packed.in_features, packed.out_features = linear.in_features, linear.out_features
    packed._hf_quantized_needs_local_tp = True
    packed.part_of = "a weight that processes share"
    return ALL_PARALLEL_STYLES[style].install_forward(packed, linear.weight.device_mesh)

