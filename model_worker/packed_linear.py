"""Linear layers whose weights lie as the CPU's matrix kernels read them.

Knows `torch.nn.Linear` and oneDNN's packed weights. Does not know models: it
replaces the linear layers of any module, and computes those that a parent gives
the same input (query, key and value; gate and up) in one call.

A weight is reordered once instead of at every call: between 2 and 32 rows a
product takes a third to two thirds of the time. Only float32 on a CPU is packed;
anything else stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeGuard

import torch

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that `transformers` gives layers which one parent calls with one input, in this order."""


class _PackedWeight:
    """`[out, in]` in oneDNN's order, and a bias `[out]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = None if bias is None else bias.detach()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return output


class PackedLinear(torch.nn.Module):
    """One layer: `[..., in]` to `[..., out]`."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self._packed = _PackedWeight(layer.weight, layer.bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._packed(rows)


class _Pending(threading.local):
    """Products that siblings have not taken yet, of the forward pass that this thread is in."""

    rows: torch.Tensor | None = None
    parts: list[torch.Tensor | None]


class _SiblingProducts:
    """What the first of some siblings computed for all; each takes its part once."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        bias = None
        if layers[0].bias is not None:
            bias = torch.cat([layer.bias for layer in layers])
        self._packed = _PackedWeight(torch.cat([layer.weight for layer in layers]), bias)
        self._sizes = [layer.out_features for layer in layers]
        # Two engines may run one network at once, each in a thread of its own.
        self._pending = _Pending()

    def take(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        pending = self._pending
        if rows is not pending.rows or pending.parts[index] is None:
            pending.rows = rows
            pending.parts = list(self._packed(rows).split_with_sizes(self._sizes, dim=-1))
        part, pending.parts[index] = pending.parts[index], None
        assert part is not None
        if not any(each is not None for each in pending.parts):
            pending.rows = None
        return part


class SiblingLinear(torch.nn.Module):
    """One of several layers that get one input: `[..., in]` to `[..., out]`, a view of the joint product."""

    def __init__(self, products: _SiblingProducts, index: int) -> None:
        super().__init__()
        self._products = products
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._products.take(self._index, rows)


def pack_linear_layers(network: torch.nn.Module) -> None:
    """Replaces the linear layers of a network in place, where that is faster. Packing twice does nothing."""
    if not _has_packing():
        return
    for parent in list(network.modules()):
        if isinstance(parent, torch.nn.ModuleDict):
            continue  # an adapter's: `peft` asks those for their weights
        for names in SIBLINGS:
            layers = [layer for layer in (getattr(parent, name, None) for name in names) if _can_pack(layer)]
            if len(layers) == len(names) and len({layer.bias is None for layer in layers}) == 1:
                products = _SiblingProducts(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, SiblingLinear(products, index))
        for name, child in list(parent.named_children()):
            if _can_pack(child):
                setattr(parent, name, PackedLinear(child))


def _has_packing() -> bool:
    # Their names are private to torch: a build or a version may lack them.
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )


def _can_pack(layer: object) -> TypeGuard[torch.nn.Linear]:
    # The class itself: a subclass may compute something else.
    return (
        type(layer) is torch.nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    )
