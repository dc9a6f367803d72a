"""LoRA and QLoRA (Hu et al. 2021; Dettmers et al. 2023) through peft: put in before training, merged after it.

Adapters are injected into the model's own linear layers. The model keeps its class, so `model.model`, `model.lm_head`
and all code that reads them work as on a plain model; only its frozen weights have other names meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from distill.engines.torch.hugging_face import check_folder, load_model, load_weights
from distill.errors import RunError
from distill.recipe import Adapter

NAME = "draft"  # of the one adapter, in peft's dictionaries
UNQUANTISED = "use train.adapter.base=null, which keeps the base as it is"


def load_base(folder: Path, settings: Adapter, device: torch.device) -> Any:
    """The model that adapters are put into, its whole head included: fp32, or with a quantised body.

    Raises RunError where bitsandbytes is missing or cannot work on this device.
    """
    if settings.base is None:
        return load_model(str(folder), "float32", device, trimmed=False)
    require_quantisation(device, settings.base)
    from transformers import BitsAndBytesConfig

    check_folder(str(folder))
    kind = (
        {"load_in_8bit": True}
        if settings.base == "int8"
        else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    )
    # Else it warns at every product of every layer that it rounds its input to fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    quantisation = BitsAndBytesConfig(**kind)
    try:
        model = load_weights(str(folder), torch.float32, device_map={"": device}, quantization_config=quantisation)
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise RunError(
            f"bitsandbytes cannot hold {folder} in {settings.base} on {device}: {first}",
            f"bitsandbytes before 0.50 cannot: `pip install -U bitsandbytes`, or {UNQUANTISED}",
        ) from error
    for module in model.modules():
        # Else a 4-bit layer that once ran for inference on such a CPU stays in a form that no gradient gets through.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def require_quantisation(device: torch.device, base: str) -> None:
    """Raise RunError unless bitsandbytes is installed and works on this device."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RunError(
            f"train.adapter.base is {base}, which needs bitsandbytes", f"`pip install bitsandbytes`, or {UNQUANTISED}"
        )
    from bitsandbytes import supported_torch_devices

    if device.type not in supported_torch_devices:
        known = ", ".join(sorted(supported_torch_devices))
        raise RunError(f"train.adapter.base is {base}: bitsandbytes works on {known}, not {device.type}", UNQUANTISED)


def layer_names(model: Any) -> list[str]:
    """Full names of the body's linear layers, which get adapters."""
    return [f"model.{name}" for name, one in model.model.named_modules() if isinstance(one, torch.nn.Linear)]


def attach(model: Any, settings: Adapter, seed: int = 0) -> Any:
    """Put adapters into a causal language model, in place, and freeze the rest; returns the model.

    They start at zero (B = 0), so the model's function is unchanged; A is drawn from `seed` alone.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=layer_names(model),
    )
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU, whatever the device
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=NAME)
    if settings.train_outer:
        model.get_input_embeddings().weight.requires_grad_(True)
        model.lm_head.weight.requires_grad_(True)
    return model


def merge(model: Any, init: Path | None = None) -> Any:
    """The plain model with every adapter's product added to its layer's weight; all its parameters learn again.

    The model itself, changed in place, unless its base was quantised: then the adapters (and the trained embeddings and
    head) go into the fp32 weights of the folder `init`, on the same device, so that no rounding of the base is kept.
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert layers, "there is no adapter to merge"
    plain = model
    if getattr(model, "is_quantized", False):
        assert init is not None, "a quantised base is merged into the weights of a folder"
        plain = load_model(str(init), "float32", next(model.parameters()).device, trimmed=False)
    with torch.no_grad():
        if plain is not model:
            plain.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight)
            plain.lm_head.weight.copy_(model.lm_head.weight)
        for name, layer in layers.items():
            if plain is model:
                model.set_submodule(name, layer.get_base_layer())
            plain.get_submodule(name).weight += layer.get_delta_weight(NAME)
    if plain is model:
        del model.peft_config  # peft's mark on a model that has adapters
    return plain.requires_grad_(True)


@contextlib.contextmanager
def adapted(model: Any, settings: Adapter | None, seed: int = 0) -> Iterator[Any]:
    """Adapters within a `with` block, merged in place at its end, as for healing a cut; without settings, nothing.

    The base is never quantised, whatever settings.base is: a quantised base is merged into the weights of a folder, and
    a cut under trial has none.
    """
    if settings is None:
        yield model
        return
    yield attach(model, settings, seed)
    merge(model)
