"""The number formats of GGUF files that `distill` writes."""

from __future__ import annotations

from typing import Literal, get_args

OutType = Literal["f32", "f16", "bf16", "q8_0"]
OUTTYPES: tuple[str, ...] = get_args(OutType)
