"""Recipe sections: who writes the answers and gives the distributions where the target does not run in transformers."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from distill.recipe.section import Section

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
LONGEST_WAIT = 86400  # seconds
CONNECTION_KEYS = ("urls", "key", "headers", "concurrency", "timeout", "retries")  # none of them changes a reply


class Servers(Section):
    """Servers with OpenAI's API that run one model. Keys come from the environment and are never written."""

    urls: tuple[str, ...] = Field(
        (), description="base URLs of servers that run the same target, such as http://localhost:8000/v1"
    )
    model: str | None = Field(None, description="its name on the servers; null: the only model they serve")
    key: str | None = Field(None, pattern=VARIABLE, description="environment variable that holds the servers' API key")
    headers: dict[str, str] = Field(
        {}, description="additional HTTP headers: name, and environment variable that holds the value"
    )
    concurrency: int = Field(8, ge=1, le=4096, description="simultaneous requests, over all servers")
    timeout: float = Field(600, gt=0, le=LONGEST_WAIT, description="seconds to wait for a reply")
    retries: int = Field(
        6, ge=0, le=100, description="retries after a busy server, a broken connection or an unreadable reply"
    )

    @field_validator("urls")
    @classmethod
    def _urls_hold_no_secret(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            try:
                parts = urlsplit(url)
                good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:
                good = False
            if not good or any(ord(letter) <= 32 or ord(letter) > 126 for letter in url):
                raise ValueError("a URL such as http://localhost:8000/v1 is needed")
            if "@" in parts.netloc or parts.query or parts.fragment:
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


class Writer(Servers):
    """Who writes the answers: a GGUF file of the target, run by llama-cpp-python, or servers with OpenAI's API.

    Give exactly one of `gguf` and `urls`. Prompts are rendered and tokenized here, with the tokenizer of
    `target.model`, whose weights are not loaded. Servers receive token ids if they accept them, else text.
    """

    gguf: str | None = Field(None, description="a GGUF file of the target")
    api: Literal["completions", "chat"] = Field(
        "completions",
        description="completions: send the rendered prompt; chat: send the messages and let the server render them",
    )
    missing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of prompts that may remain unanswered after all retries: they are dropped and counted. "
        "Above it, stage answers stops, and the next command asks again",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Writer:
        if (self.gguf is None) == (not self.urls):
            raise ValueError("give either gguf, a file, or urls, servers")
        if self.gguf is not None:
            served = ("model", "api", *(name for name in CONNECTION_KEYS if name != "urls"), "missing")
            given = [name for name in served if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                raise ValueError(f"{', '.join(given)}: for servers (urls) alone, and this is a GGUF file")
        return self


class TeacherServer(Servers):
    """Servers that run the target and return log-probabilities of prompts, as vLLM's /v1/completions does.

    The log-probabilities are those of temperature 1, whatever the server's sampler. Start vLLM with `--max-logprobs`
    `teacher.top_k`, and up to 32 more if the head has padding rows: `distill check` prints the number.
    """

    urls: tuple[str, ...] = Field(
        min_length=1, description="base URLs of servers that run the same model, such as http://localhost:8000/v1"
    )
    model: str = Field(min_length=1, description="its name on the servers, as /v1/models lists it")
    prompts: Literal["ids", "text"] = Field(
        "ids",
        description="send token ids, or text if the server accepts nothing else; documents whose text tokenizes to "
        "other ids are then skipped and counted",
    )
