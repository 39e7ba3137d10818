"""All cases of the fuzzing of the native library, by the operation they call.

A right call must return; a wrong index, length or weight must raise ValueError before any memory
is touched. Results are looked at where it costs nothing: a row has the same bits alone. Whether
values are right is for tests/kernels/cpu to say.
"""

from collections.abc import Callable

from kernels.cpu.library import NativeLibrary
from scripts.native_fuzz import products, rows, steps
from scripts.native_fuzz.chance import Chance

Case = Callable[[NativeLibrary, Chance], None]

CASES: tuple[Case, ...] = (
    products.linear,
    products.wrong_linear,
    products.gather,
    products.quantised_activations,
    rows.embedding,
    rows.norms_and_activations,
    rows.sampling,
    rows.threads_and_instructions,
    steps.attention,
    steps.rotary,
    steps.captured_step,
)
