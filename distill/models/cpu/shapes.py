"""Products of few shapes: on a processor oneDNN compiles a primitive for each number of rows, and keeps it.

What comes in batches of changing size is filled up with rows of zeros, so that hours of it need a few primitives.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64  # a number of rows is filled up to a multiple of so many


def filled_count(count: int, tensor: Tensor) -> int:
    """The rows that `count` of them become where this tensor is: on an accelerator as many."""
    return -(-count // ROWS) * ROWS if tensor.device.type == "cpu" else count


def filled(rows: Tensor) -> Tensor:
    """Rows [N, H] with zeros behind them, up to `filled_count`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, filled_count(len(rows), rows) - len(rows)))
