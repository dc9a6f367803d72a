"""Plain sampling of many prompts, each with random numbers of its own: all at once, or as finished texts make room.

Legend: B prompts of a batch, R rows of a model, N rows of a call, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distill.models.base import Logits, Model
from distill.models.finite import place_of
from distill.models.torch_logits import TorchLogits
from distill.models.torch_model import model_name
from distill.sampler import Sampler
from distill.speculative.batch import CHUNK, extend_rows
from distill.speculative.stop_strings import Stop
from distill.speculative.verify import unchecked_transform
from distill.texts import Reply, Request


def uniform_numbers(seed: int, count: int) -> torch.Tensor:
    """The first `count` uniform numbers [count], fp64, that a text with this seed is drawn with, one for each token."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.inference_mode()
def continue_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    limit: int,
    seeds: Sequence[int],
    ends: Sequence[int],
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Continue B prompts (of any lengths) together, each with random numbers of its own.

    Returns up to `limit` new ids per prompt; a text that ends keeps its end id as the last. Row b's draws depend on
    seeds[b] and on its own distributions alone (the other rows affect it only through rounding). Ids from `vocabulary`
    on are padding and never drawn.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    rows = len(prompts)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros(rows, longest + limit, dtype=torch.long)
    draws = torch.empty(rows, limit, dtype=torch.float64)
    for row, prompt in enumerate(prompts):  # left-padded, so that every row's last token is in the last column
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
        draws[row] = uniform_numbers(seeds[row], limit)
    mask, draws = mask.to(device), draws.to(device)
    positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
    padded = bool((mask[:, :longest] == 0).any())
    stop = torch.tensor(list(ends), device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    cache = DynamicCache()
    step_ids, step_positions = ids.to(device), positions
    chosen: list[torch.Tensor] = []
    for step in range(limit):
        logits = model(
            input_ids=step_ids,
            attention_mask=mask[:, : longest + step] if padded else None,
            position_ids=step_positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1, :vocabulary]
        place = place_of(model_name(model), [len(prompt) + step for prompt in prompts])
        token = unchecked_transform(sampler.probabilities(logits, place=place), draws[:, step]).unsqueeze(-1)
        chosen.append(token)
        finished |= torch.isin(token.squeeze(-1), stop)
        if bool(finished.all()):
            break
        step_ids, step_positions = token, step_positions[:, -1:] + 1
    table = torch.cat(chosen, dim=1).tolist()
    end_set = set(ends)
    return [row[: next((i + 1 for i, token in enumerate(row) if token in end_set), len(row))] for row in table]


@dataclass
class _Row:
    """A text that is being written, with a random number for each of its tokens."""

    request: Request
    numbers: list[float]
    tokens: list[int] = field(default_factory=list)
    stopped: Reply | None = None

    def add(self, token: int, ends: Collection[int], stop: Stop | None) -> None:
        """Add a token; `stopped` is the reply where the text is over."""
        seen = len(self.tokens)
        self.tokens.append(token)
        if token in ends:
            self.stopped = Reply(self.request.id, self.tokens, True)
            return
        if stop is not None and (found := stop(self.tokens, seen)).ended:
            self.stopped = Reply(self.request.id, self.tokens[: found.kept], True)
        elif len(self.tokens) >= self.request.limit:
            self.stopped = Reply(self.request.id, self.tokens, False)


def refill(
    model: Model,
    waiting: deque[Request],
    sampler: Sampler,
    ends: Collection[int],
    vocabulary: int | None = None,
    stop: Stop | None = None,
) -> Iterator[Reply]:
    """Continue every request that waits, R at a time, and yield each reply when its text ends.

    A text that ends keeps its end token as the last. Its draws depend on the request's seed and on its own
    distributions alone; the other rows affect it only through rounding, and the order of requests decides which those
    are. The caller may append to `waiting` between replies. Ids from `vocabulary` on are padding and never drawn.
    ValueError for a request that the model's context cannot hold.
    """
    rows: list[_Row | None] = [None] * model.rows
    while True:
        fresh = []
        for place, row in enumerate(rows):
            if row is None and waiting:
                rows[place] = _seated(model, waiting.popleft())
                fresh.append(place)
        reading = fresh or [place for place, row in enumerate(rows) if row is not None]
        if not reading:
            return
        live = [row for place in reading if (row := rows[place]) is not None]
        if fresh:
            logits = _read_prompts(model, reading, live)
        else:
            last = {place: row.tokens[-1:] for place, row in zip(reading, live, strict=True)}
            logits = extend_rows(model, last, last)
        for row, token in zip(live, _drawn(logits, live, sampler, vocabulary), strict=True):
            row.add(token, ends, stop)
        for place, row in zip(reading, live, strict=True):
            if row.stopped is not None:
                rows[place] = None
                yield row.stopped


def _seated(model: Model, request: Request) -> _Row:
    # The last token is never read.
    if not request.ids or request.limit < 1 or len(request.ids) + request.limit - 1 > model.capacity:
        raise ValueError(
            f"{len(request.ids)} tokens of a prompt and {request.limit} more do not fit a context of {model.capacity}"
        )
    return _Row(request, uniform_numbers(request.seed, request.limit).tolist())


def _read_prompts(model: Model, places: Sequence[int], rows: Sequence[_Row]) -> Logits:
    """Read the prompts of fresh rows in chunks, all of which end in the last one."""
    model.rollback([0 if place in places else length for place, length in enumerate(model.lengths)])
    longest = max(len(row.request.ids) for row in rows)
    left = -(-longest // CHUNK)
    while True:
        left -= 1
        part: dict[int, Sequence[int]] = {}
        for place, row in zip(places, rows, strict=True):
            ids = row.request.ids
            piece = ids[max(0, len(ids) - (left + 1) * CHUNK) : max(0, len(ids) - left * CHUNK)]
            if piece:
                part[place] = piece
        logits = extend_rows(model, part, () if left else part)
        if left == 0:
            return logits


@torch.inference_mode()
def _drawn(logits: Logits, rows: Sequence[_Row], sampler: Sampler, vocabulary: int | None) -> list[int]:
    """The next token of each row, from logits [N, V]."""
    values: Tensor = logits.values if isinstance(logits, TorchLogits) else logits.full()
    histories = [row.request.ids + row.tokens for row in rows] if sampler.repetition_penalty != 1 else None
    probabilities = sampler.probabilities(values[:, :vocabulary], histories, logits.place)
    numbers = torch.tensor([row.numbers[len(row.tokens)] for row in rows], dtype=torch.float64, device=values.device)
    tokens: list[int] = unchecked_transform(probabilities, numbers).tolist()
    return tokens
