"""The Llama family in few operators with products of one's own, and products for CPUs, whose weights are laid out once.

Around the products of a step of few tokens, transformers takes as long again in small operators, each of which a host
has to launch. `Layer` and `_forward` compute the same with a third to half of them.

On a CPU torch's own product reads a weight [out, in] as it lies, and for 2 to 16 tokens that takes two to three times
as long as the weight's bytes take to arrive: a step that verifies five tokens costs two of one. From the layout that
oneDNN chooses, all of them take about as long as one. These are the operators that torch.compile uses where weights are
frozen; without compiling, they are called here.

oneDNN also compiles and keeps a primitive for each number of rows of any other product. Batches of changing size are
therefore filled up with rows of zeros (`filled`), so that hours of work need only a few primitives.

Legend: B rows, m tokens of a call, C tokens in the cache before it, H hidden, D width of a head, G heads of queries for
one of keys and values.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, pad, rms_norm, scaled_dot_product_attention, silu

from distill.devices import CPU
from distill.engines.torch.hugging_face import KeptHead
from distill.engines.torch.model import layer_masks, shortest_window
from distill.errors import DataError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": functools.partial(gelu, approximate="tanh"),
}
COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")  # what `Layer` computes; the tests compare each

Product = Callable[..., torch.nn.Module]  # of a weight [out, in], its bias or None, and an activation's name


class After(torch.nn.Module):
    """A product that is told what follows it: an activation, or another tensor [..., out], added or multiplied."""

    def __init__(self, activation: str | None) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation] if activation else None

    def after(self, product: Tensor, other: Tensor | None, how: str) -> Tensor:
        """[..., out] of the product [..., out]."""
        if self._activation is not None:
            product = self._activation(product)
        return product if other is None else COMBINED[how](product, other)


class Linear(After):
    """x [..., in] · weightᵀ + bias by torch's own product, of a weight that stays where it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__(activation)
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., out] of [..., in]."""
        return self.after(linear(x, self._weight, self._bias), other, how)


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
    """A copy of a model on an accelerator with `Layer`s of `Linear` products, or the model itself where there are none.

    The copy shares all tensors with the model, which stays what it was.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    kinds = {(weight.device, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    return model if len(kinds) > 1 or not is_of_family(model, layers) else with_layers(copy_of(model), model, Linear)


def copy_of(model: Any) -> Any:
    """The modules of a model once more, with the same tensors."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def with_layers(copied: Any, model: Any, product: Product) -> Any:
    """The copy of a model of FAMILIES, which from now on computes by `Layer`s."""
    base = model.model
    copied.model.layers = torch.nn.ModuleList(Layer(layer, product) for layer in base.layers)
    products = copied.model.layers[0].products
    copied.model.in_one_call = products[0].step(copied.model.layers) if products else None
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

    def __init__(self, norm: Any) -> None:
        super().__init__()
        shifted = type(norm).__name__.startswith("Gemma")  # which multiply by 1 + w
        self.epsilon, self.width = getattr(norm, "variance_epsilon", None) or norm.eps, len(norm.weight)
        self._of_torch = norm.weight.device.type != CPU
        weight = norm.weight.detach()
        if shifted or not self._of_torch:  # 1 + w takes more digits than w
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + (1 if shifted else 0)
        self.weight = weight  # after which x is multiplied by it
        self._weight = weight if self._of_torch else torch.cat((weight, torch.zeros_like(weight)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] of [..., H]."""
        if self._of_torch:
            return rms_norm(x.to(self._weight.dtype), (self.width,), self._weight, self.epsilon).to(x.dtype)
        both = layer_norm(torch.cat((x, -x), -1), (2 * self.width,), self._weight, None, self.epsilon)
        return both[..., : self.width]


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
        weights = [one.weight for one in (*three, mlp.gate_proj, mlp.up_proj)]
        bias = None if three[0].bias is None else torch.cat([one.bias for one in three])
        in_bits = not any(isinstance(one, Tensor) for one in weights)  # of a file: products that take the norm, too
        before = Norm(layer.input_layernorm)
        self.before = (lambda x: x) if in_bits else before.forward
        joined: list[Any] = []  # products of a file's bits
        if in_bits:
            joined.append(weights[0].joined(weights[1:3]).product(bias, norm=before))
            self.inputs = joined[0].forward
        elif product is Linear or not all(isinstance(one, Tensor) for one in weights[:3]):
            # It keeps no weights of its own, so that one for all three would take memory; or they are of two kinds.
            parts = [product(one.weight, one.bias).forward for one in three]
            self.inputs = lambda x: torch.cat([part(x) for part in parts], -1)
        else:
            self.inputs = product(torch.cat(weights[:3]), bias).forward
        output, down = (product(one.weight, one.bias) for one in (attention.o_proj, mlp.down_proj))
        self.output, self.down = output.forward, down.forward
        self.gate = product(mlp.gate_proj.weight, mlp.gate_proj.bias, _activation(attention.config)).forward
        self.up = product(mlp.up_proj.weight, mlp.up_proj.bias).forward
        self.after = self.after_mlp = self.gated = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.after = Norm(layer.post_attention_layernorm).forward
            self.before_mlp = Norm(layer.pre_feedforward_layernorm).forward
            self.after_mlp = Norm(layer.post_feedforward_layernorm).forward
        else:
            self.before_mlp = Norm(layer.post_attention_layernorm).forward
            if in_bits and mlp.gate_proj.bias is None:
                mlp_norm = Norm(layer.post_attention_layernorm)
                joined.append(weights[3].joined(weights[4:]).product(None, norm=mlp_norm))
                self.gated, self.activation = joined[1].forward, ACTIVATIONS[_activation(attention.config)]
        self.of_heads = None
        norms: list[Any] = [None, None]
        if hasattr(attention, "q_norm"):
            norms = [Norm(attention.q_norm), Norm(attention.k_norm)]
            self.of_heads = norms[0].forward, norms[1].forward
        self.products: tuple[Any, ...] = ()  # all of the layer, where they can be one call
        if len(joined) == 2 and _activation(attention.config) == "silu":
            self.products, self.norms = (joined[0], output, joined[1], down), (before, mlp_norm, *norms)

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
        if self.gated is not None:
            gate, up = self.gated(hidden_states).chunk(2, -1)
            inner = self.activation(gate).mul_(up)
        else:
            inner = self.before_mlp(hidden_states)
            inner = self.up(inner, self.gate(inner), "mul")
        if self.after_mlp is None:
            return self.down(inner, hidden_states)
        return hidden_states + self.after_mlp(self.down(inner))

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
    masks = {kind: masks[kind] for kind in dict.fromkeys(kinds)}
    if base.rotary_emb.by_kind:
        tables = {kind: base.rotary_emb(hidden, position_ids, kind) for kind in masks}
    else:
        tables = dict.fromkeys(kinds, base.rotary_emb(hidden, position_ids))
    whole, only = base.in_one_call, masks[kinds[0]]
    if whole is not None and len(masks) == 1 and whole.takes(hidden, only, past_key_values):
        hidden = whole(hidden, only, past_key_values, *tables[kinds[0]])
    else:
        masks = {kind: _folded(one, columns, base.layers[0].groups) for kind, one in masks.items()}
        for layer, kind in zip(base.layers, kinds, strict=True):
            hidden = layer.forward(hidden, masks[kind], past_key_values, tables[kind])
    if isinstance(logits_to_keep, Tensor):
        hidden = hidden[:, logits_to_keep]
    elif logits_to_keep:
        hidden = hidden[:, -logits_to_keep:]
    return types.SimpleNamespace(logits=self.lm_head(base.norm(hidden)))


# ── Products on a CPU ──

FEW = 8  # tokens that the layout is chosen for; up to 16 were measured to do well in it
MIN_VALUES = 2**14  # numbers of a weight: for smaller ones, a kernel for each number of tokens takes longer to make
DTYPES = (torch.float32, torch.bfloat16)
SHARE = 0.5  # of the free memory: the most that laid-out weights may take
ROWS = 64  # a number of rows is filled up to a multiple of so many
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # relative to the largest of a product that both make
GROUP = 32  # numbers of a weight's row that share a scale and a zero in 4 bits
BLOCK = 16  # rows of a weight that the 4-bit kernel takes together

Bits = Literal["int8", "int4"]  # what the weights of a draft may be rounded to

NAMES = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh")}  # of ACTIVATIONS in oneDNN, with the variant


class PrepackedLinear(torch.nn.Module):
    """x [..., in] · weightᵀ + bias as `torch.nn.functional.linear`, from a weight laid out once; for inference.

    What follows a product is part of it: an activation, or another tensor [..., out] that is added or multiplied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        # Not a buffer: its layout is opaque, and nothing may save, move or count it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW)
        self._bias = None if bias is None else bias.detach()
        name, variant = NAMES[activation] if activation else ("none", "")
        self._after: tuple[str, list[Any], str] = name, [], variant

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., out] of [..., in]."""
        operator = torch.ops.mkldnn._linear_pointwise
        if other is None:
            product: Tensor = operator.default(x, self._weight, self._bias, *self._after)
        else:
            product = operator.binary(x, other, self._weight, self._bias, how)
        return product


def four_bits(levels: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """What `four_bit_product` takes, of a weight [R, C] whose values are (level − 8) · scale + zero.

    Levels 0 to 15 are bytes; scale and zero [R, C / GROUP] give the type of the product (on an accelerator bfloat16).
    C is a multiple of GROUP, R is filled up to one of BLOCK.
    """
    levels, scale, zero = (pad(one, (0, 0, 0, -len(one) % BLOCK)) for one in (levels, scale, zero))
    both = torch.stack((scale, zero), -1).transpose(0, 1).contiguous()
    if levels.device.type == CPU:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1), both
    width = max(tiles for tiles in (2, 4, 8) if levels.shape[1] % (16 * tiles) == 0)  # of 16 columns
    return torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], width), both


def four_bit_product(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    """x [n, C] times the transpose of a weight of `four_bits`: [n, R], R as it was filled up."""
    operators = torch.ops.aten
    if x.device.type == CPU:
        return operators._weight_int4pack_mm_for_cpu(x, weight[0], GROUP, weight[1])
    return operators._weight_int4pack_mm(x, weight[0], GROUP, weight[1])


class FourBitLinear(torch.nn.Module):
    """x [..., C] · weightᵀ + bias by torch's operators, of a weight of `four_bits`; for inference."""

    def __init__(self, levels: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bias = levels.shape, bias
        self._weight = four_bits(levels, scale, zero)

    def forward(self, x: Tensor) -> Tensor:
        """[..., R] of [..., C]."""
        product = four_bit_product(x.reshape(-1, self.in_features).contiguous(), self._weight)
        product = product[:, : self.out_features].reshape(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


@functools.cache
def has_four_bits(device: torch.device) -> bool:
    """Whether torch multiplies so in bfloat16 on this device: one product of all 16 levels beside its own shows it."""
    levels = torch.arange(48 * 64).view(48, 64) % 16
    scale = torch.linspace(0.01, 0.1, 96).view(48, 2).bfloat16()
    values = (levels - 8).view(48, 2, 32) * scale[..., None].float() - scale[..., None].float()
    x = torch.linspace(-1, 1, 3 * 64).view(3, 64).bfloat16()
    expected = linear(x.float(), values.flatten(1))
    try:
        own = FourBitLinear(levels.to(device, torch.uint8), scale.to(device), -scale.to(device))
        found = own(x.to(device)).float().cpu()
    except (AttributeError, RuntimeError):  # a build or a device without these operators; any other fault is ours
        return False
    return bool((found - expected).abs().max() <= 2e-2 * expected.abs().max())


class RoundedLinear(After):
    """`PrepackedLinear` from a weight rounded to 8 bits a row, or to 4 bits with a scale and a zero for each GROUP.

    Its kernels read a quarter to a half of the bytes, in rows of a multiple of GROUP numbers.
    """

    def __init__(self, bits: Bits, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__(activation)
        self.rows, columns = weight.shape
        assert columns % GROUP == 0, columns  # other widths are read beyond their end
        exact = weight.detach().float()
        if bits == "int8":
            exact = pad(exact, (0, 0, 0, -self.rows % BLOCK))
            scale = (exact.abs().amax(1) / 127).to(weight.dtype)
            held = (exact / _divisor(scale)).round().clamp(-127, 127).to(torch.int8), scale
        else:
            groups = exact.unflatten(1, (-1, GROUP))
            low, high = groups.aminmax(dim=-1)
            scale = ((high - low) / 15).to(weight.dtype)
            zero = (low + 8 * scale.float()).to(weight.dtype)
            levels = ((groups - zero.float()[..., None]) / _divisor(scale) + 8).round().clamp(0, 15).byte().flatten(1)
            held = four_bits(levels, scale, zero)
        self._bits, (self._weight, self._scales) = bits, held
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., out] of [..., in]."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if self._bits == "int8":
            product = torch._weight_int8pack_mm(flat, self._weight, self._scales)
        else:
            product = four_bit_product(flat, (self._weight, self._scales))
        product = product[:, : self.rows].reshape(*x.shape[:-1], self.rows)
        if self._bias is not None:
            product = product + self._bias
        return self.after(product, other, how)


def _divisor(scale: Tensor) -> Tensor:
    """Scales [...] as fp32 [..., 1], with 1 instead of 0. Levels are chosen with the scales that multiply them."""
    return torch.where(scale > 0, scale.float(), 1.0)[..., None]


def works(dtype: torch.dtype, product: Product = PrepackedLinear) -> bool:
    """Whether this build and processor multiply so, which one product beside torch's own shows."""
    if dtype not in DTYPES or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=numbers).to(dtype)
    x, bias = torch.randn(1, 3, 32, generator=numbers).to(dtype), torch.randn(48, generator=numbers).to(dtype)
    expected = linear(x, weight, bias)
    try:
        found = product(weight, bias)(x)
    except (AttributeError, RuntimeError):  # a build without these operators; any other fault is one of ours
        return False
    # Half a level of 15 in a range of about four deviations is 4 % of a weight: a tenth of the largest product.
    allowed = CLOSE[dtype] if product is PrepackedLinear else 0.2
    return float((found - expected).abs().max()) <= allowed * float(expected.abs().max())


def prepacked(model: Any) -> tuple[Any, str]:
    """A copy of a model of transformers that decodes with prepacked layers, and why it has none (then: the model).

    The copy shares everything else, so that `model` itself stays what it was. It holds the weights of the time of this
    call. The reason is empty where this build has no such kernels, and elsewhere than on a CPU, where nothing is
    packed, but the layers are computed in few operators.
    """
    dtype, layers = _layers_on_cpu(model)
    if dtype is None:
        return in_few_operators(model), ""
    dense = [module.weight for module in layers.values() if isinstance(module.weight, Tensor)]
    if not layers or (dense and not works(dtype)):
        return model, ""
    size = sum(weight.numel() * weight.element_size() for weight in dense)
    free = psutil.virtual_memory().available
    if size > SHARE * free:
        return model, (
            f"linear layers are not prepacked: that takes {size / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        )
    return _with_products(model, layers, _fast), ""


def _fast(weight: Any, bias: Tensor | None, activation: str | None = None) -> torch.nn.Module:
    """The product of a weight that lies in memory or, of a file's bits, as those multiply."""
    if isinstance(weight, Tensor):
        return PrepackedLinear(weight, bias, activation)
    product: torch.nn.Module = weight.product(bias, activation)
    return product


def rounded(model: Any, bits: Bits, name: str) -> Any:
    """A copy of a draft as of `prepacked`, with the weights of its linear layers rounded to `bits`.

    DataError where it cannot be (`rounding_refusal`).
    """
    if reason := rounding_refusal(model, bits):
        raise DataError(f"{name}: draft_weights {bits} is not possible: {reason}", "leave draft_weights out")
    return _with_products(model, plain_layers(model), functools.partial(RoundedLinear, bits))


def rounding_refusal(model: Any, bits: Bits) -> str:
    """Why a model cannot be rounded: elsewhere than on a CPU, in a build or a type without such kernels, for weights
    whose rows they do not take, and without plain linear layers. Empty where it can."""
    dtype, layers = _layers_on_cpu(model)
    widths = [module.weight.shape[1] for module in layers.values() if module.weight.shape[1] % GROUP]
    if dtype is None:
        return "its weights are not all of one type and on a CPU"
    if not layers:
        return "it has no linear layers of plain numbers"
    if widths:
        return f"torch's kernels take rows of a multiple of {GROUP} numbers, and some of its have {widths[0]}"
    kind = str(dtype).removeprefix("torch.")
    works_here = works(dtype, functools.partial(RoundedLinear, bits))
    return "" if works_here else f"this build of torch does not multiply {kind} by {bits} on this processor"


def plain_layers(model: Any) -> dict[str, Any]:
    """The linear layers of a model on a CPU whose products may be replaced, by name."""
    return _layers_on_cpu(model)[1]


def _layers_on_cpu(model: Any) -> tuple[torch.dtype | None, dict[str, Any]]:
    """The type of a model's weights (None: several, or elsewhere than on a CPU) and its plain linear layers."""
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    ((device, dtype),) = kinds if len(kinds) == 1 else [("several", None)]
    if device != "cpu":
        return None, {}
    return dtype, {name: module for name, module in model.named_modules() if _replaceable(module)}


def _replaceable(module: Any) -> bool:
    """Plain linear layers only: adapted and quantised ones, and those that others hook into, compute something else."""
    plain = (type(module) in (torch.nn.Linear, KeptHead) or isinstance(module, After)) and not hooked(module)
    return plain and module.weight.shape.numel() >= MIN_VALUES


def _with_products(model: Any, layers: dict[str, Any], product: Product) -> Any:
    """A copy of a model whose linear `layers`, by name, multiply by `product`; it shares all other tensors."""
    few, prepared = is_of_family(model, layers), copy_of(model)
    for name, module in layers.items():
        if few and name.startswith("model.layers."):
            continue
        inner = product(module.weight, getattr(module, "bias", None))
        if isinstance(module, KeptHead):
            prepared.get_submodule(name).product = inner
        else:
            prepared.set_submodule(name, inner)
    return with_layers(prepared, model, product) if few else prepared


# ── Batches of changing size ──


def filled_count(count: int, tensor: Tensor) -> int:
    """The rows that `count` of them become where this tensor is: on an accelerator as many."""
    return -(-count // ROWS) * ROWS if tensor.device.type == "cpu" else count


def filled(rows: Tensor) -> Tensor:
    """Rows [N, H] with zeros after them, up to `filled_count`."""
    return pad(rows, (0, 0, 0, filled_count(len(rows), rows) - len(rows)))
