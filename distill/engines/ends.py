"""The tokens and texts that end a target's texts. Every command decodes with the ends that `target_ends` finds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from distill.engines.tokenizer import FileTokenizer, open_tokenizer, special_tokens
from distill.engines.torch.hugging_face import encode, stated_ends
from distill.files import is_gguf
from distill.progress import note_once, warn_once

FIRST_LINE = re.compile(r"\s*\S[^\n]*")
MIN_CHARACTERS = 2  # A single character may be a part of an answer.


@dataclass(frozen=True)
class Ends:
    """The ids and the texts that end an answer. `words` name them for a user.

    `unnamed` are the ids that the chat template alone shows, so that a server has to be told of them.
    """

    ids: list[int]
    texts: tuple[str, ...]
    unnamed: list[int]
    words: str


def turn_end(tokenizer: Any) -> tuple[list[int], str]:
    """The special token that the chat template writes first after an answer, as a list of one id, or else the text.

    If a conversation ends without either, the end before the next question counts. Both are empty if the template shows
    no end, and if there is no template.
    """
    turns = [("user", "QUESTION"), ("assistant", "ANSWER"), ("user", "FURTHER")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for count in (2, 3):
        try:
            whole = str(tokenizer.apply_chat_template(messages[:count], tokenize=False))
        except Exception:  # There is no template, or it refuses these turns. Templates are foreign programs.
            continue
        after = whole.rpartition("ANSWER")[2] if "ANSWER" in whole else ""
        after = after.partition("FURTHER")[0]
        if not after.strip():
            continue
        ids = encode(tokenizer, after.lstrip())[:1]
        if ids and ids[0] in special_tokens(tokenizer):
            begins = ids[0] == tokenizer.bos_token_id != tokenizer.eos_token_id  # the next question
            return ([] if begins else ids), ""
        line = FIRST_LINE.match(after.rstrip())
        return [], line[0] if line and len(line[0].strip()) >= MIN_CHARACTERS else ""
    return [], ""


def target_ends(reference: str, tokenizer: Any = None) -> Ends:
    """The ends of a model's texts. Its tokenizer is loaded if it is not given. No weights are read.

    A line on stderr names the ends once in a process. A warning names ends that no file names, and says that a model
    has none.
    """
    if tokenizer is None:
        with open_tokenizer(reference) as opened:
            return target_ends(reference, opened)
    if isinstance(tokenizer, FileTokenizer):
        stated = {*tokenizer.ends}
    else:
        stated = {tokenizer.eos_token_id, *stated_ends(reference)} - {None}
    turn, text = turn_end(tokenizer)
    unnamed, ids = [token for token in turn if token not in stated], sorted({*stated, *turn})
    texts = (text,) if text else ()
    words = ", ".join([*(tokenizer.decode([token]) for token in ids), *([f"the text {text!r}"] if text else [])])
    if unnamed:
        shown = tokenizer.decode(unnamed)
        warn_once(f"{reference}: its template ends a turn with {shown}, which none of its files names: texts end there")
    if texts:
        warn_once(f"{reference}: its template ends a turn with the text {text!r}: texts end before it")
    if words:
        note_once(f"{reference}: texts end at {words}")
    else:
        place = "tokenizer.ggml.eos_token_id" if is_gguf(reference) else "eos_token_id in config.json"
        warn_once(f"{reference} names nothing that ends a text ({place}): each goes on to its most tokens")
    return Ends(ids, texts, unnamed, words or "nothing")
