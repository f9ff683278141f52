"""Where a result comes from: fingerprints that are the same everywhere, and what a run has cost."""

import datetime
import json
import subprocess
import sys

import pytest
import torch

import devsample
from devsample import HMC, LLCResult
from devsample.data.fingerprint import content_hash
from devsample.provenance import weights_hash
from tests import factories

NAMES = ("weights", "data", "evaluate", "masks")


def prints(**changes):
    return factories.estimate(num_draws=2, num_chains=1, **changes).provenance["fingerprints"]


@pytest.fixture(scope="module")
def known():
    return prints()


def test_a_run_is_saved_merged_and_traced_back(tmp_path):
    """The whole way: run, provenance, file, more chains, more draws."""
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    first = factories.estimate(num_draws=20, observables=("distance",))
    origin = first.provenance
    started = datetime.datetime.fromisoformat(origin["started"])
    assert before <= started <= datetime.datetime.now(datetime.UTC)
    assert origin["versions"]["torch"] == torch.__version__
    assert origin["versions"]["devsample"] == devsample.__version__
    assert (origin["seed"], origin["settings"]["lr"]) == (0, 1e-4)
    assert 0 < origin["device_seconds"] <= origin["seconds"]
    assert (origin["gradients"], origin["forwards"]) == (40, 40)
    assert origin["samples_per_gradient"] == 16
    assert json.loads(json.dumps(first.to_dict(), allow_nan=False))["provenance"] == dict(origin)
    assert first.to_dict()["observables"]["distance"]["mean"] > 0
    path = tmp_path / "run.safetensors"
    first.save(path)
    loaded = LLCResult.load(path)
    assert loaded.to_dict() == first.to_dict()
    longer, other = (factories.estimate(num_draws=n, seed=seed) for n, seed in ((30, 0), (20, 1)))
    merged = LLCResult.merge(loaded, longer, other)
    assert sorted(merged.chains["draws"]) == [20, 20, 30, 30]
    assert merged.provenance["gradients"] == 40 + 60 + 40
    assert merged.provenance["fingerprints"] == origin["fingerprints"]
    assert merged["distance/trace"][:2, :20].tolist() == first["distance/trace"].tolist()


def test_other_data_cannot_be_merged():
    one = factories.estimate(num_draws=4)
    other = factories.estimate(num_draws=4, seed=1, spec={"dataset": factories.linear_data(255)})
    with pytest.raises(
        devsample.errors.InvalidArgumentError, match=r"(?s)data: fingerprints .*num_samples: 256"
    ):
        LLCResult.merge(one, other)


def test_fingerprints_are_the_same_in_another_process(known):
    code = (
        "import json; from tests import factories; "
        "print(json.dumps(factories.estimate(num_draws=2, num_chains=1).provenance['fingerprints']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == known
    assert all(len(known[name]) == 64 for name in NAMES)


def shifted():
    model = factories.linear_model()
    with torch.no_grad():
        model.bias.add_(1e-3)
    return model


def other_error(model, batch):
    x, y = batch
    return (model(x) - y).abs().mean()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": shifted()}, "weights"),
        ({"spec": {"batch_size": 8}}, "data"),
        ({"evaluate": other_error}, "evaluate"),
        ({"param_masks": {"weight": True}}, "masks"),
    ],
)
def test_a_fingerprint_says_what_changed(known, changes, name):
    found = prints(**changes)
    assert [one for one in NAMES if found[one] != known[one]] == [name]


def test_settings_are_in_no_fingerprint(known):
    kwargs = {"lr": 1e-5, "localization": 3.0}
    assert prints(optimizer_kwargs=kwargs, seed=5, param_masks={"*": True}) == known


class Unreadable:
    """A loss whose content cannot be read, with a warning on top."""

    def __call__(self, model, batch):
        return factories.squared_error(model, batch)

    def __reduce_ex__(self, protocol):
        import warnings

        warnings.warn("reading", stacklevel=1)
        raise TypeError("no")

    def __getattribute__(self, name):
        if name == "__dict__":
            raise RuntimeError("no")
        return super().__getattribute__(name)


def test_a_fingerprint_that_cannot_be_made_is_none(known):
    assert prints(evaluate=Unreadable()) == known | {"evaluate": None}


def test_a_factory_by_import_path_is_not_imported_for_its_fingerprint(tmp_path, monkeypatch):
    (tmp_path / "elsewhere_.py").write_text("from tests.factories import linear_data as make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"dataset": "elsewhere_:make"}
    assert prints(spec=spec)["data"] is None
    import elsewhere_

    assert elsewhere_.make
    assert len(prints(spec=spec)["data"]) == 64


def test_content_that_takes_too_long():
    with pytest.raises(TimeoutError):
        content_hash([[number] for number in range(1000)], seconds=-1.0)


def test_weights_count_with_buffers_names_and_dtypes():
    model = factories.small_conv_net()
    first = weights_hash(model)
    assert weights_hash(factories.small_conv_net().requires_grad_(False)) == first
    assert weights_hash(torch.nn.DataParallel(model)) == first
    model[1].running_mean.add_(1)
    assert weights_hash(model) != first
    assert weights_hash(factories.small_conv_net().double()) != first


@pytest.mark.parametrize(
    ("changes", "gradients", "forwards", "samples"),
    [
        ({"num_burnin_steps": 5, "num_steps_bw_draws": 2}, 2 * 25, 2 * 10, 16),
        ({"grad_accum_steps": 3}, 3 * 20, 3 * 20, 16),
        ({"baseline": "full"}, 20, 0, 16),
        ({"init_loss": 0.1}, 20, 0, 16),
        ({"spec": {"sampling": "epoch"}}, 20, 2 * 20, 16),
        ({"optimizer_kwargs": {"lr": 1e-4, "control_variate": True}}, 2 * 20, 0, 16),
        ({"sampling_method": HMC, "optimizer_kwargs": {"lr": 1e-5, "num_leapfrog_steps": 4}}, 4 * 20, 0, 256),
    ],
)
def test_gradients_are_counted(changes, gradients, forwards, samples):
    origin = factories.estimate(**changes).provenance
    assert (origin["gradients"], origin["forwards"]) == (gradients, forwards)
    assert origin["samples_per_gradient"] == samples


def test_chains_computed_together_count_their_time_once():
    result = factories.estimate(num_chains=4, chains_per_process=4)
    assert result.provenance["device_seconds"] == pytest.approx(result.chains["seconds"].max())
    alone = factories.estimate(num_chains=4)
    assert alone.provenance["device_seconds"] == pytest.approx(alone.chains["seconds"].sum())
