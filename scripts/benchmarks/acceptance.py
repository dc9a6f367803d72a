"""The acceptance of a draft on texts that its target writes: what learning.py compares.

Legend: U prompts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.data.texts import Prompt, prompt_seed
from distill.engines.torch.hugging_face import end_ids, load_tokenizer
from distill.measuring.acceptance import continue_all
from distill.recipe import Recipe
from distill.sampler import Sampler

PROTOCOLS = ("sampling", "match", "greedy")


class Texts:
    """The target's continuations of some prompts and its distributions there, on which all drafts are measured."""

    def __init__(self, target: Any, recipe: Recipe, prompts: list[Prompt], options: Any, vocabulary: int) -> None:
        sampler = Sampler.of(recipe.sampler)
        ends = end_ids(recipe.target.model, load_tokenizer(recipe.target.model))
        seeds = [prompt_seed(recipe.seed, prompt.id) for prompt in prompts]
        ids = [prompt.ids for prompt in prompts]
        answers = continue_all(target, ids, sampler, options.new_tokens, seeds, ends, recipe.answers.batch, vocabulary)
        self.rows = [(p, a) for p, a in zip(ids, answers, strict=True) if len(a) > 1]
        self.sampler, self.vocabulary = sampler, vocabulary
        self.distributions = [self._logits(target, row) for row in self.rows]

    @torch.inference_mode()
    def _logits(self, model: Any, row: tuple[list[int], list[int]]) -> torch.Tensor:
        prompt, answer = row
        ids = torch.tensor([[*prompt, *answer]])
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1, : self.vocabulary].float()

    def accepted(self, draft: Any) -> dict[str, list[tuple[float, int]]]:
        """Per protocol, the sum of acceptances and the number of positions of each prompt [U]."""
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in PROTOCOLS}
        for row, target in zip(self.rows, self.distributions, strict=True):
            logits = self._logits(draft, row)
            p, q = self.sampler.probabilities(target), self.sampler.probabilities(logits)
            best = logits.argmax(-1, keepdim=True)
            values = {
                "sampling": torch.minimum(p, q).sum(),
                "match": p.gather(-1, best).sum(),
                "greedy": (target.argmax(-1, keepdim=True) == best).sum(),
            }
            for name, value in values.items():
                found[name].append((float(value), len(p)))
        return found
