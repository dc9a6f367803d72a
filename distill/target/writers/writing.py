"""The protocol of a writer, and the writer that a recipe asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

from distill.recipe import Recipe
from distill.texts import Reply, Request

Say = Callable[[str], None]


class Writer(Protocol):
    """Continues prompts as the target does.

    `by_prompt`: a reply does not depend on other requests, so each is kept as it comes. Else requests that are written
    together affect each other through rounding, and a group is written whole.
    """

    by_prompt: bool

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """A reply to each request, in any order; requests appended to `waiting` between replies are answered too."""
        ...

    def close(self) -> list[str]:
        """Free models and connections; lines about what went wrong and was mended."""
        ...


def open_writer(recipe: Recipe, tokenizer: Any, config: Any) -> Writer:
    """The writer of a recipe's answers, ready to write.

    `config` is the target's. Raises DataError or PairError for a model that cannot be used, EndpointError for a server.
    """
    settings = recipe.answers.writer
    if settings is None:
        from distill.target.writers.local import TorchWriter

        return TorchWriter(recipe, tokenizer)
    if settings.gguf is not None:
        from distill.target.writers.local import GgufWriter

        return GgufWriter(recipe, tokenizer, config)
    from distill.target.writers.server import ServerWriter

    return ServerWriter(recipe, tokenizer, config)


def check_writer(recipe: Recipe) -> list[str]:
    """The file is a GGUF of the recipe's target, or each server answers and serves its model; lines to print."""
    settings = recipe.answers.writer
    if settings is None:
        return []
    if settings.gguf is not None:
        from distill.target.writers.local import require_gguf

        require_gguf(recipe.target.model, settings.gguf)
        return [f"answers: written by {settings.gguf}, which has the target's tokens"]
    from distill.target.endpoint import Endpoint

    with Endpoint(settings.model_copy(update={"retries": 0}), "answers.writer") as endpoint:
        return [f"answers: {url} serves {model}" for url, model, _ in endpoint.served()]
