"""One message layer for engine to cache process, instance to instance, and instance to controller.

From the bottom up:

- :mod:`~kvtier.rpc.frames`: messages as length-prefixed MessagePack, decoded into the types of one protocol.
- :mod:`~kvtier.rpc.wire`: frames over a non-blocking socket; :mod:`~kvtier.rpc.websocket` and
  :mod:`~kvtier.rpc.websocket_server`: over a WebSocket.
- :mod:`~kvtier.rpc.calls`: requests that await a reply, by ticket.
- :mod:`~kvtier.rpc.greeting`: the first message of each side, with the protocol version.
- :mod:`~kvtier.rpc.endpoint`: either side of a connection in an event loop, and
  :mod:`~kvtier.rpc.client`: the side of a caller that has no event loop and must not block.
- :mod:`~kvtier.rpc.keep_alive` and :mod:`~kvtier.rpc.health`: when the other side does not answer.
- :mod:`~kvtier.rpc.listener`, :mod:`~kvtier.rpc.authentication`: who may connect.

The messages themselves are in ``protocol.py`` of :mod:`kvtier.bridge`, :mod:`kvtier.peers` and
:mod:`kvtier.fleet.member`.
"""
