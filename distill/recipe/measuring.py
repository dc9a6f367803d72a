"""Recipe sections: what is measured, and the files that others load."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from distill.machine import MOST_THREADS
from distill.recipe.configuration import PLAIN, Configuration
from distill.recipe.target import Section

# ── GGUF files: their number formats, and how llama.cpp opens them, under llama.cpp's names ──

# The number formats of the files that `distill` writes: the first ones itself, the others by llama.cpp's quantiser.
Direct = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
OutType = Literal[
    Direct, "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"
]
DIRECT: tuple[str, ...] = get_args(Direct)
OUTTYPES: tuple[str, ...] = get_args(OutType)
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
UNQUANTISED = ("f32", "f16", "bf16")  # types of a cache; llama.cpp quantises values with flash attention alone
NO_DEVICE = "none"
MOST_KL = 0.01  # mean nats to a target's own distributions, up to which an engine or a type counts as the target
MOST_DEVICES = 16  # llama.cpp's LLAMA_MAX_DEVICES
# What changes logits by more than rounding; all others change speed, memory and rounding alone.
CHANGES_LOGITS = ("library", "flash_attn", "cache_type_k", "cache_type_v")


class GgufOptions(Section):
    """Options of one model. Options that this build of llama.cpp lacks, or that would have no effect, are refused."""

    # The one table of these options. llama.cpp's long name of each is its key with dashes; its short one stands
    # with it.

    library: Literal["llama.cpp", "ik"] | None = Field(
        None, description="what computes: llama.cpp, or ik: ik_llama.cpp; null: llama.cpp, for a draft the target's"
    )
    n_gpu_layers: Annotated[int | None, "ngl"] = Field(
        None,
        ge=0,
        le=10_000,
        description="layers on GPUs, counting the head as one; null: all if llama.cpp was built for a GPU and "
        "`device` is not cpu, else none",
    )
    device: Annotated[tuple[str, ...], "dev"] = Field(
        (), description="GPUs by llama.cpp's names, such as CUDA0; [none]: no GPU; []: all of them"
    )
    tensor_split: Annotated[tuple[float, ...], "ts"] = Field(
        (), max_length=MOST_DEVICES, description="share of the layers on each GPU, in order; []: by free memory"
    )
    flash_attn: Annotated[Literal["on", "off", "auto"], "fa"] = Field(
        "off",
        description="off: logits do not depend on how tokens are grouped into steps of two or more; auto: on if the "
        "device supports it",
    )
    cache_type_k: Annotated[CacheType, "ctk"] = Field("f16", description="type of the cached keys")
    cache_type_v: Annotated[CacheType, "ctv"] = Field(
        "f16", description="type of the cached values; quantised ones need flash_attn"
    )
    threads: Annotated[int | None, "t"] = Field(
        None, ge=1, le=MOST_THREADS, description="CPU threads of a step; null: `threads`"
    )
    threads_batch: Annotated[int | None, "tb"] = Field(
        None, ge=1, le=MOST_THREADS, description="CPU threads of steps of several tokens; null: as `threads` here"
    )
    ubatch_size: Annotated[int | None, "ub"] = Field(
        None, ge=1, le=65_536, description="tokens computed at once (micro-batch); null: up to 512"
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
        kinds = {"f16", "q8_0"} if self.flash_attn == "on" else {"f16"}
        if self.library == "ik" and (self.cache_type_v not in kinds or self.cache_type_k not in {"f16", "q8_0"}):
            raise ValueError(
                "library ik caches keys in f16 or q8_0, and values in f16, or with flash_attn on in q8_0; it ends the "
                "process on others"
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
            return f"{value:g}" if isinstance(value, float) else str(value)

        return ", ".join(
            f"{name.replace('_', '-')} {','.join(map(shown, value if isinstance(value, list) else [value]))}"
            for name, value in self.given().items()
        )


ON_CPU = GgufOptions(device=(NO_DEVICE,))
# By key: llama.cpp's short name of each of its options, without its dash; `library` is ours.
SHORT: dict[str, str] = {
    name: one for name, field in GgufOptions.model_fields.items() for one in field.metadata if isinstance(one, str)
}


class Gguf(Section):
    """How llama.cpp opens GGUF files in profile, speedup, and as answers.writer or teacher.

    The names are llama.cpp's own.
    """

    target: GgufOptions = Field(GgufOptions(), description="the target's files")
    draft: GgufOptions = Field(GgufOptions(), description="the draft's files, with the same options")

    def of(self, role: Literal["target", "draft"]) -> GgufOptions:
        """One model's options; a draft takes its target's library where it has none of its own."""
        library = getattr(self, role).library or self.target.library
        return getattr(self, role).model_copy(update={"library": library})

    def described(self) -> str:
        """The options that differ from their defaults, in words; empty where none does."""
        roles = {"target": self.target, "draft": self.draft}
        return "; ".join(f"{role}: {one.described()}" for role, one in roles.items() if one.given())


# ── Recipe sections: what is measured, and the files that others load ──


# By the name of a decoder, or what stands before its colon.
ENGINES = {"pytorch": "PyTorch", "gguf": "llama.cpp", "ik": "ik_llama.cpp"}


def engine_name(backend: str) -> str:
    """The engine of a backend, such as ik_llama.cpp of ik:q8_0."""
    return ENGINES[backend.partition(":")[0]]


class Evaluate(Section):
    """Divergences and acceptance probabilities on the test split."""

    prompts: int = Field(64, ge=4, description="test prompts to continue and to decode rounds for")
    new_tokens: int = Field(128, ge=8, description="tokens per continuation")
    file_blocks: int = Field(48, ge=1, description="maximum blocks of test files to measure")
    length: int = Field(8, ge=1, description="draft length of the decoded rounds")


class Export(Section):
    """GGUF files of draft and target."""

    outtypes: tuple[OutType, ...] = Field(("f16", "q8_0"), description="one file each")


class Speedup(Section):
    """Plain decoding against speculative decoding."""

    backends: tuple[str, ...] = Field(
        ("pytorch", "gguf"),
        description="decoders to measure: pytorch, gguf (llama.cpp), ik (ik_llama.cpp), or gguf:TYPE and ik:TYPE with "
        "both models in another type of file",
    )
    outtype: OutType = Field("f16", description="GGUF type of both models; a target that is a GGUF file keeps its own")
    lengths: tuple[int, ...] = Field(
        (1, 2, 4, 6, 8), description="fixed draft lengths to measure, greedily; [] for a target that is only sampled"
    )
    prompts: int = Field(12, ge=2, description="distinct test prompts")
    new_tokens: int = Field(96, ge=8, description="tokens decoded per prompt")
    configurations: tuple[Configuration, ...] = Field(
        (Configuration(rule="expected-value"),),
        description="other ways to decode, measured in turns with the lengths",
    )
    turns: int = Field(
        3,
        ge=0,
        description="turns in which engines near the fastest are timed again, plain and in their fastest way; 0: none",
    )
    allow_lossy: bool = Field(
        False, description="also run configurations that change the target's distribution, labelled LOSSY"
    )

    @field_validator("backends")
    @classmethod
    def _backends_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for backend in value:
            engine, colon, kind = backend.partition(":")
            if engine not in ENGINES or (colon and (engine == "pytorch" or kind not in OUTTYPES)):
                raise ValueError(f"{backend} is none of {', '.join(ENGINES)}, gguf:TYPE and ik:TYPE, such as ik:q8_0")
        if len(set(value)) < len(value):
            raise ValueError("each decoder is named once")
        return value

    @property
    def files(self) -> dict[str, str]:
        """The backends that open GGUF files, with the type of those that are written for them."""
        kinds = {backend: backend.partition(":")[2] for backend in self.backends if backend != "pytorch"}
        return {backend: kind or self.outtype for backend, kind in kinds.items()}

    @field_validator("configurations")
    @classmethod
    def _configurations_differ(cls, value: tuple[Configuration, ...]) -> tuple[Configuration, ...]:
        settings = [one.settings for one in value]
        for one in value:
            if settings.count(one.settings) > 1:
                raise ValueError(f"the configuration `{one.described}` is listed twice")
            if not one.drafts:
                raise ValueError(f"`{one.described}`: plain decoding is always measured; leave it out")
        return value

    @field_validator("lengths")
    @classmethod
    def _lengths_are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(length < 1 or length > 63 for length in value):
            raise ValueError("draft lengths run from 1 to 63; plain decoding is always measured")
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _no_length_twice(self) -> Speedup:
        settings = [one.settings for one in self.configurations]
        if not self.lengths and not settings:
            raise ValueError("lengths and configurations are empty: nothing is measured but plain decoding")
        for length in self.lengths:
            if (fixed := fixed_length(length)).settings in settings:
                raise ValueError(f"`{fixed.described}` is measured as a length already: leave it out")
        return self


def fixed_length(length: int) -> Configuration:
    """The configuration of the greedy sweep that drafts γ = `length` tokens a round; plain decoding for 0."""
    return Configuration(length=length) if length else PLAIN
