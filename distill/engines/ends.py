"""What ends a target's texts: the tokens that its files name, the token with which its chat template ends a turn, and
an end of a turn that is plain text. Every command decodes with what `target_ends` finds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distill.engines.torch.hugging_face import end_ids, load_tokenizer, stated_ends, turn_ends
from distill.errors import DistillError
from distill.files import is_gguf
from distill.progress import warn_once


@dataclass(frozen=True)
class Ends:
    """The ids that end a text, and the texts that end an answer in a conversation; `words` say which they are."""

    ids: list[int]
    texts: tuple[str, ...]
    words: str


def target_ends(reference: str, tokenizer: Any = None, known: Sequence[int] = ()) -> Ends:
    """What ends the texts of a model, its `tokenizer` loaded where it is not given; reads no weights.

    `known` are the ids that llama.cpp takes for ends. A GGUF file whose tokenizer cannot be imported has these alone.
    Ends that no file names, and a model without any, are said once on stderr.
    """
    ids: set[int] = {*known}
    texts: tuple[str, ...] = ()
    if tokenizer is None:
        with contextlib.suppress(DistillError):
            tokenizer = load_tokenizer(reference)
    if tokenizer is None:
        words = f"tokens {sorted(ids)}" if ids else "nothing"
    else:
        stated = {*known, *({tokenizer.eos_token_id, *stated_ends(reference)} - {None})}
        ids |= {*stated, *end_ids(reference, tokenizer)}
        beyond, text = turn_ends(tokenizer)
        ids |= {*beyond}
        texts = (text,) if text and not beyond else ()
        names = [str(tokenizer.convert_ids_to_tokens(one)) for one in sorted(ids)]
        words = ", ".join([*names, *(f"the text {one!r}" for one in texts)]) or "nothing"
        if untold := [one for one in beyond if one not in stated]:
            name = tokenizer.convert_ids_to_tokens(untold[0])
            warn_once(
                f"{reference}: its template ends a turn with {name}, which none of its files names: texts end there"
            )
        if texts:
            warn_once(f"{reference}: its template ends a turn with the text {text!r}: answers end before it")
    if not ids and not texts:
        place = "tokenizer.ggml.eos_token_id" if is_gguf(reference) else "eos_token_id in config.json"
        warn_once(f"{reference} names nothing that ends a text ({place}): each goes on to its most tokens")
    return Ends(sorted(ids), texts, words)
