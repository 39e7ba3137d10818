"""Operations of Triton that the runner of a CPU can drive."""

from kernels.torch import sampling
from kernels.torch.operations import TorchOperations
from kernels.triton.operations import TritonOperations


class HostSampledTriton(TritonOperations):
    """With torch's sampling."""

    best_of_rows = staticmethod(sampling.best_of_rows)
    apply_penalties = staticmethod(sampling.apply_penalties)
    best_of_masked_rows = staticmethod(sampling.best_of_masked_rows)
    sample = TorchOperations.sample
    token_logprobs = staticmethod(sampling.token_logprobs)
