"""Streamed decoding for a person at a terminal: what the draft got right is marked."""

from __future__ import annotations

import sys

from distill.errors import DataError
from distill.models.hugging_face import (
    TorchModel,
    encode,
    end_ids,
    load_model,
    load_tokenizer,
    pick_device,
    real_tokens,
)
from distill.recipe import Recipe
from distill.speculative.decode import Decoded, plain, room_for, speculative_rounds

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def stream(recipe: Recipe, references: tuple[str, str], text: str, length: int, limit: int) -> None:
    """Continue `text` with (target, draft), printing tokens as rounds end and a summary on stderr.

    Accepted tokens are green on a terminal; elsewhere the text is printed bare. Raises DataError for a prompt that is
    empty or fills the context.
    """
    device = pick_device(recipe.device)
    tokenizer = load_tokenizer(references[0])
    hugging_face = load_model(references[0], recipe.target.dtype, device)
    vocabulary = real_tokens(hugging_face.config, tokenizer)
    target = TorchModel(hugging_face, vocabulary)
    draft = TorchModel(load_model(references[1], recipe.target.dtype, device), vocabulary)
    ids = encode(tokenizer, text)
    if not ids:
        raise DataError("the prompt is empty", "give some text to continue")
    room = room_for(target, draft, len(ids), limit)
    if room < 1:
        raise DataError(f"the prompt's {len(ids)} tokens fill the context of {target.capacity}", "shorten it")
    if room < limit:
        print(f"the context leaves room for {room} of {limit} tokens", file=sys.stderr)
    ends = end_ids(hugging_face.config, tokenizer)
    colour = sys.stdout.isatty()
    print(text, end="", flush=True)
    result = Decoded()
    if length == 0:
        result = plain(target, ids, room, ends)
        print(tokenizer.decode(result.tokens))
    else:
        shown = 0
        pending: list[int] = []  # bytes of one character may be spread over tokens: wait until they are whole
        for _ in speculative_rounds(target, draft, ids, room, length, ends, result):
            while shown < len(result.tokens):
                pending.append(result.tokens[shown])
                piece = tokenizer.decode(pending)
                marked = colour and result.from_draft[shown]
                shown += 1
                if not piece.endswith("\ufffd") or len(pending) > 8:
                    print(f"{GREEN}{piece}{RESET}" if marked else piece, end="", flush=True)
                    pending = []
        print(tokenizer.decode(pending))
    rounds = result.rounds
    summary = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tok/s after the first"
    if rounds:
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        rate = f"{accepted / drafted:.1%}" if drafted else "none drafted"
        summary += (
            f", {(len(result.tokens) - 1) / len(rounds):.2f} tokens/round, accepted {accepted}/{drafted} ({rate})"
        )
    print(summary, file=sys.stderr)
