"""How is OpenVINO's int4 matrix product measured beside us? One compiled model a copy of the weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eval.peers.missing import MissingPeer


class OpenVinoInt4:
    """`copies` copies of a symmetric int4 weight; activations quantized to int8 in the weight's groups."""

    def __init__(self, packed: Tensor, scales: Tensor, group_size: int, copies: int):
        """packed uint8 ``[out, in / 2]`` low nibble first; scales float16 ``[out, in / group_size]``.

        MissingPeer without the `openvino` package.
        """
        try:
            import openvino
        except ImportError as error:
            raise MissingPeer(f"{error}; install the openvino wheel") from None
        self._openvino, self._core = openvino, openvino.Core()
        self._group, self._kept = group_size, []
        self.nbytes = packed.nbytes + scales.nbytes
        self._requests = [self._compiled(packed, scales, copy) for copy in range(copies)]

    def _compiled(self, packed: Tensor, scales: Tensor, copy: int):
        codes = packed.clone().numpy()
        codes[0, 0] ^= copy  # so that no cache of constants can share the copies
        model = self._model(codes, scales.numpy())
        options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self._group,
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": False,
        }
        return self._core.compile_model(model, "CPU", options).create_infer_request()

    def _model(self, codes: np.ndarray, scales: np.ndarray):
        """x W^T as OpenVINO's weight compression writes it: (u4 - 8) * scale, reshaped to ``[out, in]``."""
        openvino, op, kinds = self._openvino, self._openvino.opset13, self._openvino.Type
        out, groups = scales.shape
        zero = np.array([0x88], dtype=np.uint8)
        self._kept += [codes, zero]  # openvino.Tensor shares their memory
        weight = openvino.Tensor(codes, openvino.Shape([out, groups, self._group]), kinds.u4)
        offset = openvino.Tensor(zero, openvino.Shape([1, 1, 1]), kinds.u4)
        centred = op.subtract(op.convert(op.constant(weight), "f16"), op.convert(op.constant(offset), "f16"))
        scaled = op.multiply(centred, op.constant(scales[:, :, None]))
        matrix = op.reshape(scaled, op.constant(np.array([out, groups * self._group])), False)
        x = op.parameter([-1, groups * self._group], kinds.f32)
        return openvino.Model([op.matmul(x, op.convert(matrix, "f32"), False, True)], [x], "linear")

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns float32 ``[n, out]``."""
        rows = x.contiguous().numpy()
        for request in self._requests:
            request.set_input_tensor(self._openvino.Tensor(rows))

        def call(copy: int) -> np.ndarray:
            self._requests[copy].infer()
            return self._requests[copy].get_output_tensor().data

        return call

    def close(self) -> None:
        """Gives the memory back."""
        self._requests, self._kept = [], []
