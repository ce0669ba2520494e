"""Bouncing turns the thousands of fragments of one transfer into one write: gather here, write, scatter there.

`BounceConfig` sizes two regions (off by default) and says what is faster bounced, `RegionAllocator` which parts are
taken. `RegionBounce` does it, `NullBounce` never does; both are a `Bounce`. Only `kvist.transfer.bounce.copier` touches
tensors.
"""

from kvist.transfer.bounce.allocator import RegionAllocator
from kvist.transfer.bounce.base import Bounce, BounceStatistics, Lease, NullBounce, Outgoing, Scattering
from kvist.transfer.bounce.bounce import RegionBounce
from kvist.transfer.bounce.region import BounceConfig

__all__ = [
    "Bounce",
    "BounceConfig",
    "BounceStatistics",
    "Lease",
    "NullBounce",
    "Outgoing",
    "RegionAllocator",
    "RegionBounce",
    "Scattering",
]
