"""The prompts that a user gives for a pair: records, conversations through the target's template, or plain text."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.documents.chat_template import ChatTemplate
from distill.documents.prompts import ChatPrompts, cut_prompts
from distill.documents.records import LISTS, PROMPTS
from distill.documents.sources import read_documents
from distill.errors import DataError
from distill.files import require_path
from distill.models.conversion.importing import is_gguf
from distill.models.gguf.file import GgufFile
from distill.models.gguf.file_head import open_head
from distill.models.hugging_face import encode, load_tokenizer
from distill.recipe import Chat, Corpus, Source
from distill.texts import Prompt

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}  # anything else is text
FIELDS = ", ".join(("text", *PROMPTS)) + f" or {', '.join(LISTS)} (lists)"  # that are read
SEED = 0  # of the order in which pieces of texts are taken


@dataclass(frozen=True)
class UserPrompts:
    """Prompts that are measured, others of the same files for what has to be fitted, what was left out and why, and the
    plain texts of the files."""

    measured: list[Prompt]
    others: list[Prompt]
    dropped: dict[str, int]
    texts: list[str]

    def classes(self) -> list[str]:
        """The class of each measured prompt: its label, else the file that it came from."""
        return [prompt.label or prompt.source or "prompts" for prompt in self.measured]


def sources_of(paths: Sequence[Path], option: str = "--prompts") -> tuple[Source, ...]:
    """Files and folders as sources of the corpus, by their endings; DataError for one that is missing or empty."""
    sources = []
    for path in paths:
        require_path(path, option)
        if not path.exists():
            raise DataError(f"there is no file {path}", f"correct {option}")
        if path.is_dir():
            sources.append(Source(kind="tree", path=str(path.resolve()), pattern="**/*", split="test"))
            continue
        if not path.stat().st_size:
            raise DataError(f"{path} is empty", "give a file with prompts: text, or jsonl, csv or parquet records")
        kind: Any = KINDS.get(path.suffix.lower(), "text")
        sources.append(Source(kind=kind, path=str(path.resolve()), split="test"))
    return tuple(sources)


def read_user_prompts(
    target: str,
    corpus: Corpus,
    chat: Chat,
    count: int,
    others: int,
    tokens: int,
    room: int,
    *,
    answer: int = 0,
    least: int = 2,
) -> UserPrompts:
    """Up to `count` prompts, and `others` more of the same files where something has to be fitted.

    Conversations go through the target's chat template, up to the first question; plain texts are cut into prompts of
    `tokens` tokens, with room for `answer` tokens between them. `room` is the most tokens of a prompt. Loads no
    weights. Raises DataError for fewer than `least` prompts, or too few others.
    """
    try:
        documents, dropped = read_documents(corpus, needed=("test",))
    except DataError as error:
        what = error.what.replace("corpus source ", "")
        raise DataError(what, f"records need a field {FIELDS}; rename theirs, or correct the file") from error
    with open_tokenizer(target) as tokenizer:
        plain = isinstance(tokenizer, GgufTokenizer)
        to_ids: Callable[[str], list[int]] = tokenizer.file.tokenize if plain else functools.partial(encode, tokenizer)
        chats = None
        if any(document.messages is not None for document in documents):
            chats = ChatPrompts(ChatTemplate(tokenizer, chat), room, SEED)
        size = min(tokens, room)
        prompts = cut_prompts(documents, to_ids, count + others, size, 4 * (size + answer), SEED, chats)
    for reason, number in Counter({} if chats is None else chats.dropped).items():
        dropped[reason.replace("prompts too long for corpus.block", f"prompts of more than {room} tokens")] += number
    least += min(others, 2)
    if len(prompts) < least:
        left = "".join(f"; {number} left out: {reason}" for reason, number in dropped.items())
        raise DataError(
            f"the files give {len(prompts)} prompts{left}",
            f"give more or longer ones, {least} at least; plain texts are cut into prompts of {size} tokens "
            "(--prompt-tokens, where the command has it)",
        )
    spare = min(others, max(len(prompts) - count, len(prompts) // 2))
    measured, rest = prompts[: min(count, len(prompts) - spare)], prompts[len(prompts) - spare :]
    return UserPrompts(measured, rest, dict(dropped), [one.text for one in documents if one.messages is None])


@contextmanager
def open_tokenizer(target: str) -> Iterator[Any]:
    """The tokenizer of a folder or a GGUF file, as `ChatTemplate` uses it; loads no weights."""
    with ExitStack() as stack:
        yield GgufTokenizer(target, stack) if is_gguf(target) else load_tokenizer(target)


def user_message(target: str, text: str, chat: Chat, required: bool) -> list[int] | None:
    """Token ids of a text as a user's message behind the first system prompt of `chat`, up to where the answer begins.

    None for a target without a chat template, DataError where one is `required`, or refuses the message.
    """
    with open_tokenizer(target) as tokenizer:
        if not tokenizer.chat_template:
            if required:
                raise DataError(f"{target} has no chat template", "continue the text as it is: --no-chat")
            return None
        system = [{"role": "system", "content": one} for one in chat.system[:1]]
        try:
            return ChatTemplate(tokenizer, chat).prompt([*system, {"role": "user", "content": text}])
        except ValueError as error:
            raise DataError(str(error), "continue the text as it is: --no-chat") from error


class GgufTokenizer:
    """A GGUF file's own tokenizer and chat template, as `ChatTemplate` and `encode` use those of transformers."""

    def __init__(self, reference: str, stack: ExitStack) -> None:
        values = open_head(Path(reference)).values
        template = values.get("tokenizer.chat_template")
        self.chat_template = template.decode("utf-8", "replace") if isinstance(template, bytes) else ""
        self.file = GgufFile(Path(reference), vocabulary_only=True)
        stack.callback(self.file.close)
        self._special = {name: self._piece(values.get(f"tokenizer.ggml.{name}_token_id")) for name in ("bos", "eos")}

    def _piece(self, token: Any) -> str:
        return self.decode([token]) if isinstance(token, int) and 0 <= token < self.file.head_rows else ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.file.detokenize(list(ids)).decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: list[Any], *, tokenize: bool, add_generation_prompt: bool, tools: Any, **arguments: Any
    ) -> str:
        """The messages as text, rendered as transformers renders templates."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {f"{name}_token": text for name, text in self._special.items()}
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **special,
            **arguments,
        )
        texts = rendered[0] if isinstance(rendered, tuple) else rendered
        return str(texts if isinstance(texts, str) else texts[0])

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Token ids of a rendered template, its control tokens read as such."""
        return {"input_ids": self.file.tokenize(text, parse_special=True)}
