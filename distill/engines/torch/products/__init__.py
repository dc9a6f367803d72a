"""Products of models on this machine. Their one door is `pack(model, bits)`.

`load_in_bits` loads a GGUF file whose weights stay in the file's bits; `pack` takes such a model, too. Modules outside
this folder import from here only.
"""

from distill.engines.torch.products.choice import MAX_DRAFTED, MIN_WEIGHTS, TEXT, Weights, best_weights
from distill.engines.torch.products.file import exact_logits, load_in_bits, load_packed
from distill.engines.torch.products.kernel import FORMS, NoKernel, kernel_version
from distill.engines.torch.products.linear import Bits, FourBitLinear, filled, filled_count, has_four_bits
from distill.engines.torch.products.models import pack
from distill.engines.torch.products.packed import PackedLinear, kernel_fault, require_kernel
