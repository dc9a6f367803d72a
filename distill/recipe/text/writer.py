"""Recipe section: who writes the answers where the target does not run in transformers."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from distill.recipe.section import Section

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
LONGEST_WAIT = 86400  # seconds


class Writer(Section):
    """The target as a GGUF file, read by llama-cpp-python, or as servers with OpenAI's API that hold it.

    Exactly one of `gguf` and `urls` is given. Prompts are rendered and encoded here, with the tokenizer of
    `target.model`, whose weights are not loaded. A server gets the token ids where it takes them, else the text.
    """

    gguf: str | None = Field(None, description="a GGUF file of the target")
    urls: tuple[str, ...] = Field(
        (), description="base URLs of servers that hold the same target, such as http://localhost:8000/v1"
    )
    model: str | None = Field(None, description="its name on the servers; null: the only one that they serve")
    api: Literal["completions", "chat"] = Field(
        "completions",
        description="completions: send our rendered prompt; chat: send the messages of chat prompts, which the server "
        "renders",
    )
    key: str | None = Field(
        None, pattern=VARIABLE, description="name of the environment variable that holds the servers' API key"
    )
    headers: dict[str, str] = Field(
        {}, description="further HTTP headers: the name of each, and the environment variable that holds its value"
    )
    concurrency: int = Field(8, ge=1, le=4096, description="requests at a time, over all servers")
    timeout: float = Field(600, gt=0, le=LONGEST_WAIT, description="seconds to wait for a reply")
    retries: int = Field(
        6, ge=0, le=100, description="further attempts after a busy server, a broken connection or an unreadable reply"
    )

    missing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="largest share of prompts that may stay without a reply after all attempts: they are dropped and "
        "counted; with more of them, stage answers stops, and the next command asks again",
    )

    @field_validator("urls")
    @classmethod
    def _urls_hold_no_secret(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            try:
                parts = urlsplit(url)
                _ = parts.port  # raises for a port that is none
            except ValueError:
                raise ValueError("a URL such as http://localhost:8000/v1 is needed") from None
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("a URL such as http://localhost:8000/v1 is needed")
            if parts.username or parts.password or parts.query or parts.fragment:
                raise ValueError(
                    "a URL ends with its path and holds no name, password or query: keys come from the environment "
                    "(key, headers)"
                )
        return tuple(url.rstrip("/") for url in value)

    @field_validator("headers")
    @classmethod
    def _headers_name_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, variable in value.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise ValueError("the name of a header is letters, digits and dashes")
            if not re.fullmatch(VARIABLE, variable):
                raise ValueError(f"header {name} needs the name of an environment variable, never the value itself")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Writer:
        if (self.gguf is None) == (not self.urls):
            raise ValueError("give either gguf, a file, or urls, servers")
        if self.gguf is not None:
            served = ("model", "api", "key", "headers", "concurrency", "timeout", "retries", "missing")
            given = [name for name in served if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                raise ValueError(f"{', '.join(given)}: for servers (urls) alone, and this is a GGUF file")
        return self
