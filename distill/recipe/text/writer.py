"""Recipe section: who writes the answers where the target does not run in transformers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from distill.recipe.text.servers import REACHING, Servers


class Writer(Servers):
    """The target as a GGUF file, read by llama-cpp-python, or as servers with OpenAI's API that hold it.

    Exactly one of `gguf` and `urls` is given. Prompts are rendered and encoded here, with the tokenizer of
    `target.model`, whose weights are not loaded. A server gets the token ids where it takes them, else the text.
    """

    gguf: str | None = Field(None, description="a GGUF file of the target")
    api: Literal["completions", "chat"] = Field(
        "completions",
        description="completions: send our rendered prompt; chat: send the messages of chat prompts, which the server "
        "renders",
    )
    missing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="largest share of prompts that may stay without a reply after all attempts: they are dropped and "
        "counted; with more of them, stage answers stops, and the next command asks again",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Writer:
        if (self.gguf is None) == (not self.urls):
            raise ValueError("give either gguf, a file, or urls, servers")
        if self.gguf is not None:
            served = ("model", "api", *(name for name in REACHING if name != "urls"), "missing")
            given = [name for name in served if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                raise ValueError(f"{', '.join(given)}: for servers (urls) alone, and this is a GGUF file")
        return self
