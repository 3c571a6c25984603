"""`optimizer.state` where servers update: it is not here, and says so instead of looking empty."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

import torch

from roundelay.errors import InvalidArgumentError

State = dict[str, Any]  # Any: what an optimizer keeps for a parameter


class StateOnServers(MutableMapping[torch.Tensor, State]):
    """Stands for the state of a prepared optimizer; what it keeps of frozen parameters is here."""

    def __init__(self, names: dict[int, str], here: MutableMapping[torch.Tensor, State]) -> None:
        self._names, self._here = names, here

    def __repr__(self) -> str:
        return "<the optimizer's state, which is on the parameter servers>"

    def _refuse(self, of: str = "") -> NoReturn:
        raise InvalidArgumentError(
            f"The optimizer's state{of} is on the parameter servers, which update the parameters, "
            f"so it can be neither read nor changed in optimizer.state. All workers together may "
            f"call optimizer.state_dict() for the whole of it and optimizer.load_state_dict(…) to "
            f"change it; or use ParameterServer(update='worker')."
        )

    def _own(self, tensor: torch.Tensor) -> MutableMapping[torch.Tensor, State]:
        if id(tensor) in self._names:
            self._refuse(f" of {self._names[id(tensor)]}")
        return self._here

    def __getitem__(self, tensor: torch.Tensor) -> State:
        return self._own(tensor)[tensor]

    def __setitem__(self, tensor: torch.Tensor, state: State) -> None:
        self._own(tensor)[tensor] = state

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._own(tensor)[tensor]

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor in self._own(tensor)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._refuse()

    def __len__(self) -> int:  # noqa: PLE0303 - it has none
        self._refuse()

    def clear(self) -> None:
        """Refuse it: the state of a new optimizer is what it would have to be."""
        self._refuse()
