"""Every error and warning that devsample raises on purpose.

::

    DevsampleError
    ├── InvalidArgumentError (ValueError)      a value that cannot be used, found before any work
    │   └── FeatureNotAvailableError           a name whose feature this version does not have
    ├── NotPicklableError (TypeError)          something that cannot travel to another process
    ├── ModelError                             the model cannot be carried, or differs in the chain
    ├── EvaluateError                          evaluate failed, or returned no usable loss
    ├── LoaderError                            the data set or its loader failed
    │   └── LoaderWorkerError                  ... in one of its worker processes
    ├── RunFolderError                         a run folder or a file in it cannot be used
    ├── ResultFileError                        a saved result cannot be read or written
    └── RunError                               the run itself failed; carries what was drawn
        ├── ChainProcessError                  a chain process failed or died
        └── AllChainsFailedError               no chain gave a usable trace

    DevsampleWarning (UserWarning)
    ├── UnreliableEstimateWarning              the verdict on an estimate is "reject"
    ├── CallbackStateWarning                   a callback's state did not come back from a process
    └── ReportWarning                          what a callback has reported cannot be kept

A message says what is wrong, where (field path, chain, step), why, and what to do.
All classes can be pickled: they take one message, further values are attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AllChainsFailedError",
    "CallbackStateWarning",
    "ChainProcessError",
    "DevsampleError",
    "DevsampleWarning",
    "EvaluateError",
    "FeatureNotAvailableError",
    "InvalidArgumentError",
    "LoaderError",
    "LoaderWorkerError",
    "ModelError",
    "NotPicklableError",
    "ReportWarning",
    "ResultFileError",
    "RunError",
    "RunFolderError",
    "UnreliableEstimateWarning",
]


class DevsampleError(Exception):
    """Base of every error that devsample raises on purpose."""


class InvalidArgumentError(DevsampleError, ValueError):
    """A value that cannot be used; found before any work starts."""


class FeatureNotAvailableError(InvalidArgumentError):
    """A name that is fixed, but whose feature this version does not have."""


class NotPicklableError(DevsampleError, TypeError):
    """Something that has to travel to another process cannot; the message names its path.

    Attributes:
        culprit: the object that was refused as a whole, if one was.
    """

    def __init__(self, message: str = "", *, culprit: object = None) -> None:
        super().__init__(message)
        self.culprit = culprit


class ModelError(DevsampleError):
    """The model cannot be carried to a chain, or gives another loss there."""


class EvaluateError(DevsampleError):
    """``evaluate`` failed or returned something that holds no loss."""


class LoaderError(DevsampleError):
    """The data set, its factory or the loader built from it failed."""


class LoaderWorkerError(LoaderError):
    """A loader worker process raised, died, or could not send its batch.

    Attributes:
        lost: whether the process is gone, so that a new one may succeed.
    """

    lost: bool = False


class RunFolderError(DevsampleError):
    """A run folder, or a file in it, cannot be used."""


class ResultFileError(DevsampleError):
    """The file of a saved result is damaged, of another kind or of a newer format, or cannot be written."""


class RunError(DevsampleError):
    """A run failed.

    Attributes:
        draws: the draws recorded until then (columns as ``LLCResult.draws``), or None.
    """

    draws: pd.DataFrame | None = None


class ChainProcessError(RunError):
    """A chain process failed or died."""


class AllChainsFailedError(RunError):
    """No chain gave a usable trace, so there is nothing to estimate from."""


class DevsampleWarning(UserWarning):
    """Base of devsample's warnings."""


class UnreliableEstimateWarning(DevsampleWarning):
    """The verdict on an estimate is "reject"; the message gives the reasons."""


class LoaderWarning(DevsampleWarning):
    """The data pipeline works, but not in the way that its settings suggest."""


class LargePayloadWarning(DevsampleWarning):
    """More than 100 MB travel by value to the processes of a run; the message names what they are."""


class CallbackStateWarning(DevsampleWarning):
    """State that a callback built in a chain process could not be brought back."""


class ReportWarning(DevsampleWarning):
    """What a callback has reported cannot be saved, or merged with that of another run; it is named."""
