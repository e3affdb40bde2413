"""One message layer for engine to cache process, instance to instance, and instance to controller.

From the bottom up:

- :mod:`~kvtier.rpc.frames`: messages as length-prefixed MessagePack, decoded into the types of one protocol;
  the first message of each side has the protocol's version.
- :mod:`~kvtier.rpc.wire`: frames over a non-blocking socket; :mod:`~kvtier.rpc.websocket`: over a WebSocket.
- :mod:`~kvtier.rpc.calls`: requests that await a reply, by ticket.
- :mod:`~kvtier.rpc.endpoint`: either side of a connection in an event loop, and
  :mod:`~kvtier.rpc.keep_alive`: when the other side does not answer.
- :mod:`~kvtier.rpc.client`: the side of a caller that has no event loop and must not block.
- :mod:`~kvtier.rpc.listener`, :mod:`~kvtier.rpc.authentication`: who may connect.

The messages themselves are in ``protocol.py`` of :mod:`kvtier.bridge`, :mod:`kvtier.peers` and
:mod:`kvtier.fleet.member`.
"""
