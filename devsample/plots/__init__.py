"""Pictures of a result. Figures are made directly, so pyplot and its state are never touched.

Every function takes a result and returns a matplotlib Figure, which ``path=`` saves; the ending says the
format. Chains that are left out of the estimate are shown as such and set no scale.
"""

from devsample.plots.chains import plot_chains
from devsample.plots.distance import plot_distance
from devsample.plots.mixing import plot_autocorrelation, plot_ranks
from devsample.plots.overview import dashboard
from devsample.plots.traces import plot_trace

__all__ = [
    "dashboard",
    "plot_autocorrelation",
    "plot_chains",
    "plot_distance",
    "plot_ranks",
    "plot_trace",
]
