"""The decoder layers of the Llama family in few operators, around any kind of product.

For a step of few tokens, transformers launches so many small operators around the products that these take as long
again as the products. `Layer` and `_forward` compute the same results with a third to a half of the operators.

Legend: B rows of a batch, m tokens of a call, C tokens in the cache before the call, S slots, V vocabulary, H hidden,
I width of an MLP, D width of a head, G heads of queries for each head of keys and values.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distill.engines.torch.model import layer_masks, shortest_window
from distill.engines.torch.products.linear import ACTIVATIONS, MakeProduct, Norm, PlainLinear
from distill.engines.torch.products.packed import PackedLinear, PackedStep, PackedWeight
from distill.engines.torch.static import SlotCache
from distill.progress import warn_once

Function = Callable[[Tensor], Tensor]
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")  # `Layer` computes these. The tests compare each.
CLOSE = 5e-2  # allowed difference of two bfloat16 results, relative to the largest value
TRIED_TOKENS, TRIED_SLOTS = 3, 16


def is_of_family(model: Any, layers: dict[str, Any]) -> bool:
    """Whether `Layer` and `_forward` compute this model, given that only the products in `layers` may be replaced."""
    config = model.config
    if type(model).__name__ not in [f"{family}ForCausalLM" for family in FAMILIES]:
        return False
    projections = [name for name, _ in model.named_modules() if "_proj" in name.rpartition(".")[2]]
    return (
        config._attn_implementation == "sdpa"
        and not getattr(config, "final_logit_softcapping", None)
        and not getattr(config, "use_bidirectional_attention", None)
        and _activation(config) in ACTIVATIONS
        and all(name in layers for name in projections)
        and not any(hooked(module) for module in model.modules())
    )


def hooked(module: torch.nn.Module) -> bool:
    """Whether other code has changed the computation of a module, as accelerate's hooks do for a sharded model."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


def copy_of(model: Any) -> Any:
    """Return a copy of a model's modules that shares all tensors with the model."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def with_layers(copied: Any, model: Any, product: MakeProduct) -> Any:
    """Let the copy of a model of FAMILIES compute by `Layer`s, and return it.

    If the kernel can compute all layers in one call, `copied.model.in_one_call` is that call, otherwise None.
    """
    base = model.model
    copied.model.layers = torch.nn.ModuleList(Layer(layer, product) for layer in base.layers)
    copied.model.norm, copied.model.rotary_emb = Norm(base.norm), Rotary(base.rotary_emb)
    copied.model.in_one_call = _in_one_call(copied.model)
    copied.forward = functools.partial(_forward, copied, shortest_window(model.config))
    return copied


@torch.inference_mode()
def _in_one_call(base: Any) -> PackedStep | None:
    """Return the call that computes all layers of a model, after a trial; None if there is no such call.

    The trial compares the first layer alone, on random hidden states, with the same layer operator by operator.
    """
    first = base.layers[0]
    if base.rotary_emb.by_kind or not PackedStep.takes_layers(base.layers):
        return None
    numbers, width = torch.Generator().manual_seed(0), first.products[0].in_features
    hidden = torch.randn(1, TRIED_TOKENS, width, generator=numbers).bfloat16()
    cache, places = SlotCache(first.index + 1, TRIED_SLOTS), torch.arange(TRIED_TOKENS)[None]
    cache.slots, cache.shown = places, TRIED_SLOTS
    mask = torch.full((TRIED_TOKENS, TRIED_SLOTS), torch.finfo(torch.bfloat16).min).triu(1).bfloat16()[None, None]
    tables = base.rotary_emb(hidden, places)
    expected = first.forward(hidden, mask, cache, tables)
    cache.layers = cache.layers[first.index :]
    difference = (PackedStep([first])(hidden, mask, cache, *tables) - expected).abs().max() / expected.abs().max()
    if float(difference) <= CLOSE:
        return PackedStep(base.layers)
    warn_once(f"the kernel's layers differ from torch's operators by {float(difference):.2g} and are not used")
    return None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


class Rotary(torch.nn.Module):
    """The rotary tables for `Layer`: cosines, and sines that are negative in the first half, [B, m, 1, D] each."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._inner = rotary
        self.by_kind = "layer_type" in inspect.signature(rotary.forward).parameters

    def forward(self, *inputs: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        """Return the tables of transformers' module for these inputs."""
        cosines, sines = self._inner(*inputs, **settings)
        first, second = sines.chunk(2, -1)
        return cosines.unsqueeze(2), torch.cat((-first, second), -1).unsqueeze(2)


def _normed(modules: Sequence[Any], product: MakeProduct, norm: Norm) -> Function:
    """Return the function from hidden states [..., H] to the results of linear layers of the same normed input."""
    parts = [(module.weight, module.bias) for module in modules]
    # PlainLinear shares the weights with the model, so that a joined weight would take memory.
    if product is not PlainLinear and all(isinstance(weight, Tensor) for weight, _ in parts):
        weights, biases = zip(*parts, strict=True)
        parts = [(torch.cat(weights), None if biases[0] is None else torch.cat(biases))]
    # Functions are called directly, because calling a module takes longer than some of the operators.
    before, functions = norm.forward, [product(*part).forward for part in parts]

    def apply(x: Tensor) -> Tensor:
        x = before(x)
        return functions[0](x) if len(functions) == 1 else torch.cat([function(x) for function in functions], -1)

    return apply


def _packed(modules: Sequence[Any], norm: Norm) -> PackedLinear | None:
    """Return linear layers of the same normed input as one product; None if some are not in the kernel's layout."""
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    if not all(isinstance(weight, PackedWeight) for weight in weights):
        return None
    return PackedLinear(weights[0].joined(weights[1:]), None if biases[0] is None else torch.cat(biases), norm=norm)


def _gated(mlp: Any, product: MakeProduct, norm: Norm, activation: str, both: PackedLinear | None) -> Function:
    """Return the function from hidden states [..., H] to activation(gate) · up [..., I] of an MLP.

    `both` is the product of gate and up with the norm, if there is one.
    """
    if both is not None:
        function, gate_and_up = ACTIVATIONS[activation], both.forward

        def packed(x: Tensor) -> Tensor:
            gate, up = gate_and_up(x).chunk(2, -1)
            return function(gate).mul_(up)

        return packed
    gate = product(mlp.gate_proj.weight, mlp.gate_proj.bias, activation).forward
    up, before = product(mlp.up_proj.weight, mlp.up_proj.bias).forward, norm.forward

    def inner(x: Tensor) -> Tensor:
        x = before(x)
        return up(x, gate(x), "mul")

    return inner


class Layer(torch.nn.Module):
    """A decoder layer of FAMILIES: attention over a cache and a gated MLP, with norms before both, in Gemma also after.

    The G heads of queries that share keys are treated as more queries of one head, so that no key is repeated.
    `products` and `norms` are what `PackedStep` computes with. They are empty if it cannot compute the layer.
    """

    def __init__(self, layer: Any, product: MakeProduct) -> None:
        super().__init__()
        attention, mlp, activation = layer.self_attn, layer.mlp, _activation(layer.self_attn.config)
        self.index, self.width, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.groups = attention.num_key_value_groups
        self.pairs = attention.k_proj.weight.shape[0] // self.width  # heads of keys and values
        before = Norm(layer.input_layernorm)
        three = [attention.q_proj, attention.k_proj, attention.v_proj]
        inputs = _packed(three, before)
        self.inputs = _normed(three, product, before) if inputs is None else inputs.forward
        output, down = (product(module.weight, module.bias) for module in (attention.o_proj, mlp.down_proj))
        self.after_attention = self.after_mlp = None
        gemma = hasattr(layer, "pre_feedforward_layernorm")
        if gemma:
            self.after_attention = Norm(layer.post_attention_layernorm).forward
            self.after_mlp = Norm(layer.post_feedforward_layernorm).forward
        mlp_norm = Norm(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm)
        both = None if gemma or mlp.gate_proj.bias is not None else _packed([mlp.gate_proj, mlp.up_proj], mlp_norm)
        self.inner = _gated(mlp, product, mlp_norm, activation, both)
        self.output, self.down = output.forward, down.forward
        head_norms = [Norm(attention.q_norm), Norm(attention.k_norm)] if hasattr(attention, "q_norm") else []
        self.of_heads = [norm.forward for norm in head_norms]
        products = (inputs, output, both, down)
        whole = activation == "silu" and all(type(part) is PackedLinear for part in products)
        self.products = products if whole else ()
        self.norms = (before, mlp_norm, *(head_norms or (None, None)))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **_: Any,
    ) -> Tensor:
        """Return hidden states [B, m, H] for hidden states and `Rotary`'s tables. The mask may be `_folded` already."""
        read = self._attended(self.inputs(hidden_states), attention_mask, past_key_values, *position_embeddings)
        if self.after_attention is None or self.after_mlp is None:
            hidden_states = self.output(read, hidden_states)
            return self.down(self.inner(hidden_states), hidden_states)
        hidden_states = hidden_states + self.after_attention(self.output(read))
        return hidden_states + self.after_mlp(self.down(self.inner(hidden_states)))

    def _attended(self, states: Tensor, mask: Tensor | None, cache: Any, cosines: Tensor, sines: Tensor) -> Tensor:
        """Store keys and values and return the results of all heads, side by side.

        `states` [B, m, …] are the products of queries, keys and values.
        """
        batch, columns, heads = *states.shape[:2], self.pairs * self.groups
        states = states.view(batch, columns, -1, self.width)
        turned, values = states[:, :, : heads + self.pairs], states[:, :, heads + self.pairs :]
        if self.of_heads:
            of_queries, of_keys = self.of_heads
            turned = torch.cat((of_queries(turned[:, :, :heads]), of_keys(turned[:, :, heads:])), 2)
        turned = torch.addcmul(turned * cosines, turned.roll(self.width // 2, -1), sines)
        keys, values = cache.update(turned[:, :, heads:].transpose(1, 2), values.transpose(1, 2), self.index)
        queries = turned[:, :, :heads]
        if mask is None and columns > 1:  # a prompt in an empty cache
            read = scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, scale=self.scaling, enable_gqa=True
            )
            return read.transpose(1, 2).flatten(2)
        queries = queries.unflatten(2, (self.pairs, self.groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = _folded(mask, columns, self.groups)
        read = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scaling)
        return read.unflatten(2, (self.groups, columns)).permute(0, 3, 1, 2, 4).flatten(2)


def _folded(mask: Tensor | None, columns: int, groups: int) -> Tensor | None:
    """Return a mask [B, 1, m, S] for the queries of all G heads that share keys: [B, 1, G · m, S]."""
    if mask is None or columns == 1 or mask.shape[2] != columns:
        return mask
    return mask.repeat(1, 1, groups, 1)


def _forward(
    self: Any,
    window: int,
    input_ids: Tensor,
    past_key_values: Any,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    **others: Any,
) -> Any:
    """Return the result of transformers' forward for a model of `Layer`s: its `logits` [B, m or fewer, V].

    transformers makes the masks if rows are padded. Layers see no more than the last `window` tokens of a text.
    """
    base, columns, mask, committed = self.model, input_ids.shape[1], attention_mask, 0
    if mask is None:
        committed = past_key_values.get_seq_length()
    elif not isinstance(mask, dict) and mask.dim() != 4:
        settings = {"attention_mask": mask, "position_ids": position_ids, "logits_to_keep": logits_to_keep, **others}
        return type(self).forward(self, input_ids=input_ids, past_key_values=past_key_values, **settings)
    hidden = base.embed_tokens(input_ids)
    if position_ids is None:
        position_ids = torch.arange(committed, committed + columns, device=hidden.device)[None]
    if mask is None and committed + columns > window:
        of = torch.arange(committed + columns, device=hidden.device)
        mask = layer_masks(self, of <= of[None, committed:, None], of[None, committed:], of)
    elif committed and columns > 1:
        shape, lowest = (columns, committed + columns), torch.finfo(hidden.dtype).min
        mask = torch.full(shape, lowest, dtype=hidden.dtype, device=hidden.device)
        mask = mask.triu_(committed + 1)[None, None]
    kinds = getattr(self.config, "layer_types", None) or [""] * len(base.layers)
    masks = mask if isinstance(mask, dict) else dict.fromkeys(kinds, mask)
    masks = {kind: masks[kind] for kind in dict.fromkeys(kinds)}
    if base.rotary_emb.by_kind:
        tables = {kind: base.rotary_emb(hidden, position_ids, kind) for kind in masks}
    else:
        tables = dict.fromkeys(kinds, base.rotary_emb(hidden, position_ids))
    step, only = base.in_one_call, masks[kinds[0]]
    if step is not None and len(masks) == 1 and step.takes(hidden, only, past_key_values):
        hidden = step(hidden, only, past_key_values, *tables[kinds[0]])
    else:
        masks = {kind: _folded(part, columns, base.layers[0].groups) for kind, part in masks.items()}
        for layer, kind in zip(base.layers, kinds, strict=True):
            hidden = layer.forward(hidden, masks[kind], past_key_values, tables[kind])
    if isinstance(logits_to_keep, Tensor):
        hidden = hidden[:, logits_to_keep]
    elif logits_to_keep:
        hidden = hidden[:, -logits_to_keep:]
    return types.SimpleNamespace(logits=self.lm_head(base.norm(hidden)))
