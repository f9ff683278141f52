"""From a recipe for data to batches on a chain's device."""

from devsample.data.compact import CompactList
from devsample.data.spec import LoaderSpec

__all__ = ["CompactList", "LoaderSpec"]
