"""The state of a training: its checks, models, data and optimizer, built in one place.

LoRA and QLoRA (Hu et al. 2021; Dettmers et al. 2023) come through peft. Adapters are injected into the model's own
linear layers before the training, and merged after it. The model keeps its class, so that `model.model`,
`model.lm_head` and all code that reads them work as on a plain model. Only its frozen weights have other names
meanwhile. Legend: b blocks of a step.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.data.packing import token_ids
from distill.devices import (
    CPU,
    allow_short_products,
    has_pinned_memory,
    make_current,
    pick_device,
    process_count,
    read_ahead,
)
from distill.engines.torch.hugging_face import check_folder, load_config, load_model, load_weights, read_kept
from distill.engines.torch.products import PackedLinear
from distill.errors import RecipeError, RunError
from distill.recipe import Adapter, Recipe, Train
from distill.run import Run
from distill.surgery.cutter import kept_share
from distill.surgery.sparsity import RAMP, GroupLasso, require_ramp
from distill.teacher.store import StoredBlocks, TeacherStore, require_fit
from distill.training.learner import Columns, Learner, chunk_of
from distill.training.losses import Mixture, loss_settings, protocol_of
from distill.training.optimizer import make_optimizer, outer_share, with_rate
from distill.training.saved import plain

# ── Adapters ──

ADAPTER = "draft"  # the adapter's name in peft's dictionaries
UNQUANTISED = "use train.adapter.base=null, which keeps the base as it is"


def load_base(folder: Path, settings: Adapter, device: torch.device, dtype: str = "float32") -> Any:
    """Load the model that adapters are put into, with its whole head, in fp32 or with a quantised body.

    A body of 4 bits computes in `dtype`. bitsandbytes computes in float16 if it has 8 bits. Raises RunError if
    bitsandbytes is missing or does not work on this device.
    """
    if settings.base is None:
        return load_model(str(folder), "float32", device, trimmed=False)
    require_quantisation(device, settings.base)
    from transformers import BitsAndBytesConfig

    check_folder(str(folder))
    kind = (
        {"load_in_8bit": True}
        if settings.base == "int8"
        else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": getattr(torch, dtype)}
    )
    # bitsandbytes would warn at each product of each layer that it rounds the input to fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    quantisation = BitsAndBytesConfig(**kind)
    try:
        model = load_weights(str(folder), torch.float32, device_map={"": device}, quantization_config=quantisation)
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        hint = f"bitsandbytes before 0.50 cannot: `pip install -U bitsandbytes`, or {UNQUANTISED}"
        raise RunError(f"bitsandbytes cannot hold {folder} in {settings.base} on {device}: {first}", hint) from error
    for module in model.modules():
        # On such a CPU, inference would convert a 4-bit layer into a form without gradients.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def require_quantisation(device: torch.device, base: str) -> None:
    """Raise RunError unless bitsandbytes is installed and works on this device."""
    if importlib.util.find_spec("bitsandbytes") is None:
        hint = f"`pip install bitsandbytes`, or {UNQUANTISED}"
        raise RunError(f"train.adapter.base is {base}, which needs bitsandbytes", hint)
    from bitsandbytes import supported_torch_devices

    if device.type not in supported_torch_devices:
        known = ", ".join(sorted(supported_torch_devices))
        raise RunError(f"train.adapter.base is {base}: bitsandbytes works on {known}, not {device.type}", UNQUANTISED)


def layer_names(model: Any) -> list[str]:
    """The full names of the body's linear layers, which get adapters."""
    return [f"model.{name}" for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)]


def attach(model: Any, settings: Adapter, seed: int = 0, outer: bool = False) -> Any:
    """Put adapters into a causal language model in place, and freeze all other weights. Returns the model.

    Adapters start at zero (B = 0), so the model's function is unchanged. A depends only on `seed`. With `outer`, the
    embeddings and the head learn in full. Raises RunError for a model in its file's quantised form.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if any(isinstance(module, PackedLinear) for module in model.modules()):
        held = f"{model.config._name_or_path} is held in its file's bits, and adapters need floating-point weights"
        raise RunError(held, "give its folder instead (`distill import-gguf FILE OUT`)")
    config = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules=layer_names(model))
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU for every device.
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    if outer:
        model.get_input_embeddings().weight.requires_grad_(True)
        model.lm_head.weight.requires_grad_(True)
    return model


def merge(model: Any, init: Path | None = None) -> Any:
    """Add the product of each adapter to its layer's weight, and let all parameters learn again. Returns the model.

    A model with a quantised base is not changed: its adapters, trained embeddings and head are added to the fp32
    weights of the folder `init`, so that the rounding of the base is lost.
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
            plain.get_submodule(name).weight += layer.get_delta_weight(ADAPTER)
    if plain is model:
        del model.peft_config  # peft marks a model with adapters by this attribute.
    return plain.requires_grad_(True)


# ── The state of a training ──

ACCELERATE_DEVICE = "ACCELERATE_TORCH_DEVICE"  # the variable that selects accelerate's device

# The state before the first step. `tokens` have counted in the loss. `best` has the figures of the best weights, `sums`
# their acceptance by answer. `misses` counts the evaluations since. `ended` is the last step of a finished training.
START: dict[str, Any] = dict(step=0, best=None, sums=None, misses=0, sparsity=None, tokens=0, ended=None)


@dataclass
class Training:
    """A training in progress. Checkpoints hold `state`, the weights and the optimizer's moments."""

    recipe: Recipe
    run: Run
    accelerator: Any
    loss: Mixture
    source: TeacherStore
    learner: Any
    optimizer: Any
    penalty: GroupLasso | None
    kept: list[int] | None
    outer: float = 1.0  # the rate of embeddings and head, as a share of the rate of the other weights
    state: dict[str, Any] = field(default_factory=START.copy)

    @property
    def settings(self) -> Train:
        """The recipe's section."""
        return self.recipe.train

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        assert self.settings.rate is not None, "see with_rate"
        return self.settings.rate

    def blocks(self, step: int) -> Tensor:
        """The numbers [b] of the blocks of a step, for all processes."""
        return batch_blocks(step, self.settings.batch, self.source.blocks, self.recipe.seed)

    def micro_batches(self, step: int) -> list[Tensor]:
        """The numbers of this process's blocks of a step by micro-batch: a pure function of the step.

        Every process gets the same number of blocks (`require_processes`).
        """
        numbers = self.blocks(step)[self.accelerator.process_index :: self.accelerator.num_processes]
        return list(numbers.split(self.settings.micro_batch or len(numbers)))

    @cached_property
    def counts(self) -> Tensor:
        """The number of scored positions of each block."""
        return self.source.scored()

    def scored(self, step: int) -> int:
        """The number of scored positions of a step over all processes. No device is read for it."""
        return int(self.counts[self.blocks(step)].sum())

    def read(self, step: int) -> list[StoredBlocks]:
        """The micro-batches of a step on the host, pinned if the device copies pinned memory without a wait."""
        read = [self.source.read(numbers) for numbers in self.micro_batches(step)]
        return [stored.pinned() for stored in read] if has_pinned_memory(self.accelerator.device.type) else read

    @cached_property
    def batches(self) -> Callable[[int], list[StoredBlocks]]:
        """`read` by a thread that is a few steps ahead."""
        return read_ahead(self.read, self.settings.steps, self.accelerator.device)

    @contextlib.contextmanager
    def draft(self) -> Iterator[Any]:
        """Yield the draft with the present weights and all its rows."""
        learner: Any = plain(self.learner)
        with learner.whole() as draft:
            yield draft


def batch_blocks(step: int, batch: int, count: int, seed: int) -> Tensor:
    """The numbers [b] of the blocks of one step: a pure function, so that a resumed run learns from the same data."""
    places = [divmod(number, count) for number in range(step * batch, (step + 1) * batch)]
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return torch.tensor([int(orders[epoch][place]) for epoch, place in places], dtype=torch.long)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order [count] in which an epoch visits the blocks: a pure function, so that a resumed run finds its place."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))


def check_training(recipe: Recipe) -> list[str]:
    """The plan of the recipe's training, in lines to print. Raises RecipeError for settings that exclude each other."""
    settings = with_rate(recipe.train, kept_share(recipe))
    assert settings.rate is not None
    if settings.sparsity is not None:
        require_ramp(settings.steps, RAMP)
    positions = settings.batch * recipe.corpus.block
    mixture = loss_settings(settings, recipe.sampler.temperature)
    loss = ", ".join(f"{weight:g} {name}" for name, weight in mixture.items())
    lines = [f"train: {settings.steps} steps of {positions} positions at up to {settings.rate:g}: {loss}"]
    if (share := outer_share(recipe, settings.rate)) != 1:
        lines.append(f"train: embeddings and head at up to {share * settings.rate:g}")
    if settings.optimizer == "muon":
        lines.append("train: the layers' matrices learn by Muon")
    chosen = "the last weights are taken"
    if settings.acceptance is not None and settings.sparsity is None:
        verifying = protocol_of(settings, recipe.sampler.temperature)
        chosen = (
            f"the weights of the highest expected acceptance ({verifying} verification, the recipe's sampler) on "
            f"stored answers to {settings.acceptance.prompts} validation prompts are taken"
        )
    return [*lines, f"train: {chosen}"]


def require_processes(recipe: Recipe, device: torch.device) -> None:
    """Raise RunError or RecipeError if the processes of this command cannot share the recipe's steps and device."""
    processes = process_count()
    if device.index is not None and processes > 1:
        what = f"device is {recipe.device}, and {processes} processes were started, and each takes another device"
        raise RunError(what, "set device=auto; CUDA_VISIBLE_DEVICES selects the GPUs")
    if recipe.train.batch % processes:
        what = f"a step's {recipe.train.batch} blocks cannot be shared evenly by {processes} processes"
        raise RecipeError(what, f"set train.batch to a multiple of {processes}, or start fewer processes")


def make_accelerator(recipe: Recipe) -> Any:
    """The Accelerator of this command's processes.

    Raises RunError for a device that cannot be used, for one that accelerate does not select, and for one GPU that
    several processes would share.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import patch_environment

    settings = recipe.train
    device, processes = pick_device(recipe.device), process_count()
    require_processes(recipe, device)
    # An earlier training in this process made other choices. A process group stays.
    AcceleratorState._reset_state(reset_partial_state=processes == 1)
    make_current(device)
    # This selects devices that accelerate does not know, too. Several processes take the device of their launcher.
    with patch_environment(**({ACCELERATE_DEVICE: device} if processes == 1 else {})):
        accelerator = Accelerator(
            cpu=device.type == CPU if processes == 1 else None,
            mixed_precision="bf16" if settings.dtype == "bfloat16" else "no",
        )
    if recipe.device != "auto" and accelerator.device.type != device.type:
        hint = "set device=auto, or start them for that device"
        raise RunError(f"device is {recipe.device}, and the processes were started for {accelerator.device.type}", hint)
    allow_short_products(accelerator.device)
    return accelerator


def load_draft(recipe: Recipe, run: Run, device: torch.device) -> Any:
    """Load the cut donor with its whole head, and with adapters if the recipe asks for them."""
    settings, init = recipe.train, run.path("cut")
    if settings.adapter is None:
        draft = load_model(str(init), "float32", device, trimmed=False)
    else:
        base = load_base(init, settings.adapter, device, settings.dtype)
        draft = attach(base, settings.adapter, recipe.seed, outer=recipe.cut.transplant is not None)
    if settings.checkpointing:
        recompute_activations(draft)
    if settings.compile:
        draft.model.compile()
    return draft


def recompute_activations(model: Any) -> None:
    """Make a model of transformers recompute its layers' activations in the backward pass (checkpointing)."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # transformers 5.17
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def set_up(recipe: Recipe, run: Run) -> Training:
    """Load everything, and refuse incompatible parts before the first step.

    Raises DataError for a store of another target or recipe, and RecipeError for settings that exclude each other.
    """
    parent, given = run.parent(), recipe.train
    continues = parent is not None  # The run continues a trained draft, in which no weights are new.
    if parent is not None and given.rate == parent.get("rate"):  # The recipe chose this rate for the cut.
        given = given.model_copy(update={"rate": None})
    settings = with_rate(given, 1.0 if continues else kept_share(recipe, load_config(str(run.path("cut")))))
    assert settings.rate is not None
    outer = 1.0 if continues else outer_share(recipe, settings.rate)
    if continues:
        run.say(f"  goes on from a trained draft: all weights at up to {settings.rate:g}")
    recipe = recipe.model_copy(update={"train": settings})
    accelerator = make_accelerator(recipe)
    device = accelerator.device
    loss = loss_settings(settings, recipe.sampler.temperature)
    trim = read_kept(run.path("cut"))
    kept = trim["kept"] if trim else None
    draft = load_draft(recipe, run, device)
    source = TeacherStore(run)
    require_fit(source.manifest, recipe)
    sparsity = settings.sparsity
    penalty = None if sparsity is None else GroupLasso(draft, sparsity.mlp_width, settings.steps)
    ids = None if kept is None else token_ids(source.packed, source.vocabulary)
    columns = Columns(source.vocabulary, kept, device)
    learner: Any = Learner(draft, columns, chunk_of(draft, columns.count, device), ids)
    learner, optimizer = accelerator.prepare(learner, make_optimizer(draft, settings))
    learner.train()
    return Training(recipe, run, accelerator, loss, source, learner, optimizer, penalty, kept, outer)
