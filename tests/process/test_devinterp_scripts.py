"""Scripts written for devinterp 1.x run once their import line is changed."""

import json
import os
import subprocess
import sys
import textwrap

TIMEOUT = 120

# What such scripts have in common: data, a trained model, and the two ways to give a loss.
PREAMBLE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 4)
y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.3 * torch.randn(512, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = torch.nn.Linear(4, 1)
solution = torch.linalg.lstsq(torch.hstack([x, torch.ones(512, 1)]), y).solution
with torch.no_grad():
    model.weight.copy_(solution[:4].T)
    model.bias.copy_(solution[4])

def evaluate(model, batch):
    x, y = batch
    output = model(x)
    return torch.nn.functional.mse_loss(output, y), {"output": output}
"""

KEYWORDS = """
from devsample.compat.devinterp import SGLD, estimate_learning_coeff_with_summary

results = estimate_learning_coeff_with_summary(
    model,
    loader=loader,
    evaluate=evaluate,
    sampling_method=SGLD,
    optimizer_kwargs=dict(lr=1e-3, nbeta=80.0, localization=1.0),
    num_chains=3,
    num_draws=200,
    num_burnin_steps=50,
    device="cpu",
    cores=CORES,
    seed=1,
    online=False,
)
means = [results[f"llc-chain/{chain}"] for chain in range(3)]
assert abs(sum(means) / 3 - results["llc/mean"]) < 1e-9
assert results["llc/std"] > 0
assert results["loss/trace"].shape == (3, 200)
assert isinstance(results, dict) or dict(results)
report = {"llc": float(results["llc/mean"]), "losses": results["loss/trace"].tolist()}
"""

POSITIONAL = """
from devsample.compat.devinterp import SGLD, default_nbeta, estimate_learning_coeff

optimizer_kwargs = {"lr": 1e-3, "nbeta": default_nbeta(loader), "localization": 1.0}
llc = estimate_learning_coeff(
    model, loader, [], evaluate, SGLD, optimizer_kwargs, 400, 4, 50, 1, cores=CORES, seed=1
)
assert optimizer_kwargs["nbeta"] == default_nbeta(64)
report = {"llc": llc}
"""

LEFT_OUT = """
from devsample.compat.devinterp import SGLD, estimate_learning_coeff_with_summary, evaluate_mse

results = estimate_learning_coeff_with_summary(
    model,
    loader,
    evaluate=evaluate_mse,
    sampling_method=SGLD,
    optimizer_kwargs=dict(lr=LR, localization=1.0),
    num_chains=2,
    num_draws=200,
    num_burnin_steps=100,
    cores=CORES,
    seed=1,
)
report = {"llc": results["llc/mean"], "summary": results.summary()}
"""

ONLINE = """
from devsample.compat.devinterp import SGLD, estimate_learning_coeff_with_summary

losses = []
with torch.no_grad():
    init_loss = sum(evaluate(model, batch)[0].item() for batch in loader) / len(loader)
results = estimate_learning_coeff_with_summary(
    model, loader, evaluate=evaluate, sampling_method=SGLD, num_chains=2, num_draws=50, seed=1,
    optimizer_kwargs=dict(lr=1e-3, nbeta=80.0), init_loss=init_loss, cores=CORES, online=True,
)
assert results["init_loss"] == init_loss
assert results["llc/means"].shape == results["llc/stds"].shape == (50,)
assert results["llc/trace"].shape == results["loss/trace"].shape == (2, 50)
expected = 80.0 * (results["loss/trace"].mean(axis=1) - init_loss)
assert abs(results["llc/trace"][:, -1] - expected).max() < 1e-9
report = {"llc": results["llc/mean"]}
"""

SAMPLE = """
import numpy as np
from devsample.compat.devinterp import SGLD, sample

class Losses:
    def __init__(self):
        self.losses = np.zeros((2, 30))
    def __call__(self, chain, draw, loss, **_):
        self.losses[chain, draw] = loss
    def sample(self):
        return {"losses": self.losses}

found = sample(
    model, loader, [Losses()], evaluate=evaluate, sampling_method=SGLD, cores=CORES, seed=1,
    optimizer_kwargs=dict(lr=1e-3, nbeta=80.0), num_chains=2, num_draws=30, verbose=False,
)
assert (found["losses"] > 0).all()
report = {"losses": found["losses"].tolist()}
"""


def run_script(tmp_path, body, **values):
    """Run a script in a fresh process; returns its ``report`` and what it printed on stderr."""
    for name, value in values.items():
        body = body.replace(name, repr(value))
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(PREAMBLE + body) + '\nimport json; print("\\n" + json.dumps(report))')
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_keywords_and_the_same_draws_in_one_and_two_processes(tmp_path):
    one, _ = run_script(tmp_path, KEYWORDS, CORES=1)
    two, shown = run_script(tmp_path, KEYWORDS, CORES=2)
    assert one == two
    assert 1.5 < one["llc"] < 3.5  # 5/2 for five regular parameters, a little less with localization
    assert "Warning" not in shown


def test_positional_arguments_and_devinterps_default_nbeta(tmp_path):
    report, shown = run_script(tmp_path, POSITIONAL, CORES=1)
    assert 1.3 < report["llc"] < 3.5
    assert "Warning" not in shown


def test_nbeta_left_out_is_n_over_log_n_with_devinterps_value_beside_it(tmp_path):
    report, shown = run_script(tmp_path, LEFT_OUT, CORES=2, LR=2e-4)
    assert "82.07 = n/ln n, n = 512" in report["summary"]
    assert "devinterp's rule: 15.39" in report["summary"]
    assert 'nbeta="batch"' in shown
    assert "too high" not in report["summary"]


def test_a_step_too_large_for_n_over_log_n_names_the_one_that_fits(tmp_path):
    report, _ = run_script(tmp_path, LEFT_OUT, CORES=1, LR=1e-2)
    summary = " ".join(report["summary"].split())
    assert "too high" in summary
    assert "lower lr from 0.01 to 0.00" in summary
    assert 'nbeta="batch"' in summary.split("too high")[1]


def test_a_given_init_loss_and_running_estimates(tmp_path):
    run_script(tmp_path, ONLINE, CORES=1)


def test_sample_returns_what_the_callbacks_report(tmp_path):
    report, _ = run_script(tmp_path, SAMPLE, CORES=2)
    assert len(report["losses"]) == 2
