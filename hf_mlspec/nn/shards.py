"""How is a layer cast of whose weight every process holds a part? Each casts its own, and the layer keeps its style.

transformers' tensor parallelism replaces the forward of a layer by one that splits inputs or sums outputs, as the
layer's style says. A weight split along its outputs has whole rows in every part; one split along its inputs is cast
to the same values if no block lies in two parts.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

HEAD_STEP = 8  # outputs of a part of the head come in multiples: GPUs send 8 bytes at once
_STYLES = ("colwise", "colwise_rep", "colwise_gather_output", "rowwise")
EXPERTS = "moe_tp_experts"  # each process has a part of every expert, and what they give is added up
PART_OF = "a weight that processes share"  # what `PackedModule.part_of` says


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


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The processes that tensor parallelism runs a model in, as it lays parameters out over them."""
    meshes = (one.device_mesh for one in model.parameters() if isinstance(one, DTensor))
    return next(meshes, None) or model._device_mesh


def is_sharded(module: nn.Module) -> bool:
    """Whether processes share the weights of a layer, dense or packed."""
    if getattr(module, "part_of", None) is not None:
        return True
    return any(isinstance(parameter, DTensor) for parameter in module._parameters.values())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, brought together where processes share it: each of them has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; all of one that is not shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_castable_shards(model: PreTrainedModel, block: int, paths: list[str]) -> None:
    """ValueError for a sharded model of which a cast would compute something else.

    paths: of the layers to be cast. Names the layer and both numbers where the number of processes leaves parts of
    a block, and the style of a layer whose forward is not known here.
    """
    if not (is_shared(model) or shards(model)):
        return
    for name, module in model.named_modules():
        inside = [path for path in paths if path.startswith(f"{name}.")]
        if "forward" in vars(module) and inside:  # of the model itself, which would run its own layers
            raise ValueError(f"direct_cast: tensor parallelism runs {name} as one ({style_of(model, name)}), and its "
                             f"{inside[0]} cannot be replaced there: load the model without tp_plan")
    for path in paths:
        module, style = model.get_submodule(path), style_of(model, path)
        if not is_sharded(module) or style == EXPERTS:  # blocks of parts of experts: `unfit` has looked
            continue
        if style not in _STYLES:
            raise ValueError(f"direct_cast: {path} is sharded as {style}, known are {', '.join(_STYLES)}: load the "
                             "model without tp_plan")
        width, processes = local_width(module), mesh_of(model).size()
        if width % block:
            raise ValueError(f"direct_cast: {path} has {module.in_features} inputs, {width} on each of {processes} "
                             f"processes, which blocks of {block} do not divide: use a tensor-parallel size that "
                             f"divides {module.in_features // block}")


def unfit_part(model: nn.Module, path: str, linear: nn.Linear, block: int) -> str | None:
    """Why this process's part of a linear at a path cannot be held in blocks; None where it can, or is the whole."""
    if not isinstance(linear.weight, DTensor):
        return None
    style, processes = style_of(model, path), mesh_of(model).size()
    if style not in _STYLES:
        return f"processes share it as {style}"
    width = local_width(linear)
    if width % block:
        return f"{width} of its {linear.in_features} inputs on each of {processes} processes: no multiple of {block}"
    if model.get_output_embeddings() is linear and linear.out_features % (HEAD_STEP * processes):
        return f"{processes} processes do not share its {linear.out_features} outputs evenly"
    return None


def style_of(model: PreTrainedModel, path: str) -> str | None:
    """How tensor parallelism splits the layer at a path, in transformers' words."""
    plan = getattr(model, "_tp_plan", None) or {}
    return plan.get(path) or plan.get(re.sub(r"\d+", "*", path))


def local_width(linear: nn.Module) -> int:
    """Inputs of this process's part of a linear, dense or packed."""
    return local(linear.weight).shape[1] if isinstance(linear, nn.Linear) else linear.packed_weight().in_features


def local_linear(linear: nn.Linear) -> nn.Linear:
    """A linear of this process's part of the weight, without the bias."""
    weight = local(linear.weight.detach())
    own = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    own.weight = nn.Parameter(weight, requires_grad=False)
    return own.train(linear.training)


def without_bias(packed: nn.Module) -> nn.Module:
    """A packed part of a linear, over the same weight: its bias is of all outputs."""
    own = copy.copy(packed)
    own._parameters = {**packed._parameters, "bias": None}
    return own


def split_as(packed: nn.Module, linear: nn.Module, style: str, mesh: DeviceMesh) -> nn.Module:
    """The packed layer of a part, in the place of a sharded linear: its bias, its widths and its style."""
    packed.register_parameter("bias", linear.bias)
    packed.in_features, packed.out_features = linear.in_features, linear.out_features
    packed._hf_quantized_needs_local_tp = True
    packed.part_of = PART_OF
    return run_as(packed, style, mesh)


@dataclass(frozen=True)
class Laid:
    """How processes have a tensor among them."""

    mesh: DeviceMesh
    placements: tuple
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: DTensor) -> Laid:
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.requires_grad)

    def whole(self, part: torch.Tensor) -> nn.Parameter:
        """The parameter of which this process has a part."""
        shared = DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape,
                                    stride=self.stride)
        return nn.Parameter(shared, requires_grad=self.requires_grad)


def run_as(module: nn.Module, style: str, mesh: DeviceMesh) -> nn.Module:
    """A layer whose forward tensor parallelism runs in this style."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return ALL_PARALLEL_STYLES[style].install_forward(module, mesh)


def local_experts(experts: nn.Module) -> nn.Module:
    """A module of this process's part of every expert, without what tensor parallelism put around it: over the same
    parameters where they are its own."""
    own = copy.copy(experts)
    vars(own).pop("forward", None)
    own._buffers, own._modules = dict(experts._buffers), dict(experts._modules)
    own._parameters = {
        name: nn.Parameter(local(parameter.detach()).contiguous(), requires_grad=False)
        if isinstance(parameter, DTensor) else parameter
        for name, parameter in experts._parameters.items()
    }  # fmt: skip
    return own


def split_experts(packed: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The packed parts of experts, in the place of sharded ones: what processes give is added up."""
    packed.part_of = PART_OF
    return run_as(packed, EXPERTS, mesh)

