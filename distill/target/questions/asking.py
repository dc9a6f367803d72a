"""What a corpus source of kind target asks for: user headers behind which questions are written, samplers, limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distill.documents.chat_template import ChatTemplate, UserHeader
from distill.documents.prompts import ChatPrompts
from distill.errors import DataError, RecipeError
from distill.models.hugging_face import encode, end_ids, load_tokenizer
from distill.recipe import Recipe, SamplerSettings, Source
from distill.target.groups import rules_of

OPENINGS = 4  # are shown
TEXTS_PER_QUESTION = 3  # are asked for at most


@dataclass
class Conversation:
    """A numbered conversation: its messages so far, and whether the template is rendered with thinking on."""

    id: str
    messages: list[dict[str, Any]]
    thinking: bool | None
    opening: str = ""  # of the user's first message

    @property
    def texts(self) -> list[str]:
        """The user's messages."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def add(self, text: str, role: str = "user") -> None:
        """Append a message."""
        self.messages = [*self.messages, {"role": role, "content": text}]


class Asking:
    """The requests for one source: headers, samplers and limits.

    Raises DataError or RecipeError where the target has no template, where its user header cannot be found, and where
    the questions would not fit a block.
    """

    def __init__(self, recipe: Recipe, source: Source, number: int) -> None:
        self.recipe, self.source, self.number = recipe, source, number
        tokenizer = load_tokenizer(recipe.target.model)
        self.template = ChatTemplate(tokenizer, recipe.chat)
        self.chat = ChatPrompts(self.template, recipe.corpus.block - recipe.answers.new_tokens, recipe.seed)
        self.ends = end_ids(recipe.target.model, tokenizer)
        self.rules = rules_of(recipe, tokenizer)
        self._headers: dict[str, UserHeader] = {}
        self._require_room()

    def _require_room(self) -> None:
        """Raise RecipeError where the longest question could not be answered in a block."""
        openings = [len(encode(self.template.tokenizer, text)) for text in self.source.openings]
        longest, room = self.source.tokens + max(openings, default=0), min(self.chat.longest, self.rules.room)
        before = [[{"role": "system", "content": text}] for text in self.recipe.chat.system] or [[]]
        for system in before:
            for opening in ("", *self.source.openings):
                self.header(system, None, opening)
        around = max(len(self.template.prompt([*one, {"role": "user", "content": "a"}])) for one in before)
        if around + longest > room:
            raise RecipeError(
                f"a question of corpus.sources may have {longest} tokens, with {around} of the template around it: "
                f"corpus.block has room for {room} before answers.new_tokens",
                "raise corpus.block, or lower tokens of the source, or answers.new_tokens",
            )

    def begin(self, number: int) -> Conversation:
        """The conversation of a numbered text, with the system prompt and the thinking that the seed draws for it."""
        name = f"question-{self.number}-{number:07d}"
        openings = self.source.openings
        opening = self.chat.draw(name, "opening", openings) if openings else ""
        return Conversation(name, self.chat.system(name), self.chat.thinking(name), opening)

    def header(self, messages: list[dict[str, Any]], thinking: bool | None, opening: str = "") -> UserHeader:
        """The user header behind messages, with the message's opening; DataError, with the reason, where it cannot be
        found."""
        name = json.dumps([messages, thinking, opening])
        if name in self._headers:
            return self._headers[name]
        try:
            header = self.template.user_header(messages, self.ends, thinking, opening)
        except ValueError as error:
            raise DataError(
                f"the target's chat template has no user header that questions could be written behind: {error}",
                "use other corpus.sources than kind: target",
            ) from error
        if len(messages) < 2:  # the same for many conversations
            self._headers[name] = header
        return header

    def writing(self, ends: Sequence[str]) -> Recipe:
        """The recipe of a writer of questions, which end before each of the texts `ends`, too."""
        own = {"stop": tuple(ends), "repetition_penalty": 1.0}
        return self.recipe.model_copy(
            update={
                "sampler": SamplerSettings(temperature=self.source.temperature, top_p=self.source.top_p),
                "answers": self.recipe.answers.model_copy(update=own),
            }
        )


def check_questions(recipe: Recipe) -> list[str]:
    """What each source of kind target will ask, for `distill check`; loads no weights. Raises as `Asking` does."""
    lines = []
    for number, source in enumerate(recipe.corpus.asked):
        asking = Asking(recipe, source, number)
        header = asking.header(asking.begin(0).messages, None)
        turns = f", up to {source.turns} user's turns each" if source.turns > 1 else ""
        lines += [
            f"questions: {source.questions} of the target's own, from at most "
            f"{TEXTS_PER_QUESTION * (source.questions or 0)} texts of at most {source.tokens} tokens, at temperature "
            f"{source.temperature:g} and top-p {source.top_p:g}{turns}",
            f"written behind the template's user header ({len(header.ids)} tokens): {header.text!r}"
            + ("" if header.end is None else f", up to {header.end!r}"),
        ]
        if source.openings:
            shown = ", ".join(repr(text) for text in source.openings[:OPENINGS])
            more = len(source.openings) - OPENINGS
            lines.append(f"they begin with one of: {shown}" + (f" and {more} more" if more > 0 else ""))
    return lines
