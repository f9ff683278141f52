"""Samplers: one algorithm a file, each usable in one's own loop as a ``torch.optim.Optimizer``."""

from devsample.samplers.base import Kernel, Sampler
from devsample.samplers.sgld import SGLD, SGLDKernel

__all__ = ["SGLD", "Kernel", "SGLDKernel", "Sampler"]
