"""Hours of a run on GPUs that are named, from their data sheets. None of these hours was measured on a GPU.

Writing reads all weights, and the keys and values of every open text, once for each token of each text. Training makes
six products and sums for each weight and position. Real programs reach only a share of what a data sheet says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from distill.data.samples import SPLITS
from distill.engines.torch.hugging_face import load_config, stored_type
from distill.errors import RecipeError
from distill.progress import Caution, duration
from distill.recipe import Recipe
from distill.recipe.target import TYPE_BYTES
from distill.surgery.cutter import planned_sizes, shape_of, weights_of
from distill.tables import size
from distill.teacher.store import planned_bytes
from distill.teacher.texts import held_out_sizes

# By name: products in bfloat16 a second (two operations each, dense), bytes of memory read a second, bytes of memory.
GPUS = {
    "RTX 3090": (71e12, 936e9, 24e9),
    "RTX 4090": (165e12, 1008e9, 24e9),
    "RTX 5090": (210e12, 1792e9, 32e9),
    "L40S": (362e12, 864e9, 48e9),
    "A100": (312e12, 2039e9, 80e9),
    "H100": (989e12, 3350e9, 80e9),
    "H200": (989e12, 4800e9, 141e9),
}
BANDWIDTH_SHARE, PRODUCT_SHARE = 0.6, 0.35  # of the data sheet's figures, as good servers and trainings reach them
PROMPT = 256  # tokens before an answer, whose keys and values are read with each token
WORDS = re.compile(r"(\d+) x (.+?)(?: at ([\d.]+) bits)?")
FORM = "such as --on '4 x H100, 1 x A100' or --on '1 x RTX 4090 at 4.85 bits'"


@dataclass(frozen=True)
class Hardware:
    """Some equal GPUs; `bits` of a weight of the target there, None: as many as its type has."""

    count: int
    name: str
    bits: float | None = None

    @property
    def words(self) -> str:
        """The words that name it on the command line."""
        return f"{self.count} x {self.name}" + ("" if self.bits is None else f" at {self.bits:g} bits")


def hardware_of(text: str) -> tuple[Hardware, Hardware]:
    """The GPUs that run the target, and those that train the draft (the same if one kind is named)."""
    found = []
    for part in text.split(","):
        match = WORDS.fullmatch(part.strip())
        if match is None or match[2] not in GPUS or not int(match[1]):
            raise RecipeError(f"--on {text}: {part.strip()} is not known", f"{FORM}; known: {', '.join(GPUS)}")
        found.append(Hardware(int(match[1]), match[2], None if match[3] is None else float(match[3])))
    if len(found) > 2:
        raise RecipeError(
            f"--on {text} names {len(found)} kinds of GPUs", f"name the target's, then the trainer's, {FORM}"
        )
    return found[0], found[-1]


def hardware_lines(recipe: Recipe, prompts: int, text: str, dtype: str) -> list[str]:
    """Hours of answers and training and the disk of a run, with `prompts` to answer, in lines to print.

    `dtype` is the target's as the recipe writes it. `auto` is the checkpoint's own: what it is on this machine does not
    count for other hardware.
    """
    writing, training = hardware_of(text)
    target = load_config(recipe.target.model)
    big, small = shape_of(target), planned_sizes(recipe, target, load_config(recipe.donor_model))
    if big is None or small is None:
        return [f"on {text}: not estimated, because a model does not name its sizes or has experts"]
    whole, own = sum(weights_of(big)), sum(weights_of(small))
    stored = stored_type(recipe.target.model) if dtype == "auto" else dtype
    width = TYPE_BYTES[stored] if writing.bits is None else writing.bits / 8
    _, read, memory = (writing.count * value for value in GPUS[writing.name])
    products = GPUS[writing.name][0] * writing.count * PRODUCT_SHARE
    answers = recipe.answers
    at_once = answers.batch if answers.writer is None else answers.writer.connections
    config = target.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 4 * big["layers"] * big["KV heads"] * head * (PROMPT + answers.new_tokens / 2)  # keys and values, 16 bits
    step = max((whole * width + at_once * cached) / (read * BANDWIDTH_SHARE), 2 * whole * at_once / products)
    held = [held_out_sizes(recipe, split) for split in SPLITS[1:]]
    tokens = prompts * answers.new_tokens + sum(one.prompts * one.new_tokens for one in held)
    tokens += sum((one.questions or 0) * one.tokens for one in recipe.corpus.asked)
    positions = recipe.train.steps * recipe.train.batch * recipe.corpus.block
    seconds = 6 * own * positions / (GPUS[training.name][0] * training.count * PRODUCT_SHARE)
    disk = sum(planned_bytes(recipe, prompts).values()) + 3 * 12 * own + 4 * own
    lines = [
        f"on {writing.words}: at most {tokens / 1e6:.0f} million tokens of answers, {at_once / step:,.0f} tokens/s "
        f"with {at_once} texts at once: at most {duration(tokens * step / at_once)}",
        f"on {training.words}: {positions / 1e6:.0f} million positions of training, {duration(seconds)}; "
        f"{size(16 * own)} of weights, gradients and moments",
        f"disk: at most {size(disk)}. The times are reckoned with {BANDWIDTH_SHARE:g} of the data sheet's memory speed "
        f"and {PRODUCT_SHARE:g} of its products; none was measured",
    ]
    if whole * width > memory:
        what = f"the target's weights, {size(whole * width)}, do not fit the {size(memory)} of {writing.words}"
        lines.append(Caution(f"warning: {what}"))
    return lines
