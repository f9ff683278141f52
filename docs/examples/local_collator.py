"""A collate function that is defined inside another function, with spawned workers.

    AttributeError: Can't pickle local object 'Trainer.__init__.<locals>.data_collator'

Plain pickle stores a function as the name of its module and its own, and a local function cannot be found by
name. devsample sends functions that cannot be imported by value, to the chain processes and on to their
loader workers.

    python docs/examples/local_collator.py
"""

import warnings

import torch
from torch.utils.data import DataLoader, Dataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary


class Sentences(Dataset):
    """200 rows of different lengths: numbers, and a noisy sum of them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randn(2 + index % 4, generator=generator) for index in range(200)]
        self.noise = 0.3 * torch.randn(200, generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"row": self.rows[index], "target": self.rows[index].sum() + self.noise[index]}


class Trainer:
    """Keeps a collator that knows its settings."""

    def __init__(self, width):
        def data_collator(features):
            rows = [torch.nn.functional.pad(one["row"], (0, width - len(one["row"]))) for one in features]
            return {"rows": torch.stack(rows), "targets": torch.stack([one["target"] for one in features])}

        self.data_collator = data_collator


def evaluate(model, batch):
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch["rows"]).squeeze(1), batch["targets"])


def main():
    """Plain PyTorch, then devsample, with the same data set and collator."""
    dataset, trainer = Sentences(), Trainer(width=5)
    for method in ("spawn", "forkserver"):
        loader = DataLoader(
            dataset,
            batch_size=50,
            num_workers=1,
            collate_fn=trainer.data_collator,
            multiprocessing_context=method,
        )
        try:
            with warnings.catch_warnings(action="ignore"):  # torch 2.13 adds a hint about the start method
                next(iter(loader))
        except AttributeError as error:
            print(f"plain PyTorch, {method}: {type(error).__name__}: {error}")

    model = torch.nn.Linear(5, 1, bias=False)
    everything = trainer.data_collator([dataset[index] for index in range(len(dataset))])
    with torch.no_grad():
        solution = torch.linalg.lstsq(everything["rows"], everything["targets"].unsqueeze(1)).solution
        model.weight.copy_(solution.T)
    result = estimate_learning_coeff_with_summary(
        model,
        loader_spec=LoaderSpec(
            dataset,
            batch_size=50,
            num_workers=1,
            collate_fn=trainer.data_collator,
            multiprocessing_context="spawn",
        ),
        evaluate=evaluate,
        optimizer_kwargs={"lr": 1e-3, "localization": 1.0},
        num_chains=2,
        num_draws=100,
        cores=2,
        seed=0,
        verbose=False,
    )
    print(
        f"devsample, spawn: {len(result.draws)} draws from {len(result.chains)} chains, λ̂ = {result.llc:.2f}"
    )


if __name__ == "__main__":
    main()
