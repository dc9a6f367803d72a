"""The cost curve of a target that is served: seconds of a step by the requests that are decoded at once.

For targets whose weights are out of reach. m requests stand in for m tokens of one request, as in llama-batched-bench.
"""

from __future__ import annotations

import random

from distill.errors import ServingError
from distill.machine import machine
from distill.progress import Progress
from distill.serving.clients import Client, LlamaClient
from distill.serving.load import Load, Request, apart, send, step_seconds
from distill.speculative.costs.curve import CostCurve

REPEATS = 3  # of each number of requests, in turn
TIMED = 32  # new tokens of a request, at most
TOKENS = range(100, 1000)  # of made-up prompts: in every vocabulary, none of them special
NOTE = (
    "Measured through the server, with m requests at once. m tokens of one request read one text and cost less "
    "(docs/plan.md), and what the server does between two steps is part of these: take the speedups for the least to "
    "expect."
)


def served_curve(client: Client, depth: int, new: int, limit: int) -> CostCurve:
    """T(1..m) in seconds of a server that does not draft, at prompts of `depth` tokens that `new` more follow.

    m runs to `limit`, or to the server's slots where those are fewer; TIMED tokens tell what many would. Raises
    ServingError for a server that drafts, and where fewer than two requests were ever decoded at once.
    """
    if client.drafts():
        raise ServingError(
            f"{client.url} drafts, so that its replies do not show what a step costs",
            "start it without its draft, and plan again",
        )
    slots = client.slots() if isinstance(client, LlamaClient) else None
    wanted = range(1, min(limit, slots or limit) + 1)
    client.alone, client.ignores_end = False, True
    timed, draw = min(new, TIMED), random.Random(0)
    progress = Progress(f"{client.url}: up to {wanted[-1]} requests at once", REPEATS * len(wanted))
    by_load: dict[int, list[Request]] = {together: [] for together in wanted}
    for repeat in range(REPEATS):
        for together in wanted if repeat % 2 == 0 else wanted[::-1]:
            by_load[together] += send(
                client, [made_up(depth, draw) for _ in range(together)], timed, Load(together), repeat
            )
            progress.step()
    steps = step_seconds(by_load.values())
    known = next((m for m in range(1, limit + 1) if m + 1 not in steps), limit) if 1 in steps else 0
    if known < 2:
        raise ServingError(
            f"{client.url} was never seen decoding {known + 1} request(s) at once",
            "let it serve several (llama-server: --parallel 8), ask for more --tokens, and keep other users away",
        )
    notes = [NOTE, *filter(None, [apart(steps) if isinstance(client, LlamaClient) else ""])]
    if known < limit:
        why = f"it has {slots} slots: --parallel" if slots is not None and slots < limit else "others were not steady"
        notes.append(f"It ends at m = {known} ({why}).")
    seconds = tuple(steps[m] for m in range(1, known + 1))
    middle = (depth + timed // 2,)
    return CostCurve(client.url, client.kind, middle, (seconds,), REPEATS, "seconds", " ".join(notes), machine())


def made_up(length: int, draw: random.Random) -> list[int]:
    """A prompt that no server has in a cache: no two of them begin alike."""
    return [draw.choice(TOKENS) for _ in range(length)]
