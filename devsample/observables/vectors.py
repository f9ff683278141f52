"""Norms, products and the virial of the vectors of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from devsample.observables.named import Measure
from devsample.samplers import Kernel
from devsample.samplers.base import Buffers


class Observer:
    r"""Measures K rows at one step, before their update; nothing waits for the device.

    All vectors are those of the P moving entries: "gradient" is nβ ĝ with the estimate ĝ of ∇L that
    the step uses, "noise" is σ R with the standard normals R that it is given (their average, where
    neighbouring steps share them), "localization" γ (w − w*), "weight" w and "offset" w − w*. Norms and
    the virial, whose mean under :math:`e^{-U/σ^2}` is σ², are

    .. math::
        |x|_p = \Big(\sum_i |x_i|^p\Big)^{1/p}, \qquad
        \frac{1}{P} (w - w^*) \cdot \big(nβ\, ĝ + γ (w - w^*) + μ w\big)

    Args:
        wanted: what to measure.
        kernel: the sampler.
        center: w*, shape (P,).
    """

    def __init__(self, wanted: Sequence[Measure], kernel: Kernel, center: torch.Tensor) -> None:
        self._wanted = tuple(wanted)
        self._center = center
        self._exact = torch.float32 if center.device.type == "mps" else torch.float64
        self._factors = {
            "gradient": getattr(kernel, "nbeta", 1.0),
            "noise": getattr(kernel, "noise_level", 1.0),
            "localization": getattr(kernel, "localization", 0.0),
        }
        self._weight_decay = getattr(kernel, "weight_decay", 0.0)
        self._offset = any(
            one.name == "virial" or {"localization", "offset"} & set(one.vectors) for one in self._wanted
        )

    def __call__(
        self,
        target: torch.Tensor,
        position: torch.Tensor,
        gradient: torch.Tensor,
        noise: torch.Tensor | None,
        buffers: Buffers,
    ) -> None:
        """Write the values of all rows into ``target``, shape (number of measures, K).

        Args:
            target: what is written.
            position: w, shape (K, P).
            gradient: ĝ, shape (K, P).
            noise: R, shape (K, P), if there is any.
            buffers: the sampler's.
        """
        vectors = {"gradient": gradient, "weight": position}
        if noise is not None:
            vectors["noise"] = noise
        if self._offset:
            vectors["offset"] = vectors["localization"] = position - self._center
        for one, values in zip(self._wanted, target, strict=True):
            values.copy_(self._value(one, vectors, buffers))

    def _value(self, one: Measure, vectors: Mapping[str, torch.Tensor], buffers: Buffers) -> torch.Tensor:
        if one.name == "virial":
            return self._virial(vectors)
        if not one.vectors:
            return buffers[one.name][:, 0]
        factor = math.prod(self._factors.get(name, 1.0) for name in one.vectors)
        first, *rest = (vectors[name] for name in one.vectors)
        if rest:
            return self._product(first, rest[0]).mul_(factor)
        norm: torch.Tensor = torch.linalg.vector_norm(first, one.p, dim=1, dtype=self._exact)
        return norm.mul_(factor)

    def _virial(self, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        offset = vectors["offset"]
        total = self._product(offset, vectors["gradient"]).mul_(self._factors["gradient"])
        total += self._factors["localization"] * self._product(offset, offset)
        if self._weight_decay:
            total += self._weight_decay * self._product(offset, vectors["weight"])
        return total / offset.shape[1]

    def _product(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * other).sum(1, dtype=self._exact)
