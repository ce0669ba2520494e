"""A subscriber that speaks ZMTP 3 over TCP itself: large reads, many messages at once, no object for each."""

from kvist.events.transports.zmtp.splitter import SplitResult, Splitter, StopReason

__all__ = ["SplitResult", "Splitter", "StopReason"]
