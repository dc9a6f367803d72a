"""The Llama family in few operators: the same layers for processors and accelerators, with products of one's own.

Around the products of a step of few tokens, transformers takes as long again in small operators, each of which a host
has to launch. `Layer` and `_forward` compute the same with a third to half of them. Of other families an accelerator
gets the norms alone.

Legend: B rows, m tokens of a call, C tokens in the cache before it, H hidden, D width of a head, G heads of queries for
one of keys and values.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from distill.devices import CPU
from distill.engines.torch.model import layer_masks, shortest_window

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": functools.partial(gelu, approximate="tanh"),
}
COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")  # what `Layer` computes; the tests compare each

Product = Callable[..., torch.nn.Module]  # of a weight [out, in], its bias or None, and an activation's name


class Linear(torch.nn.Module):
    """x [..., in] · weightᵀ + bias by torch's own product, of a weight that stays where it is.

    What follows a product is told with it: an activation, or another tensor [..., out] that is added or multiplied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._activation = ACTIVATIONS[activation] if activation else None

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., out] of [..., in]."""
        product = linear(x, self._weight, self._bias)
        if self._activation is not None:
            product = self._activation(product)
        return product if other is None else COMBINED[how](product, other)


def is_of_family(model: Any, layers: dict[str, Any]) -> bool:
    """Whether `Layer` and `_forward` compute what this model does, if its products are all among `layers`."""
    config = model.config
    if type(model).__name__ not in [f"{family}ForCausalLM" for family in FAMILIES]:
        return False
    own = [name for name, one in model.named_modules() if "_proj" in name.rpartition(".")[2]]
    return (
        config._attn_implementation == "sdpa"
        and not getattr(config, "final_logit_softcapping", None)
        and not getattr(config, "use_bidirectional_attention", None)
        and _activation(config) in ACTIVATIONS
        and all(name in layers for name in own)
        and not any(hooked(module) for module in model.modules())
    )


def hooked(module: torch.nn.Module) -> bool:
    """Whether others have changed what a module computes, or where (accelerate's hooks, of a sharded model)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


def in_few_operators(model: Any) -> Any:
    """A copy of a model on an accelerator with `Layer`s of `Linear` products; of other families, with `Norm`s alone.

    The copy shares all tensors with the model, which stays what it was. The model itself where neither is possible.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    kinds = {(weight.device, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    if len(kinds) > 1 or any(hooked(module) for module in model.modules()):
        return model
    if is_of_family(model, layers):
        return with_layers(copy_of(model), model, Linear)
    norms = {name: norm for name, module in model.named_modules() if (norm := _norm_of(module)) is not None}
    copied = copy_of(model) if norms else model
    for name, norm in norms.items():
        copied.set_submodule(name, norm)
    return copied


def _norm_of(module: torch.nn.Module) -> Norm | None:
    """The `Norm` that computes what this module of any family does, which one call of both shows; else None."""
    if not type(module).__name__.endswith("RMSNorm") or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight: Any = getattr(module, "weight", None)
    if weight is None or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return None
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    for shifted in (False, True):
        norm = Norm(module, shifted)
        with torch.no_grad():
            expected, found = module(x), norm(x)
        if bool((found - expected).abs().amax() <= 4 * torch.finfo(x.dtype).eps * expected.abs().amax()):
            return norm
    return None


def copy_of(model: Any) -> Any:
    """The modules of a model once more, with the same tensors."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def with_layers(copied: Any, model: Any, product: Product) -> Any:
    """The copy of a model of FAMILIES, which from now on computes by `Layer`s."""
    base = model.model
    copied.model.layers = torch.nn.ModuleList(Layer(layer, product) for layer in base.layers)
    copied.model.norm, copied.model.rotary_emb = Norm(base.norm), Rotary(base.rotary_emb)
    copied.forward = functools.partial(_forward, copied, shortest_window(model.config))
    return copied


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


class Norm(torch.nn.Module):
    """A root-mean-square norm by one operator, where transformers takes six to eight.

    On a CPU, for which torch has none of its own, by the layer norm: the mean of x and −x together is 0, and their
    variance is x's.
    """

    def __init__(self, norm: Any, shifted: bool | None = None) -> None:
        super().__init__()
        # Gemma's norms multiply by 1 + w.
        shifted = type(norm).__name__.startswith("Gemma") if shifted is None else shifted
        self.epsilon, self.width = getattr(norm, "variance_epsilon", None) or norm.eps, len(norm.weight)
        self._of_torch = norm.weight.device.type != CPU
        weight = norm.weight.detach()
        if shifted or not self._of_torch:  # 1 + w takes more digits than w
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + (1 if shifted else 0)
        self._weight = weight if self._of_torch else torch.cat((weight, torch.zeros_like(weight)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] of [..., H]."""
        if self._of_torch:
            return rms_norm(x.to(self._weight.dtype), (self.width,), self._weight, self.epsilon).to(x.dtype)
        return layer_norm(torch.cat((x, -x), -1), (2 * self.width,), self._weight, None, self.epsilon)[
            ..., : self.width
        ]


class Rotary(torch.nn.Module):
    """The rotary tables that `Layer` takes: cosines, and sines that are negative for the first half; [B, m, 1, D]."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._inner = rotary
        self.by_kind = "layer_type" in inspect.signature(rotary.forward).parameters

    def forward(self, *inputs: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        """The tables of transformers' module with these inputs."""
        cosines, sines = self._inner(*inputs, **settings)
        first, second = sines.chunk(2, -1)
        return cosines.unsqueeze(2), torch.cat((-first, second), -1).unsqueeze(2)


class Layer(torch.nn.Module):
    """A decoder layer of FAMILIES: attention over a cache and a gated MLP, with norms before them (Gemma: and after).

    The G heads of queries that share keys are more queries of one head, so that no key is repeated.
    """

    def __init__(self, layer: Any, product: Product) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.width, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.groups = attention.num_key_value_groups
        self.pairs = attention.k_proj.weight.shape[0] // self.width  # heads of keys and values
        three = [attention.q_proj, attention.k_proj, attention.v_proj]
        # The functions alone, because calling a module takes longer than some of them.
        if product is Linear:  # which keeps no weights of its own, so that one for all three would take memory
            self._three = [product(one.weight, one.bias).forward for one in three]
            self.inputs = self._side_by_side
        else:
            bias = None if three[0].bias is None else torch.cat([one.bias for one in three])
            self.inputs = product(torch.cat([one.weight for one in three]), bias).forward
        self.output = product(attention.o_proj.weight, attention.o_proj.bias).forward
        self.gate = product(mlp.gate_proj.weight, mlp.gate_proj.bias, _activation(attention.config)).forward
        self.up = product(mlp.up_proj.weight, mlp.up_proj.bias).forward
        self.down = product(mlp.down_proj.weight, mlp.down_proj.bias).forward
        self.before = Norm(layer.input_layernorm).forward
        self.after = self.after_mlp = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.after = Norm(layer.post_attention_layernorm).forward
            self.before_mlp = Norm(layer.pre_feedforward_layernorm).forward
            self.after_mlp = Norm(layer.post_feedforward_layernorm).forward
        else:
            self.before_mlp = Norm(layer.post_attention_layernorm).forward
        self.of_heads = None
        if hasattr(attention, "q_norm"):
            self.of_heads = Norm(attention.q_norm).forward, Norm(attention.k_norm).forward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states [B, m, H] of hidden states, with `Rotary`'s tables; the mask may be `_folded` already."""
        read = self._attended(self.before(hidden_states), attention_mask, past_key_values, *position_embeddings)
        if self.after is None:
            hidden_states = self.output(read, hidden_states)
        else:
            hidden_states = hidden_states + self.after(self.output(read))
        inner = self.before_mlp(hidden_states)
        inner = self.up(inner, self.gate(inner), "mul")
        if self.after_mlp is None:
            return self.down(inner, hidden_states)
        return hidden_states + self.after_mlp(self.down(inner))

    def _side_by_side(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self._three], -1)

    def _attended(self, inputs: Tensor, mask: Tensor | None, cache: Any, cosines: Tensor, sines: Tensor) -> Tensor:
        """What the heads read for inputs [B, m, H], side by side, after the tokens' keys and values are stored."""
        batch, columns, heads = *inputs.shape[:2], self.pairs * self.groups
        states = self.inputs(inputs).view(batch, columns, -1, self.width)
        turned, values = states[:, :, : heads + self.pairs], states[:, :, heads + self.pairs :]
        if self.of_heads is not None:
            of_queries, of_keys = self.of_heads
            turned = torch.cat((of_queries(turned[:, :, :heads]), of_keys(turned[:, :, heads:])), 2)
        turned = torch.addcmul(turned * cosines, turned.roll(self.width // 2, -1), sines)
        keys, values = cache.update(turned[:, :, heads:].transpose(1, 2), values.transpose(1, 2), self.index)
        queries = turned[:, :, :heads]
        if mask is None and columns > 1:  # a prompt, in an empty cache
            read = scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, scale=self.scaling, enable_gqa=True
            )
            return read.transpose(1, 2).flatten(2)
        queries = queries.unflatten(2, (self.pairs, self.groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = _folded(mask, columns, self.groups)
        read = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scaling)
        return read.unflatten(2, (self.groups, columns)).permute(0, 3, 1, 2, 4).flatten(2)


def _folded(mask: Tensor | None, columns: int, groups: int) -> Tensor | None:
    """A mask [B, 1, m, S] for the queries of all G heads that share keys: [B, 1, G · m, S]."""
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
    """What transformers' forward returns for a model of `Layer`s: its `logits` [B, m or fewer, V].

    transformers makes the masks where rows are padded. Layers see no more than `window` tokens of a longer text.
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
        shape, least = (columns, committed + columns), torch.finfo(hidden.dtype).min
        mask = torch.full(shape, least, dtype=hidden.dtype, device=hidden.device)
        mask = mask.triu_(committed + 1)[None, None]
    kinds = getattr(self.config, "layer_types", None) or [""] * len(base.layers)
    masks = mask if isinstance(mask, dict) else dict.fromkeys(kinds, mask)
    masks = {kind: _folded(masks[kind], columns, base.layers[0].groups) for kind in dict.fromkeys(kinds)}
    if base.rotary_emb.by_kind:
        tables = {kind: base.rotary_emb(hidden, position_ids, kind) for kind in masks}
    else:
        tables = dict.fromkeys(kinds, base.rotary_emb(hidden, position_ids))
    for layer, kind in zip(base.layers, kinds, strict=True):
        hidden = layer.forward(hidden, masks[kind], past_key_values, tables[kind])
    if isinstance(logits_to_keep, Tensor):
        hidden = hidden[:, logits_to_keep]
    elif logits_to_keep:
        hidden = hidden[:, -logits_to_keep:]
    return types.SimpleNamespace(logits=self.lm_head(base.norm(hidden)))
