"""A draft of another vocabulary opened as it is, and its drafter: by the tokens both share, or by its text."""

from __future__ import annotations

from distill.models.hugging_face import load_model, local_folder, pick_device
from distill.models.loaded import GROWING, torch_decoder
from distill.recipe import Configuration, PyTorch, Target
from distill.sampler import Sampler
from distill.speculative.draft import Drafter
from distill.speculative.lengths import Fixed
from distill.speculative.other_vocabulary.drafters import IntersectionDrafter, Reader, StringMatchDrafter
from distill.speculative.verify import Random
from distill.vocabulary import Vocabulary


def read_with(target: Target, draft: str, device: str, rows: int, pytorch: PyTorch = GROWING) -> Reader:
    """Load a draft, in the target's type, to read the target's ids; `rows` are those of the target's logits.

    `pytorch` says how it decodes.
    """
    both, own = (Vocabulary.read(local_folder(reference)) for reference in (target.model, draft))
    model = torch_decoder(load_model(draft, target.dtype, pick_device(device)), own.size, pytorch)
    return Reader(model, both, own, rows)


def other_vocabulary_drafter(configuration: Configuration, reader: Reader, sampler: Sampler, random: Random) -> Drafter:
    """The drafter that a configuration of OTHER_VOCABULARY names; ValueError for a rule beside fixed lengths."""
    if configuration.length_rule != "fixed":
        raise ValueError(f"drafter {configuration.drafter} drafts fixed lengths only")
    kind = IntersectionDrafter if configuration.drafter == "intersection" else StringMatchDrafter
    argmax = configuration.verified_by == "match"
    return kind(reader, Fixed(configuration.most), sampler, random, argmax=argmax)
