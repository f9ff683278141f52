"""Generators, or tensors made while pickling, within reach of a data set whose workers are spawned.

    ValueError: bad value(s) in fds_to_keep

`pickle.dumps` of such a data set is fine. torch sends the tensors of a worker's arguments as file descriptors
of shared memory. Those of tensors that exist only while they are pickled (the state of a `torch.Generator`,
what a `__getstate__` makes) are closed before the worker starts, and their numbers are used again for its
pipes: the list of descriptors to keep then names one twice.

devsample sends bytes, in which no descriptor rides along.

    python docs/examples/fds_to_keep.py
"""

import warnings

import torch
from torch.utils.data import DataLoader, Dataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary


class Regression(Dataset):
    """200 noisy values of a linear function, and two generators that the program keeps with them."""

    def __init__(self):
        self.generators = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        self.inputs = torch.randn(200, 3, generator=self.generators[0])
        noise = torch.randn(200, 1, generator=self.generators[1])
        self.targets = self.inputs.sum(1, keepdim=True) + 0.3 * noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Packed(Regression):
    """The same without generators, rounded to half the size when it travels."""

    def __getstate__(self):
        return {"inputs": self.inputs.half(), "targets": self.targets.half()}

    def __setstate__(self, state):
        self.inputs, self.targets = state["inputs"].float(), state["targets"].float()


def evaluate(model, batch):
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def main():
    """Plain PyTorch, then devsample, with the same data sets."""
    for kind in (Regression, Packed):
        loader = DataLoader(kind(), batch_size=50, num_workers=1, multiprocessing_context="spawn")
        try:
            with warnings.catch_warnings(action="ignore"):  # torch 2.13 adds a hint about the start method
                next(iter(loader))
        except ValueError as error:
            print(f"plain PyTorch, {kind.__name__}: {type(error).__name__}: {error}")

    dataset = Regression()
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(dataset.inputs, dataset.targets).solution.T)
    result = estimate_learning_coeff_with_summary(
        model,
        loader_spec=LoaderSpec(dataset, batch_size=50, num_workers=1, multiprocessing_context="spawn"),
        evaluate=evaluate,
        optimizer_kwargs={"lr": 1e-3, "localization": 1.0},
        num_chains=2,
        num_draws=100,
        cores=2,
        seed=0,
        verbose=False,
    )
    print(
        f"devsample, Regression: {len(result.draws)} draws from {len(result.chains)} chains, "
        f"λ̂ = {result.llc:.2f}"
    )
    spec = LoaderSpec(Packed(), batch_size=50, num_workers=1, multiprocessing_context="spawn")
    batches = [tuple(inputs.shape) for inputs, _ in spec.build(seed=0, num_steps=2)]
    print(f"devsample, Packed: batches of {batches} from a spawned worker")


if __name__ == "__main__":
    main()
