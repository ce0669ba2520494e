"""A subscriber that speaks ZMTP 3 over TCP itself: large reads, many messages at once, no object for each.

`connection` is the protocol, without I/O; `wire` has its bytes, and the contract of compiled code that finds messages
among them. `sockets`, `reads` and `subscription` are the asyncio around them; `replay` asks questions, and reads the
replies by the same protocol.
"""

from kvist.events.transports.zmtp.reads import Reads
from kvist.events.transports.zmtp.subscription import ZmtpSubscription
from kvist.events.transports.zmtp.wire import SplitResult, Splitter

__all__ = ["Reads", "SplitResult", "Splitter", "ZmtpSubscription"]
