"""Numbers between the host and a device: every answer that the host waits for comes through `fetch`, which counts.

A device works through its queue on its own; the host stops only where it needs a number from it. So one `fetch` is one
synchronisation, and `count` says how many there were. Tensors on the CPU take the same path and are counted alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Count:
    """How often the host waited for a device since the process started."""

    def __init__(self) -> None:
        self.fetches = 0


count = Count()


def fetch(*tensors: Tensor) -> list[Tensor]:
    """These tensors on the CPU, of the same types and shapes, by one transfer; they must lie on one device."""
    count.fetches += 1
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    return unpacked(packed(tensors).cpu(), tensors)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one buffer of bytes, because each transfer of its own would be one more wait."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unpacked(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `packed` put into a buffer, of the types and shapes of `like`."""
    parts = together.split([tensor.numel() * tensor.element_size() for tensor in like])
    # Copies, because a view of another type must begin at a multiple of its width.
    return [
        part.clone().view(original.dtype).reshape(original.shape) for part, original in zip(parts, like, strict=True)
    ]


def send(numbers: Sequence[Any], device: torch.device, kind: torch.dtype = torch.long) -> Tensor:
    """A tensor of host numbers on a device; CUDA takes it without a wait, because it comes from pinned memory."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=kind, device=device)
    return torch.tensor(numbers, dtype=kind, pin_memory=True).to(device, non_blocking=True)
