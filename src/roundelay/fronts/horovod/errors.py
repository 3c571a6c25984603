"""What goes wrong in one named operation, or can't be done, by Horovod's names where it has any."""

from __future__ import annotations

from roundelay.errors import CommunicationError, InvalidArgumentError

__all__ = ["HorovodInternalError", "NotInitializedError", "UnsupportedOperationError"]


class HorovodInternalError(CommunicationError):
    """One operation failed, on every rank that submitted it; others go on."""


class NotInitializedError(InvalidArgumentError):
    """A call before `hvd.init()`, or after `hvd.shutdown()`."""

    def __init__(self, call: str) -> None:
        super().__init__(f"hvd.{call} needs hvd.init() first; after hvd.shutdown(), once more.")


class UnsupportedOperationError(InvalidArgumentError, NotImplementedError):
    """What Horovod's API has a name for, but can't be done here."""
