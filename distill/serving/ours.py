"""The same prompts decoded by our own decoder, as a server drafts them: what the files alone give."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.models.loaded import load_pair
from distill.progress import Progress
from distill.recipe import Gguf, Target, parse_section
from distill.serving.counts import TextCounts
from distill.speculative.decode import Decoded, decode
from distill.speculative.draft import ModelDrafter
from distill.speculative.lengths import Fixed
from distill.speculative.proposal import Proposal
from distill.speculative.rules import GREEDY, Rules


class ServerDrafter(ModelDrafter):
    """A draft that goes on behind an end token, as llama-server's does: its drafted tokens are counted alike."""

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A chain, whatever ends a text."""
        return super().propose(context, limit, ())


@dataclass(frozen=True)
class OurText:
    """A text of our decoder, with its counts; `seconds` are those behind the first token."""

    tokens: list[int]
    counts: TextCounts
    seconds: float


def decode_files(
    target: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    limit: int,
    n_max: int,
    gguf: Gguf | None = None,
    threads: int | None = None,
) -> list[OurText]:
    """Each prompt continued greedily with up to `n_max` drafted tokens a round, from cold caches."""
    place = parse_section(Target, {"model": str(target)})
    room = max(map(len, prompts)) + limit + n_max + 1
    progress = Progress(f"{draft.name}, our decoder", len(prompts))
    texts = []
    with load_pair(place, str(draft), tokens=room, threads=threads, gguf=gguf) as pair:
        drafter = ServerDrafter(pair.draft, Fixed(n_max), GREEDY, lambda: 0.0)
        for prompt in prompts:
            result = Decoded()
            for _ in decode(pair.target, drafter, prompt, limit, Rules(ends=pair.ends), result):
                pass
            texts.append(our_text(result))
            progress.step()
    return texts


def our_text(result: Decoded) -> OurText:
    """A decoded text with the counts that llama-server has for it.

    Tokens behind the end of a text are drafted, and not accepted. Nor is a drafted end token, unless it is the last of
    its round (common_sampler_sample_and_accept_n): it counts as the target's own.
    """
    drafted, accepted = sum(r.drafted for r in result.rounds), sum(result.from_draft)
    last = next((place for place, drawn in enumerate(reversed(result.from_draft)) if not drawn), 0)
    if last and last < result.rounds[-1].drafted and result.rounds[-1].accepted >= last:
        accepted -= 1
    return OurText(result.tokens, TextCounts(len(result.tokens), drafted, accepted), result.seconds)
