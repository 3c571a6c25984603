"""Messages between two ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from roundelay.communicator import ANY
from roundelay.torch._calls import Calls
from roundelay.torch._tensors import into, memory, plain
from roundelay.torch._work import Work


class Messages(Calls):
    """Sends and receives; each goes on by itself, and in order with those of the same tag."""

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor."""
        (tensor,) = tensors
        buffer = memory("send", plain("send", tensor).contiguous())
        return self._message("send", self.comm.start.send(buffer, dst, tag), None, tensor)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next message of a rank."""
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next message of any rank."""
        return self._receive(tensors, ANY, tag)

    def _receive(self, tensors: Sequence[Tensor], src: Any, tag: int) -> Work:
        (tensor,) = tensors
        buffer, after = into("recv", tensor)
        return self._message("recv", self.comm.start.recv(buffer, src, tag), after, tensor)

    def _message(self, name: str, message: Any, after: Any, tensor: Tensor) -> Work:
        with self._shown(name, [tensor]):
            work = Work(name, [(message, after)], [tensor], on_error=self._say_who)
        return self._kept(self._remembered(work))
