"""GGUF files: their number formats, and the recipe section on how llama.cpp opens them, under llama.cpp's names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from distill.machine import MOST_THREADS
from distill.recipe.section import Section

# The number formats of the files that `distill` writes: the first ones itself, the others by llama.cpp's quantiser.
Direct = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
OutType = Literal[
    Direct, "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"
]
DIRECT: tuple[str, ...] = get_args(Direct)
OUTTYPES: tuple[str, ...] = get_args(OutType)
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
CACHE_TYPES: tuple[str, ...] = get_args(CacheType)
UNQUANTISED = ("f32", "f16", "bf16")  # types of a cache; llama.cpp quantises values with flash attention alone
NO_DEVICE = "none"
MOST_DEVICES = 16  # llama.cpp's LLAMA_MAX_DEVICES
# What changes logits by more than rounding; all others change speed, memory and rounding alone.
CHANGES_LOGITS = ("flash_attn", "cache_type_k", "cache_type_v")


class GgufOptions(Section):
    """Options of one model. Options that this build of llama.cpp lacks, or that would have no effect, are refused."""

    n_gpu_layers: int | None = Field(
        None,
        ge=0,
        le=10_000,
        description="layers on GPUs, counting the head as one; null: all if llama.cpp was built for a GPU and `device` "
        "is not cpu, else none",
    )
    device: tuple[str, ...] = Field(
        (), description="GPUs by llama.cpp's names, such as CUDA0; [none]: no GPU; []: all of them"
    )
    tensor_split: tuple[float, ...] = Field(
        (), max_length=MOST_DEVICES, description="share of the layers on each GPU, in order; []: by free memory"
    )
    flash_attn: Literal["on", "off", "auto"] = Field(
        "off",
        description="off: logits do not depend on how tokens are grouped into steps of two or more; auto: on if the "
        "device supports it",
    )
    cache_type_k: CacheType = Field("f16", description="type of the cached keys")
    cache_type_v: CacheType = Field("f16", description="type of the cached values; quantised ones need flash_attn")
    threads: int | None = Field(None, ge=1, le=MOST_THREADS, description="CPU threads of a step; null: `threads`")
    threads_batch: int | None = Field(
        None, ge=1, le=MOST_THREADS, description="CPU threads of steps of several tokens; null: as `threads` here"
    )
    ubatch_size: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="tokens computed at once (micro-batch); null: all tokens of a call, up to 512",
    )

    @field_validator("flash_attn", mode="before")
    @classmethod
    def _on_and_off_are_words(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # as YAML reads on and off

    @field_validator("device")
    @classmethod
    def _devices_differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value) or len(set(value)) < len(value):
            raise ValueError("each device is named once, such as CUDA0")
        if NO_DEVICE in value and len(value) > 1:
            raise ValueError("none stands alone: it means no GPU")
        return value

    @field_validator("tensor_split")
    @classmethod
    def _shares_are_shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if value and (min(value) < 0 or not sum(value)):
            raise ValueError("shares are at least 0, and one of them above 0; such as 3,1")
        return value

    @model_validator(mode="after")
    def _settings_go_together(self) -> GgufOptions:
        if self.cache_type_v not in UNQUANTISED and self.flash_attn == "off":
            raise ValueError(
                f"cache_type_v {self.cache_type_v} needs flash attention: flash_attn on, or a type that is not "
                "quantised (f32, f16, bf16)"
            )
        without = self.n_gpu_layers == 0 or self.device == (NO_DEVICE,)
        if self.device == (NO_DEVICE,) and self.n_gpu_layers:
            raise ValueError(f"n_gpu_layers {self.n_gpu_layers} with device none: no layer can be on a GPU")
        if self.n_gpu_layers == 0 and self.device not in ((), (NO_DEVICE,)):
            raise ValueError(f"device {', '.join(self.device)} with n_gpu_layers 0: no layer would be there")
        if self.tensor_split and without:
            raise ValueError("tensor_split without layers on a GPU does nothing: leave it out")
        return self

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def described(self) -> str:
        """Those in words, named as on a command line; empty where there are none."""

        def shown(value: Any) -> str:
            if isinstance(value, bool):
                return "on" if value else "off"
            return f"{value:g}" if isinstance(value, float) else str(value)

        return ", ".join(
            f"{name.replace('_', '-')} {','.join(map(shown, value if isinstance(value, list) else [value]))}"
            for name, value in self.given().items()
        )


ON_CPU = GgufOptions(device=(NO_DEVICE,))


class Gguf(Section):
    """How llama.cpp opens GGUF files in profile, speedup, a search with gguf, and as answers.writer or teacher.

    The names are llama.cpp's own.
    """

    target: GgufOptions = Field(GgufOptions(), description="the target's files")
    draft: GgufOptions = Field(GgufOptions(), description="the draft's files, with the same options")

    def described(self) -> str:
        """The options that differ from their defaults, in words; empty where none does."""
        roles = {"target": self.target, "draft": self.draft}
        return "; ".join(f"{role}: {one.described()}" for role, one in roles.items() if one.given())
