"""The tokenizer and chat template of a model: of a Hugging Face folder, or of a GGUF file as llama.cpp reads it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from distill.engines.torch.hugging_face import load_tokenizer
from distill.files import is_gguf
from distill.gguf.head import open_head, token_key
from distill.gguf.library import GgufFile
from distill.gguf.tokenizer import chat_templates


@contextlib.contextmanager
def open_tokenizer(reference: str) -> Iterator[Any]:
    """The tokenizer of a folder or a GGUF file, with its chat template; loads no weights."""
    if not is_gguf(reference):
        yield load_tokenizer(reference)
        return
    with contextlib.closing(GgufFile(Path(reference), vocabulary_only=True)) as file:
        yield FileTokenizer(file)


class FileTokenizer:
    """A GGUF file's tokenizer and chat template, with the needed methods of transformers' tokenizers."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self._head = file, open_head(file.path)
        templates = chat_templates(self._head)
        # As in transformers: several templates by name, or one text.
        self.chat_template: Any = templates if len(templates) > 1 else templates.get("default")
        self.bos_token_id, self.eos_token_id = self._named("bos"), self._named("eos")

    def _named(self, role: str) -> int | None:
        token = self._head.values.get(token_key(role))
        return token if isinstance(token, int) and 0 <= token < self.file.head_rows else None

    @cached_property
    def ends(self) -> list[int]:
        """The ids that end a text in llama.cpp.

        If the file names no eos, llama.cpp takes an ordinary token for eos, often a comma. That token is left out.
        """
        llama, vocabulary = self.file.library, self.file.vocabulary
        eos = llama.llama_vocab_eos(vocabulary) if self.eos_token_id is None else -1
        ends = [token for token in range(self.file.vocabulary_size) if llama.llama_vocab_is_eog(vocabulary, token)]
        return [token for token in ends if token != eos or llama.llama_vocab_is_control(vocabulary, token)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.file.detokenize(list(ids)).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[Any],
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        tools: Any = None,
        **arguments: Any,
    ) -> str:
        """The messages as text, rendered as transformers renders templates."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.chat_template
        if not isinstance(template, str):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            bos_token="" if self.bos_token_id is None else self.decode([self.bos_token_id]),
            eos_token="" if self.eos_token_id is None else self.decode([self.eos_token_id]),
            **arguments,
        )
        texts = rendered[0] if isinstance(rendered, tuple) else rendered
        return str(texts if isinstance(texts, str) else texts[0])

    def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        """Token ids of a text, its control tokens read as such."""
        return {"input_ids": self.file.tokenize(text, parse_special=True, add_special=add_special_tokens)}


_TAG = re.compile(r"</?[a-z]+[1-6]?>")  # of HTML: some vocabularies, such as Gemma's, add them as tokens of plain text


def special_tokens(tokenizer: Any) -> set[int]:
    """The ids of special tokens, and of added ones that are more than white space or a tag of HTML."""
    if isinstance(tokenizer, FileTokenizer):
        is_control, file = tokenizer.file.library.llama_vocab_is_control, tokenizer.file
        return {token for token in range(file.vocabulary_size) if is_control(file.vocabulary, token)}
    source = str(tokenizer.chat_template)

    def plain(text: str) -> bool:
        return not text.strip(" \t\r\n▁") or bool(_TAG.fullmatch(text) and text not in source)

    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    added = {number for text, number in tokenizer.get_added_vocab().items() if not plain(text)}
    return added | marked | set(tokenizer.all_special_ids)
