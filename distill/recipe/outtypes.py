"""The number formats of GGUF files that `distill` writes."""

from __future__ import annotations

from typing import Literal, get_args

Direct = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
OutType = Literal[
    Direct, "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"
]
DIRECT: tuple[str, ...] = get_args(Direct)  # written here; the others by llama.cpp's quantiser
OUTTYPES: tuple[str, ...] = get_args(OutType)
