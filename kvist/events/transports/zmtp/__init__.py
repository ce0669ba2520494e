"""A subscriber that speaks ZMTP 3 over TCP itself: large reads, many messages at once, no object for each.

`connection` is the protocol, without I/O, on the bytes in an `inbox`; `wire` has the bytes, and what compiled code that
finds messages among them must keep to. `link` and `subscription` are the asyncio around them.
"""

from kvist.events.transports.zmtp.subscription import ZmtpSubscription
from kvist.events.transports.zmtp.wire import SplitResult, Splitter, StopReason

__all__ = ["SplitResult", "Splitter", "StopReason", "ZmtpSubscription"]
