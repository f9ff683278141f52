"""What follows from recorded observables: functions of a run's result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from devsample.errors import InvalidArgumentError

if TYPE_CHECKING:
    from devsample.diagnostics import Description
    from devsample.results import LLCResult

Draws = NDArray[np.float64]


def refined_llc(result: LLCResult, name: str, *, nbeta: float | None = None) -> Description:
    r"""The data-refined learning coefficient: of the loss L' on other data, under the run's own law.

    .. math::
        λ' = nβ' \,\big(E[L'(w)] - L'(w^*)\big), \qquad
        w \sim \exp\!\big(-nβ L_n(w) - \tfrac{γ}{2}|w - w^*|^2\big)

    Args:
        result: of a run with ``LossOn(name, ...)`` or "full_loss" among its observables.
        name: of that observable.
        nbeta: nβ' > 0; None: the run's nβ.

    Returns:
        Mean, standard error, effective draws and R-hat, over the chains that the estimate uses.

    Raises:
        InvalidArgumentError: the result has no such observable.

    References:
        G. Wang et al., "Differentiation and specialization of attention heads via the refined local learning
        coefficient", 2024, arXiv 2410.02984, section 2.
    """
    center = result.settings.get("observables", {}).get(name, {}).get("center")
    if center is None or name not in result.draws:
        raise InvalidArgumentError(
            f"name: the run did not record a loss under {name!r}; give it observables=LossOn({name!r}, ...)."
        )
    factor = float(result.settings["nbeta"] if nbeta is None else nbeta)
    if not (factor > 0 and math.isfinite(factor)):
        raise InvalidArgumentError(f"nbeta: expected a number > 0, got {nbeta!r}.")
    return _describe(factor * (_table(result, name) - center))


def wbic(result: LLCResult) -> Description:
    r"""The widely applicable Bayesian information criterion, at nβ = n/ln n.

    .. math:: \mathrm{WBIC} = n\, E[L_n(w)], \qquad β = 1/\ln n

    It approximates the free energy −ln Z of the tempered posterior's prior; the run's is
    exp(−γ/2 |w − w*|²), which confines it to the neighbourhood of w*.

    Args:
        result: of a run whose nβ was left out, or n/ln n.

    Returns:
        Mean, standard error, effective draws and R-hat, over the chains that the estimate uses.

    Raises:
        InvalidArgumentError: nβ was another.

    References:
        S. Watanabe, "A widely applicable Bayesian information criterion", JMLR 14 (2013), eq. 7.
    """
    n, used = int(result.settings["num_samples"]), float(result.settings["nbeta"])
    needed = n / math.log(n) if n > 1 else 1.0
    if not math.isclose(used, needed, rel_tol=1e-3):
        raise InvalidArgumentError(
            f"result: WBIC is the loss at nbeta = n/ln n = {needed:.5g}, but this run has {used:.5g} "
            f"({result.settings['nbeta_rule']}); leave nbeta out of optimizer_kwargs."
        )
    return _describe(n * _table(result, "loss"))


def loss_variance(result: LLCResult) -> Description:
    r"""Var L_n(w) under the run's law, as the covariance of two batches' paired losses.

    .. math:: \mathrm{Var}\, L_n = \mathrm{Cov}\big(L_A(w) - L_A(w^*),\; L_B(w) - L_B(w^*)\big)

    The batches A and B of a draw are independent, so their noise is not in it.

    Args:
        result: of a run with "second_batch" among its observables.

    Returns:
        Mean, standard error, effective draws and R-hat, over the chains that the estimate uses.

    Raises:
        InvalidArgumentError: there is no second batch.
    """
    if "loss_b" not in result.draws:
        raise InvalidArgumentError('result: the run has no second batch; give it observables="second_batch".')
    one = _table(result, "loss") - _table(result, "baseline")
    other = _table(result, "loss_b") - _table(result, "baseline_b")
    return _describe(_centered(one) * _centered(other) * _unbiased(one))


def functional_variance(result: LLCResult, name: str = "sample_losses") -> Description:
    r"""The functional variance of the n samples, from m of them.

    .. math::
        V = \sum_{i=1}^n \mathrm{Var}_w[\ell_i(w)] \approx \frac{n}{m} \sum_{i=1}^m \mathrm{Var}_w[\ell_i(w)]

    with the loss ℓ_i of sample i. The variances are over the draws of all chains; the error is that of
    draws with the mean over them held fixed, and does not know of the n − m other samples.

    Args:
        result: of a run with ``SampleLosses(name)`` among its observables.
        name: of that observable.

    Returns:
        Mean, standard error, effective draws and R-hat, over the chains that the estimate uses.

    Raises:
        InvalidArgumentError: the result has no such observable.

    References:
        S. Watanabe, "Equations of states in singular statistical estimation", Neural Networks 23
        (2010), eq. 12.
    """
    return _describe(_variances(result, name) * int(result.settings["num_samples"]))


def singular_fluctuation(result: LLCResult, name: str = "sample_losses") -> Description:
    r"""The singular fluctuation ν at the run's temperature.

    .. math:: ν = \frac{β}{2} V = \frac{nβ}{2m} \sum_{i=1}^m \mathrm{Var}_w[\ell_i(w)]

    with the `functional_variance` V. For a regular model that holds the truth, and a loss that is minus the
    log likelihood, ν = λ = d/2.

    Args:
        result: of a run with ``SampleLosses(name)`` among its observables.
        name: of that observable.

    Returns:
        Mean, standard error, effective draws and R-hat, over the chains that the estimate uses.

    Raises:
        InvalidArgumentError: the result has no such observable.

    References:
        S. Watanabe, "Equations of states in singular statistical estimation", Neural Networks 23
        (2010), eq. 18.
    """
    return _describe(_variances(result, name) * float(result.settings["nbeta"]) / 2)


def _variances(result: LLCResult, name: str) -> Draws:
    """The mean over samples of (ℓ_i(w) − its mean)², shape (chains, draws)."""
    key = f"{name}/trace"
    trace = np.asarray(result.get(key)) if key in result else np.empty(0)
    if trace.ndim != 3:
        raise InvalidArgumentError(
            f"name: the run did not record samples' losses as {name!r}; give it observables=SampleLosses()."
        )
    used = _used(result)
    losses = trace[used]
    losses = losses[:, : int(np.isfinite(losses).all(axis=(0, 2)).cumprod().sum())]
    squares: Draws = np.square(_centered(losses)).mean(axis=2)
    return squares * _unbiased(squares)


def _table(result: LLCResult, name: str) -> Draws:
    """A column of the draws, shape (chains in use, draws that all of them have)."""
    from devsample.diagnostics import align

    rows = {chain: table[name].to_numpy(np.float64) for chain, table in result.draws.groupby("chain")}
    return align([rows[chain] for chain in _used(result)])


def _used(result: LLCResult) -> list[Any]:
    """The chains that the estimate uses."""
    chains = result.chains
    return list(chains["chain"][np.isfinite(chains["llc"].to_numpy(np.float64))])


def _centered(draws: Draws) -> Draws:
    return np.asarray(draws - draws.mean(axis=(0, 1)))


def _unbiased(draws: Draws) -> float:
    """N/(N − 1), N the effective draws: what a mean of products about the draws' own mean lacks."""
    from devsample.diagnostics import describe

    number = describe(draws).ess
    return number / (number - 1) if number > 2 else 1.0


def _describe(draws: Draws) -> Description:
    from devsample.diagnostics import describe

    return describe(draws)
