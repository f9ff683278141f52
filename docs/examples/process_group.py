"""A process group within reach of a data set whose workers are spawned.

    TypeError: cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object

A data set keeps its configuration, the configuration keeps what is needed for distributed training, and a
spawned worker gets all of it, handles included.

devsample names the handle by its path before any process starts. With the class as a factory nothing of the
data set travels: each chain process and each of its workers makes its own.

    python docs/examples/process_group.py
"""

import warnings

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.errors import NotPicklableError


class Distributed:
    """What a training program keeps for its process: here a world of one."""

    def __init__(self):
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self.world = distributed.group.WORLD


class Sampling:
    """A configuration of which the data set needs one number."""

    def __init__(self):
        self.noise, self.distributed = 0.3, Distributed()


class Regression(Dataset):
    """200 noisy values of a linear function."""

    def __init__(self):
        self.sampling = Sampling()
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(200, 3, generator=generator)
        noise = torch.randn(200, 1, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + self.sampling.noise * noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def evaluate(model, batch):
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def main():
    """Plain PyTorch, then devsample, with the same data set."""
    dataset = Regression()
    loader = DataLoader(dataset, batch_size=50, num_workers=1, multiprocessing_context="spawn")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch 2.13 adds a hint about the start method
            next(iter(loader))
    except TypeError as error:
        print(f"plain PyTorch: {type(error).__name__}: {error}")

    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(dataset.inputs, dataset.targets).solution.T)

    def estimate(spec):
        return estimate_learning_coeff_with_summary(
            model,
            loader_spec=spec,
            evaluate=evaluate,
            optimizer_kwargs={"lr": 1e-3, "localization": 1.0},
            num_chains=2,
            num_draws=100,
            cores=2,
            seed=0,
            verbose=False,
        )

    try:
        estimate(LoaderSpec(dataset, batch_size=50, num_workers=1, multiprocessing_context="spawn"))
    except NotPicklableError as error:
        print(f"devsample, the data set itself: {error}")
    result = estimate(LoaderSpec(Regression, batch_size=50, num_workers=1, multiprocessing_context="spawn"))
    print(
        f"devsample, its class as a factory: {len(result.draws)} draws from {len(result.chains)} chains, "
        f"λ̂ = {result.llc:.2f}"
    )


if __name__ == "__main__":
    main()
