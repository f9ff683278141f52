"""Deep linear networks of a million and ten million weights against the closed form.

SGHMC on the exact population loss from the deepest point, one chain of the public function, with the steps
and the friction of tests/statistical/test_deep_linear.py. A million weights take minutes on one core, ten
million want a GPU:

    python benchmarks/deep_linear.py [--params 1000000 10000000] [--networks 3] [--device cuda]
"""

import argparse
import time

import torch
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.samplers import SGHMC
from devsample.testing import deep_linear_network, random_deep_linear_networks

BURNIN, STEPS, BETWEEN = 1500, 500, 10


def curvature(network, gamma, device, draws=2):
    """A bound on the curvature at draws of the localization's Gaussian, from spectral norms."""
    random = torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(draws):
        norms = []
        for layer in network.layers:
            noise = torch.randn(layer.weight.shape, generator=random) / gamma**0.5
            norms.append(spectral_norm((layer.weight.detach().cpu() + noise).to(device)))
        norms = torch.tensor(norms)
        whole = norms.prod()
        pairs = torch.outer(1 / norms, 1 / norms).fill_diagonal_(0).sum(1).max()
        largest = max(largest, float(2 * ((whole / norms).square().sum() + (whole + 1) * whole * pairs)))
    return largest


def spectral_norm(weight, rounds=50):
    """The largest singular value, by power iteration."""
    v = torch.ones(weight.shape[1], device=weight.device)
    for _ in range(rounds):
        v = weight.T @ (weight @ (v / v.norm()))
    return float(v.norm().sqrt())


def measure(one, gamma, nbeta, device, threads, burnin, steps):
    """λ̂ of one network with its error bar, and the seconds of a step."""
    network = deep_linear_network(one.widths, one.rank).to(device)
    lr = 1 / (nbeta * curvature(network, gamma, device) + gamma)
    friction = min(0.1, 4 * (lr * gamma) ** 0.5)
    started = time.perf_counter()
    result = estimate_learning_coeff_with_summary(
        network,
        loader_spec=LoaderSpec(TensorDataset(torch.zeros(1, 1))),
        evaluate=lambda model, batch: model.population_loss(),
        sampling_method=SGHMC,
        optimizer_kwargs={"lr": lr, "nbeta": nbeta, "localization": gamma, "friction": friction},
        num_chains=1,
        num_burnin_steps=burnin,
        num_draws=max(1, steps // BETWEEN),
        num_steps_bw_draws=BETWEEN,
        baseline="fixed",
        init_loss=0.0,
        device=device,
        threads_per_chain=threads,
        seed=0,
        verbose=False,
    )
    return result, (time.perf_counter() - started) / (burnin + steps)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--networks", type=int, default=3)
    parser.add_argument("--nbeta", type=float, nargs="+", help="default: 100 γ and 1000 γ")
    parser.add_argument("--burnin", type=int, default=BURNIN)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the chain on the CPU; default: all")
    given = parser.parse_args()
    print(f"{given.device}, torch {torch.__version__}, {given.burnin} + {given.steps} steps of SGHMC")
    print("| weights | widths | rank | γ | nβ | λ | λ̂ | λ̂/λ | s/step |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for num_params in given.params:
        gamma = float(round(num_params**0.5 / 2))
        for one in random_deep_linear_networks(num_params, given.networks, depths=(2, 3)):
            for nbeta in given.nbeta or (100 * gamma, 1000 * gamma):
                result, seconds = measure(
                    one, gamma, nbeta, given.device, given.threads, given.burnin, given.steps
                )
                widths = "–".join(map(str, one.widths))
                print(
                    f"| {one.num_params} | {widths} | {one.rank} | {gamma:g} | {nbeta:g} | {one.value:g} "
                    f"| {result.llc:.6g} | {result.llc / one.value:.3f} | {seconds:.3g} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
