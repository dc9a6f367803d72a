"""Toys for the tests: tiny random models, a tiny tokenizer, and models that follow a script instead of weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from distill.decoding.batch import OneRow, at_once
from distill.decoding.decode import Decoded, decode_text
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed, LengthRule
from distill.decoding.rules import GREEDY, Rules
from distill.engines.model import Model

KINDS = ("qwen2", "qwen3", "llama", "mistral")

# What a toy of a family is told beside the settings of `toy`; test_families.py decodes with each. One layer of two has
# a window in the families that mix them.
MIXED: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "experts_implementation": "eager"},  # the only one for fp64
}
SHARED: dict[str, Any] = {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
DELTA: dict[str, Any] = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8},
    **{"mamba_expand": 2, "mamba_chunk_size": 8},
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mamba", "attention"],
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8},
}
DELTA_EXPERTS: dict[str, Any] = {"head_dim": 8, "shared_expert_intermediate_size": 16, **DELTA, **EXPERTS}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **MIXED},
    "gemma3_text": {"head_dim": 8, **MIXED},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, **MIXED},
    "gpt_oss": {"head_dim": 8, "rope_parameters": YARN, **EXPERTS, **MIXED},
    "cohere": {"logit_scale": 4.0},
    "cohere2": {"logit_scale": 4.0, **MIXED},
    "exaone4": MIXED,
    "olmo2": {},
    "olmo3": MIXED,
    "ministral": {"head_dim": 8, **MIXED},
    "ministral3": {"head_dim": 8, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {},
    "granitemoe": EXPERTS,
    "phi": {},
    "phi3": {"sliding_window": 6},
    "starcoder2": {"sliding_window": 6},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"head_dim": 8, **SHARED},
    "seed_oss": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "mixtral": {"sliding_window": 6, **EXPERTS},
    "olmoe": EXPERTS,
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8, **LATENT, **SHARED},
    "minimax_m2": {"head_dim": 8, **EXPERTS},
    "gpt2": {"n_positions": 160},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "mpt": {},
    "falcon": {},
    "llama4_text": {"attention_chunk_size": 6, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48, **EXPERTS},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": 6, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": DELTA_EXPERTS,
    "qwen3_5_text": {"head_dim": 8, **DELTA},
    "qwen3_5_moe_text": DELTA_EXPERTS,
    "nemotron_h": NEMOTRON,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0, **MAMBA},
    "falcon_h1": {"mamba_d_ssm": 64, "head_dim": 8, **MAMBA},
    "olmo_hybrid": DELTA,
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "mamba": {},
}
BY_LAYER = {"layer_types", "no_rope_layers", "layers_block_type"}  # are repeated
SHORT = {"gemma3": "gemma3_text"}


def toy(kind: str = "qwen2", vocabulary: int = 61, layers: int = 2, seed: int = 0, **changes: Any) -> Any:
    """A random model far from uniform, with biases and norm weights that would show a mistake."""
    kind = SHORT.get(kind, kind)
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 160,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "gpt_neo":  # whose code has a head of keys for each head
        del settings["num_key_value_heads"]
    settings.update(FAMILIES[kind])
    settings.update(changes)
    for name in BY_LAYER & settings.keys():
        settings[name] = [settings[name][index % len(settings[name])] for index in range(layers)]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    disturb(model, seed + 1)
    return model


def disturb(model: Any, seed: int, scale: float = 0.1) -> None:
    """Add noise to every vector (norms of one and biases of zero hide mistakes)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def blurred(model: Any, seed: int, scale: float) -> Any:
    """A copy with noise on every matrix: a draft that agrees some of the time."""
    import copy

    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


def toy_tokenizer(size: int = 300) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["def f(self): return self.value + other.value\n" * 40, "import os, sys\n" * 40], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def write_gguf(writer: Any) -> None:
    """Write what a gguf.GGUFWriter was given, and close it."""
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def save_toy(model: Any, tokenizer: Any, folder: Path) -> Path:
    """A Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_prompts(count: int, vocabulary: int, seed: int, shortest: int = 3, longest: int = 12) -> list[list[int]]:
    """Prompts of different lengths."""
    generator = numpy.random.default_rng(seed)
    return [
        generator.integers(0, vocabulary, size=int(generator.integers(shortest, longest + 1))).tolist()
        for _ in range(count)
    ]


class ScriptedLogits:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def argmax(self, empty: int | None = None) -> list[int]:
        return self._tokens


class Scripted:
    """A model whose next token is a function of all tokens before; it checks how it is called."""

    rows = 1

    def __init__(self, rule: Callable[[tuple[int, ...]], int], capacity: int, vocabulary: int) -> None:
        self.rule, self.capacity, self.vocabulary_size = rule, capacity, vocabulary
        self.context: list[int] = []
        self.calls: list[int] = []

    @property
    def lengths(self) -> list[int]:
        return [len(self.context)]

    def extend(
        self, tokens: Sequence[int], counts: Any = None, parents: Any = None, want: Sequence[int] | None = None
    ) -> ScriptedLogits:
        assert len(tokens) > 0 and len(self.context) + len(tokens) <= self.capacity
        self.calls.append(len(tokens))
        start = len(self.context)
        self.context += tokens
        indices = range(len(tokens)) if want is None else want
        return ScriptedLogits([self.rule(tuple(self.context[: start + i + 1])) for i in indices])

    def rollback(self, lengths: Sequence[int]) -> None:
        assert 0 <= lengths[0] <= len(self.context)
        del self.context[lengths[0] :]


def speculative(
    target: Model, draft: Model, prompt: Sequence[int], limit: int, length: int, ends: Collection[int] = ()
) -> Decoded:
    """Greedy speculative decoding from cold caches with up to `length` drafted tokens a round.

    The tokens are those of `plain`, except where the target's two best logits lie within the rounding difference
    between batches of one and of several tokens.
    """
    rules = Rules(ends=ends)
    return decode_text(target, ModelDrafter(draft, Fixed(length), GREEDY, rules.random), prompt, limit, rules)


def decode_at_once(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    limit: int,
    rules: Rules,
    length: int | Callable[[], LengthRule],
    randoms: Sequence[Callable[[], float]] | None = None,
    argmax: bool = False,
) -> list[Decoded]:
    """Prompts continued at once over rows of both models; `length` is γ, or makes a length rule for each row. Row b
    draws from randoms[b]."""
    new_rule = length if callable(length) else lambda: Fixed(length)
    texts = []
    for row, prompt in enumerate(prompts):
        own = rules if randoms is None else replace(rules, random=randoms[row])
        drafter = ModelDrafter(OneRow(draft, row), new_rule(), own.sampler, own.random, argmax)
        texts.append(partial(decode_text, OneRow(target, row), drafter, prompt, limit, own))
    return at_once(texts, (draft, target))


def tune(base: Path, adapter: Path, **settings: Any) -> Any:
    """Write an adapter with random numbers over a base; the model that PEFT merges."""
    torch.manual_seed(3)
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    made = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | settings)
    with warnings.catch_warnings(action="ignore"):  # of PEFT about transformers
        tuned = get_peft_model(model, made)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    with warnings.catch_warnings(action="ignore"):
        tuned.save_pretrained(adapter)
    return tuned.merge_and_unload()
