"""The integers of a GGUF file's quantised tensors, with the scales that turn them into values. Nothing is rounded.

Legend: R rows, C columns, S scales of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]  # uint8
Halves = NDArray[np.float16]


class Levels(NamedTuple):
    """Values [R, C]: (`numbers` − the type's centre) · `scale` + `zero`.

    Without bytes, `scale` has one number for each group of 32 columns. With `scale_byte`, it has one number for each
    256 columns, multiplied by the byte of each group. `zero` is stored likewise. The bytes of Q6_K (which has no zero)
    and the numbers of Q8_0 are signed.
    """

    numbers: Bytes  # [R, C]
    scale: Halves  # [R, S]
    zero: Halves | None = None
    scale_byte: Bytes | None = None
    zero_byte: Bytes | None = None


def _half(blocks: Bytes, start: int) -> Halves:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """Split bytes [..., n] into [..., 2, n]: the lower halves of all bytes, then the upper halves."""
    return np.stack((packed & 15, packed >> 4), -2)


def _five_bit_numbers(blocks: Bytes, start: int) -> Bytes:
    """Return numbers [..., 32] from 4 bytes of fifth bits and 16 bytes of the other bits."""
    fifth = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return _nibbles(blocks[..., start + 4 :]).reshape(fifth.shape) | fifth << 4


def _k_levels(blocks: Bytes, numbers: Bytes) -> Levels:
    """Levels of Q4_K and Q5_K. Their 8 scales and 8 zeros of 6 bits share 12 bytes."""
    first, second, upper = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((first & 63, upper & 15 | first >> 2 & 48), -1)
    zeros = np.concatenate((second & 63, upper >> 4 | second >> 2 & 48), -1)
    return Levels(numbers, _half(blocks, 0), -_half(blocks, 2), scales, zeros)


def _q4_k(blocks: Bytes) -> Levels:
    return _k_levels(blocks, _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)))


def _q5_k(blocks: Bytes) -> Levels:
    lower = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    fifth = np.unpackbits(blocks[..., None, 16:48], axis=-2, bitorder="little")  # Group j has bit j of each byte.
    return _k_levels(blocks, lower | fifth << 4)


def _q6_k(blocks: Bytes) -> Levels:
    lower = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    return Levels(lower.reshape(upper.shape) | upper << 4, _half(blocks, 208), scale_byte=blocks[..., 192:208])


FROM_BLOCKS: dict[str, Callable[[Bytes], Levels]] = {  # ggml's type -> levels of blocks [R, n, bytes]
    "Q4_0": lambda blocks: Levels(_nibbles(blocks[..., 2:]), _half(blocks, 0)),
    "Q4_1": lambda blocks: Levels(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)),
    "Q5_0": lambda blocks: Levels(_five_bit_numbers(blocks, 2), _half(blocks, 0)),
    "Q5_1": lambda blocks: Levels(_five_bit_numbers(blocks, 4), _half(blocks, 0), _half(blocks, 2)),
    "Q8_0": lambda blocks: Levels(blocks[..., 2:], _half(blocks, 0)),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def levels_of(kind: str, blocks: Bytes) -> Levels:
    """Return the levels of blocks [R, n, bytes] of one of the types in FROM_BLOCKS."""
    levels, rows = FROM_BLOCKS[kind](blocks), len(blocks)
    return Levels._make(None if part is None else part.reshape(rows, -1) for part in levels)
