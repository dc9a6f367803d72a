"""Texts of a configuration, cut into the draft's accepted tokens and the target's own, for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from distill.benchmark.compare import TimedText
from distill.results.speedup_results import PairMeasured, Sample, Segment
from distill.speculative.stop_strings import Characters

COUNT = 3


def sample_texts(
    tokenizer: Any,
    token_bytes: Callable[[int], bytes],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[TimedText],
    pair: PairMeasured,
) -> list[Sample]:
    """The first few texts; a character that several tokens share belongs to the segment of the last of them."""
    samples = []
    for text in texts[:COUNT]:
        tokens = list(zip(text.decoded.tokens, text.decoded.from_draft, strict=True))
        segments, characters = [], Characters()
        for from_draft, group in groupby(tokens, key=lambda pair: pair[1]):
            written = "".join(characters.add(token_bytes(token)) for token, _ in group)
            segments.append(Segment(written, "accepted" if from_draft else "target"))
        if segments:
            segments[-1] = Segment(segments[-1].text + characters.finish(), segments[-1].kind)
        prompt = tokenizer.decode(list(prompts[text.prompt]))
        samples.append(Sample(pair.pair, pair.backend, pair.grown, text.title, prompt, segments))
    return samples
