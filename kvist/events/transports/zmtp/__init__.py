"""A subscriber that speaks ZMTP 3 over TCP itself: large reads, many messages at once, no object for each.

`connection` is the protocol, without I/O, on the bytes in an `inbox`; `splitter` says how messages are found there, so
that compiled code can do it. `link` and `subscription` are the asyncio around them.
"""

from kvist.events.transports.zmtp.splitter import SplitResult, Splitter, StopReason, split
from kvist.events.transports.zmtp.subscription import ZmtpSubscription

__all__ = ["SplitResult", "Splitter", "StopReason", "ZmtpSubscription", "split"]
