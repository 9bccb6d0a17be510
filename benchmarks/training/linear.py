"""Matrix products for generation: float32, or int8 with a scale per row and per channel.

The int8 product is about four times faster on CPUs with VNNI. Each activation row is divided
by its largest magnitude first, so that one outlier row does not coarsen all the others. Without
VNNI, sums of two products saturate at 16 bits; activations then take seven bits instead of eight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Product = Callable[[Tensor], Tensor]


def float_product(weight: Tensor) -> Product:
    """`x [N, in]` to `x @ weight.T`, for `weight [out, in]`."""
    weight = weight.detach().float().contiguous()
    return lambda x: F.linear(x, weight)


def int8_product(weight: Tensor) -> Product:
    """The same in int8: dynamic activations, symmetric weights per output channel."""
    weight = weight.detach().float()
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise RuntimeError("int8 generation needs torch with fbgemm (x86); use float32 instead")
    torch.backends.quantized.engine = "fbgemm"
    scales = weight.abs().amax(dim=1).clamp_min(1e-8) / 127
    zeros = torch.zeros_like(scales, dtype=torch.long)
    quantised = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
    seven_bits = not torch.cpu._is_vnni_supported()
    packed = torch.ops.quantized.linear_prepack(quantised, None)

    def product(x: Tensor) -> Tensor:
        row = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8)
        return torch.ops.quantized.linear_dynamic(x / row, packed, seven_bits) * row

    return product
