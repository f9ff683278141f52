"""Samplers: one algorithm a file, each usable in one's own loop as a ``torch.optim.Optimizer``."""

from devsample.samplers.adam import AdamSGLD as AdamSGLD
from devsample.samplers.base import Kernel, can_freeze
from devsample.samplers.hmc import HMC as HMC
from devsample.samplers.langevin import LangevinKernel
from devsample.samplers.mala import MALA as MALA
from devsample.samplers.optimizer import Sampler
from devsample.samplers.rmsprop import RMSPropSGLD as RMSPropSGLD
from devsample.samplers.sghmc import SGHMC as SGHMC
from devsample.samplers.sgld import SGLD as SGLD
from devsample.samplers.sgld import SGLDKernel
from devsample.samplers.sgnht import SGNHT as SGNHT

# Name → class of every sampler imported above: its import is its registration.
SAMPLERS: dict[str, type[Sampler]] = {
    name: kind
    for name, kind in sorted(globals().items())
    if isinstance(kind, type) and issubclass(kind, Sampler) and kind is not Sampler
}

__all__ = ["SAMPLERS", "Kernel", "LangevinKernel", "SGLDKernel", "Sampler", "can_freeze"]
__all__ += list(SAMPLERS)
