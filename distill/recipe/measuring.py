"""Recipe sections: what is measured, and the files that others load."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from distill.recipe.configuration import OTHER_VOCABULARY, PLAIN, Configuration
from distill.recipe.gguf import OutType
from distill.recipe.section import Section


class Evaluate(Section):
    """Divergences and acceptance on the test split."""

    prompts: int = Field(64, ge=4, description="test prompts to continue and to decode rounds for")
    new_tokens: int = Field(128, ge=8, description="tokens per continuation")
    file_blocks: int = Field(48, ge=1, description="maximum blocks of test files to measure")
    length: int = Field(8, ge=1, description="draft length of the decoded rounds")


class Export(Section):
    """GGUF files of draft and target."""

    outtypes: tuple[OutType, ...] = Field(("f16", "q8_0"), description="one file each")


class Speedup(Section):
    """Plain decoding against speculative decoding."""

    backends: tuple[Literal["pytorch", "gguf"], ...] = Field(("pytorch", "gguf"), description="decoders to measure")
    outtype: OutType = Field("f16", description="GGUF type of both models")
    lengths: tuple[int, ...] = Field((1, 2, 4, 6, 8), min_length=1, description="fixed draft lengths to measure")
    prompts: int = Field(12, ge=2, description="distinct test prompts")
    new_tokens: int = Field(96, ge=8, description="tokens decoded per prompt")
    configurations: tuple[Configuration, ...] = Field(
        (Configuration(rule="expected-value", calibration="context"),),
        description="other ways to decode, measured interleaved with the lengths",
    )
    calibration_prompts: int = Field(
        16, ge=2, description="validation texts of `new_tokens` tokens decoded for configurations that need calibration"
    )
    repeats: int = Field(
        7, ge=5, le=10_000, description="timed repeats of a step, after a discarded one; the median is used"
    )
    depth: int = Field(128, ge=1, description="tokens in the cache where cuts and plans time steps")
    max_tokens: int = Field(16, ge=2, le=64, description="tokens of the largest step that is priced for trees")
    allow_lossy: bool = Field(
        False, description="also run configurations that change the target's distribution, labelled LOSSY"
    )

    @field_validator("configurations")
    @classmethod
    def _configurations_differ(cls, value: tuple[Configuration, ...]) -> tuple[Configuration, ...]:
        titles = [configuration.title for configuration in value]
        for configuration, title in zip(value, titles, strict=True):
            if titles.count(title) > 1:
                raise ValueError(f"the configuration `{title}` is listed twice")
            if not configuration.drafts:
                raise ValueError(f"`{title}`: plain decoding is always measured; leave it out")
            if configuration.drafter in OTHER_VOCABULARY:
                raise ValueError(
                    f"`{title}` is for a draft of another vocabulary; a run's draft has the target's: leave it out"
                )
        return value

    @field_validator("lengths")
    @classmethod
    def _lengths_are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(length < 1 or length > 63 for length in value):
            raise ValueError("draft lengths run from 1 to 63; plain decoding is always measured")
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _no_length_twice(self) -> Speedup:
        titles = {configuration.title for configuration in self.configurations}
        for length in self.lengths:
            if fixed_length(length).title in titles:
                raise ValueError(f"`{fixed_length(length).title}` is measured as a length already: leave it out")
        return self


def fixed_length(length: int) -> Configuration:
    """The configuration of the greedy sweep that drafts γ = `length` tokens a round; plain decoding for 0."""
    return Configuration(length=length) if length else PLAIN
