"""A DataLoader with persistent workers that has been iterated, handed to processes of its own.

    NotImplementedError: ('{} cannot be pickled', '_MultiProcessingDataLoaderIter')

Such a loader holds the live iterator over its workers, and that cannot travel. devsample takes the recipe
out of the loader; every chain process builds its own loader with its own workers, and yours stays as it is.

    python docs/examples/persistent_loader.py
"""

import multiprocessing

import torch
from torch.utils.data import DataLoader, Dataset

from devsample import estimate_learning_coeff_with_summary


class Regression(Dataset):
    """200 noisy values of a linear function."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(200, 3, generator=generator)
        noise = torch.randn(200, 1, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + 0.3 * noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def evaluate(model, batch):
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def chain(loader, model):
    """What a chain process would do first."""
    print(evaluate(model, next(iter(loader))))


def main():
    """Plain PyTorch, then devsample, with the same loader."""
    dataset = Regression()
    loader = DataLoader(dataset, batch_size=50, num_workers=2, persistent_workers=True)
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(dataset.inputs, dataset.targets).solution.T)
        loss = torch.stack([evaluate(model, batch) for batch in loader]).mean()  # the pass that does it
    print(f"loss at the trained weights: {loss:.4f}")

    process = multiprocessing.get_context("spawn").Process(target=chain, args=(loader, model))
    try:
        process.start()
    except NotImplementedError as error:
        print(f"plain PyTorch: {type(error).__name__}: {error}")

    result = estimate_learning_coeff_with_summary(
        model,
        loader=loader,
        evaluate=evaluate,
        optimizer_kwargs={"lr": 1e-3, "localization": 1.0},
        num_chains=2,
        num_draws=100,
        cores=2,
        seed=0,
        verbose=False,
    )
    print(f"devsample: {len(result.draws)} draws from {len(result.chains)} chains, λ̂ = {result.llc:.2f}")


if __name__ == "__main__":
    main()
