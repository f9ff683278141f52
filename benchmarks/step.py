"""Time of one step of a chain against a hand-written SGLD loop, in the same process.

Both read batches of 64 from tensors, compute the paired baseline at every draw, and use one
thread. Prints the ratio of medians over alternating rounds:

    python benchmarks/step.py [--rounds 5] [--steps 1000]
"""

import argparse
import itertools
import statistics
import time

import torch
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary

LR, NBETA, LOCALIZATION, BATCH = 1e-6, 100.0, 1.0, 64
MODELS = {
    "mlp 32-32-32-2": (32, 32, 32, 2),
    "mlp 784-128-128-10": (784, 128, 128, 10),
}


def build(widths):
    """A ReLU network with the given widths and data for it."""
    torch.manual_seed(0)
    layers = []
    for inside, outside in itertools.pairwise(widths):
        layers += [torch.nn.Linear(inside, outside), torch.nn.ReLU()]
    data = TensorDataset(torch.randn(4096, widths[0]), torch.randint(0, widths[-1], (4096,)))
    return torch.nn.Sequential(*layers[:-1]), data


def evaluate(model, batch):
    """Cross entropy."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def ours(model, data, steps):
    """Seconds per step of a chain of the public function, by the chain's own clock."""
    result = estimate_learning_coeff_with_summary(
        model,
        loader_spec=LoaderSpec(data, batch_size=BATCH),
        evaluate=evaluate,
        optimizer_kwargs={"lr": LR, "nbeta": NBETA, "localization": LOCALIZATION},
        num_chains=1,
        num_draws=steps,
        threads_per_chain=1,
        seed=0,
        verbose=False,
    )
    return float(result.chains["seconds"].iloc[0]) / steps


def by_hand(model, data, steps):
    """Seconds per step of a loop over lists of parameters, with unkeyed noise."""
    inputs, targets = data.tensors
    center = [parameter.detach().clone() for parameter in model.parameters()]
    weights = [value.clone().requires_grad_() for value in center]
    names = [name for name, _ in model.named_parameters()]
    started = time.perf_counter()
    for _ in range(steps):
        index = torch.randint(0, len(inputs), (BATCH,))
        batch = inputs[index], targets[index]
        output = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (batch[0],))
        loss = torch.nn.functional.cross_entropy(output, batch[1])
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            evaluate(model, batch)
            noise = [torch.randn_like(weight) for weight in weights]
            pull = torch._foreach_sub(center, weights)
            torch._foreach_add_(weights, gradients, alpha=-LR / 2 * NBETA)
            torch._foreach_add_(weights, pull, alpha=LR / 2 * LOCALIZATION)
            torch._foreach_add_(weights, noise, alpha=LR**0.5)
    return (time.perf_counter() - started) / steps


def main():
    """Print one line a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':20} {'ours µs':>9} {'by hand µs':>11} {'ratio':>6}  (range over rounds)")
    for name, widths in MODELS.items():
        model, data = build(widths)
        pairs = [
            (ours(model, data, arguments.steps), by_hand(model, data, arguments.steps))
            for _ in range(arguments.rounds)
        ]
        ratios = sorted(one / two for one, two in pairs)
        print(
            f"{name:20} {statistics.median(one for one, _ in pairs) * 1e6:9.0f} "
            f"{statistics.median(two for _, two in pairs) * 1e6:11.0f} "
            f"{statistics.median(ratios):6.2f}  ({ratios[0]:.2f} – {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
