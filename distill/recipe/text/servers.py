"""Recipe keys that reach a model on servers with OpenAI's API; sections answers.writer and teacher.server have them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from distill.recipe.section import Section

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
LONGEST_WAIT = 86400  # seconds
REACHING = ("urls", "key", "headers", "concurrency", "timeout", "retries")  # none of them changes a reply


class Servers(Section):
    """Servers that hold one model. Keys come from the environment and are never written."""

    urls: tuple[str, ...] = Field(
        (), description="base URLs of servers that hold the same target, such as http://localhost:8000/v1"
    )
    model: str | None = Field(None, description="its name on the servers; null: the only one that they serve")
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
