"""What replaces nn.Embedding where its rows are codes, as those of a linear in zipper weights are?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import ops
from ..formats import FORMATS, Parts
from ..formats.zipper import Split, ZipperParts, ZipperWeight
from ..ops.zipper import split_of
from ..ops.zipper_table import ZipperTable, prepack_table, table_of, unprepack_table
from .coded_embedding import CodedEmbedding, is_table
from .packed import PackedModule, require_switch
from .switch import PrecisionSwitch


class ZipperEmbedding(CodedEmbedding, PackedModule):
    """Rows looked up in codes of 4 to 8 bits with one scale a row, rounded to bfloat16 (formats/zipper/codes.py).

        parameter        dtype     on disk, in state_dict()    in rows, from the first forward on (ops/zipper_table.py)
        weight_planes    uint8     [K, rows, in / 8]           [rows, P, in / 8]
        weight_scale     float16   [rows, 1]                   [rows, 1, 1]
        weight_split     int32     [4]                         and behind these four the places
        row_like         bfloat16  [0]                         the same: of which dtype the rows are

    A row is read whole at every precision: it is few bits, and a draft begins with it.
    """

    format = "zipper"
    names = ("weight",)
    disk_axes = 2
    weightless = " but codes: change the table of the original model, and quantize that"
    _how: Split | None = None  # read once: from a GPU that waits

    def __init__(self, weight: ZipperWeight, embedding: nn.Embedding, switch: PrecisionSwitch | None = None) -> None:
        """Takes over the tensors of ``weight``, in place of ``embedding``. TypeError where that does more than look
        rows up and scale them, or is not in bfloat16; ValueError where the weight is of another shape."""
        super().__init__(require_switch(switch, self.format, weight.name))
        if not is_table(embedding):
            raise TypeError(
                f"{weight.name}: a {type(embedding).__name__} may do more than look up rows and scale them: leave "
                "head and embedding as they are"
            )
        if embedding.weight.dtype != torch.bfloat16:
            raise TypeError(
                f"{weight.name} is {embedding.weight.dtype}, rows of codes are bfloat16: load the model with "
                "dtype=torch.bfloat16"
            )
        weight.validate(embedding.num_embeddings, embedding.embedding_dim)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx, self._kind = embedding.padding_idx, type(embedding)
        self._own_scale = _scale_of(embedding)
        # As the embedding's own forward has it: rounded to the table's dtype.
        scaled = self._own_scale is not None
        self.embed_scale = float(torch.tensor(self._own_scale, dtype=self.dtype, device="cpu")) if scaled else None
        like = torch.empty(0, dtype=self.dtype, device=weight.weight_planes.device)
        self.row_like = nn.Parameter(like, requires_grad=False)  # first: a model's dtype is that of its first floats
        self._register_parts("weight", weight.parts)
        self.train(embedding.training)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, name: str = "weight", switch: PrecisionSwitch | None = None, **options: Any
    ) -> ZipperEmbedding:
        """Round the table to nearest. options: of the format. TypeError and ValueError as of ``from_dense``."""
        return cls(ZipperWeight.from_dense(embedding.weight.detach(), name=name, **options), embedding, switch)

    @classmethod
    def empty(
        cls, embedding: nn.Embedding, name: str = "weight", switch: PrecisionSwitch | None = None, **options: Any
    ) -> ZipperEmbedding:
        """The shape of ``embedding`` with values of 0 on its device (meta while a checkpoint loads)."""
        record = FORMATS[cls.format]
        record.require_fit(embedding.embedding_dim, name, **options)
        parts = record.zeros(tuple(embedding.weight.shape), embedding.weight.device, **options)
        return cls(ZipperWeight(*parts, name=name), embedding, switch)

    @property
    def in_features(self) -> int:
        """Elements of a row."""
        return self.embedding_dim

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.num_embeddings

    def packed_weight(self) -> ZipperWeight:
        """The codes as on disk: the parameters' own memory, or a copy of them where they are in rows."""
        parts, in_rows = self._in_one_layout("weight")
        return ZipperWeight(*(unprepack_table(ZipperParts(*parts)) if in_rows else parts))

    def validate(self, name: str) -> None:
        """As ``ZipperWeight.validate``, of the module called ``name``."""
        weight = self.packed_weight()
        ZipperWeight(*weight.parts, name).validate(self.num_embeddings, self.embedding_dim)

    def dequantized_module(self, dtype: torch.dtype) -> nn.Embedding:
        """The embedding it replaced, with the rows that it gives, in ``dtype``."""
        scaled = () if self._own_scale is None else (self._own_scale,)
        with torch.device("meta"):
            table = self._kind(self.num_embeddings, self.embedding_dim, self.padding_idx, *scaled)
        table.weight = nn.Parameter(self.packed_weight().dequantize(self.dtype).to(dtype), requires_grad=False)
        if scaled:
            table.embed_scale = torch.tensor(self._own_scale, device=table.weight.device)
        return table.train(self.training)

    def table(self) -> ZipperTable:
        """What ``ops.zipper_rows`` takes behind ids."""
        parts = self.prepack_().parts("weight")
        if self._how is None:
            self._how = split_of(parts.split)
        return table_of(parts, self._how)

    def _rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return ops.zipper_rows(ids, *self.table(), scale)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._how = None

    def _fit_device(self) -> bool:
        return True  # rows lie alike on every device

    def _in_tiles(self, name: str) -> Parts:
        return prepack_table(*self.parts(name))

    def _on_disk(self, name: str) -> Parts:
        return unprepack_table(ZipperParts(*self.parts(name)))

    def extra_repr(self) -> str:
        return self._said()


def _scale_of(embedding: nn.Embedding) -> float | None:
    """Gemma's, which its buffer has no memory for while a checkpoint loads."""
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return None
    return float(getattr(embedding, "scalar_embed_scale", scale) if torch.as_tensor(scale).is_meta else scale)
