"""Writers on this machine: the target in transformers, and a GGUF file of it in llama.cpp."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.errors import DataError, PairError
from distill.models.base import Model
from distill.models.batched import BatchedTorchModel
from distill.models.cpu_products import prepacked
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import end_ids, load_target, pick_device, real_tokens, text_folder
from distill.models.metadata import VocabularyMetadata
from distill.models.pairs import compare_pair
from distill.recipe import Recipe
from distill.sampler import Sampler
from distill.speculative.sample import continue_prompts, refill
from distill.speculative.stop_strings import Stop, stop_before, token_bytes
from distill.texts import Reply, Request
from distill.vocabulary import Vocabulary


def require_gguf(target: str, path: str, setting: str) -> VocabularyMetadata:
    """What a GGUF file, which a recipe's `setting` names, says of its vocabulary; loads no weights.

    Raises DataError for a file that cannot be read, PairError where an id is not the same token as in the target's
    tokenizer.
    """
    if not Path(path).is_file():
        raise DataError(f"{setting}: there is no file {path}", "export the target with distill export-gguf")
    pair = compare_pair(target, path)
    if pair.distill is not None:
        raise PairError(
            f"{setting}: {path} has other tokens than {target}: {pair.distill}",
            "give a GGUF file of the same target, or set target.model to the model that it was made from",
        )
    return pair.draft


class _LocalWriter:
    """A model whose rows finished texts leave to waiting prompts; see `distill.target.groups.Writer`.

    The sampler is the served one with the penalty of the answers. Without `engine`, subclasses write otherwise.
    """

    engine: Model | None = None
    together = 1

    def __init__(self, recipe: Recipe, ends: Sequence[int], vocabulary: int) -> None:
        self.ends, self.vocabulary = ends, vocabulary
        self.stop: Stop | None = None
        if recipe.answers.stop:
            bytes_of = token_bytes(Vocabulary.read(text_folder(recipe.target.model)), ends)
            self.stop = stop_before(bytes_of, recipe.answers.stop)
        self.sampler = replace(Sampler.of(recipe.sampler), repetition_penalty=recipe.answers.repetition_penalty)
        self.notes: list[str] = []

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """A reply to each request, in any order; requests appended to `waiting` between replies are answered too."""
        assert self.engine is not None
        self.engine.rollback([0] * self.engine.rows)
        yield from refill(self.engine, waiting, self.sampler, self.ends, self.vocabulary, self.stop)

    def close(self) -> list[str]:
        """Free the cache; lines about what went wrong and was mended."""
        if self.engine is not None:
            self.engine.close()
        return self.notes


class TorchWriter(_LocalWriter):
    """The target in transformers, `answers.batch` texts at a time.

    A model whose attention takes no rows of different lengths is asked batch by batch: each ends with its longest text.
    """

    by_prompt = False

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self.model = load_target(recipe.target, pick_device(recipe.device))
        config = self.model.config
        super().__init__(recipe, end_ids(recipe.target.model, tokenizer), real_tokens(config, tokenizer))
        self.batch = recipe.answers.batch
        try:
            fast, reason = prepacked(self.model) if recipe.pytorch.prepack else (self.model, "")
            self.notes += filter(None, [reason])
            self.engine = BatchedTorchModel(fast, self.batch, self.vocabulary)
            self.together = self.batch
        except ValueError as error:
            if recipe.answers.repetition_penalty != 1:
                raise DataError(
                    f"answers.repetition_penalty is not possible with this target: {error}",
                    "set it to 1, or use a GGUF file or a server (answers.writer)",
                ) from None
            self.notes.append(f"batches were not refilled: {error}")

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """See `_LocalWriter`."""
        if self.engine is not None:
            yield from super().write(waiting)
        while waiting:
            asked = [waiting.popleft() for _ in range(min(self.batch, len(waiting)))]
            limit = max(request.limit for request in asked)
            prompts, seeds = [request.ids for request in asked], [request.seed for request in asked]
            texts = continue_prompts(self.model, prompts, self.sampler, limit, seeds, self.ends, self.vocabulary)
            for request, text in zip(asked, texts, strict=True):
                text = text[: request.limit]
                found = None if self.stop is None else self.stop(text, 0)
                if found is not None and found.ended:
                    yield Reply(request.id, text[: found.kept], True)
                else:
                    yield Reply(request.id, text, text[-1] in self.ends)


class GgufWriter(_LocalWriter):
    """A GGUF file of the target in llama.cpp, text by text."""

    by_prompt = True

    def __init__(self, recipe: Recipe, tokenizer: Any, config: Any) -> None:
        settings = recipe.answers.writer
        assert settings is not None and settings.gguf is not None
        require_gguf(recipe.target.model, settings.gguf, "answers.writer.gguf")
        super().__init__(recipe, end_ids(recipe.target.model, tokenizer), real_tokens(config, tokenizer))
        # A prompt is at most as long as the block leaves room for, whatever its turn in a conversation.
        context = max(2, recipe.corpus.block)
        self.engine = GgufModel(settings.gguf, context=context, options=recipe.gguf_options("target"))
