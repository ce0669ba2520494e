"""Bouncing turns the thousands of fragments of one transfer into one write: gather here, write, scatter there.

`BounceConfig` sizes two regions (off by default) and says what is faster bounced, `RegionAllocator` which parts are
taken. `RegionBounce` does it, a bare `Bounce` never does. Only `kvist.transfer.bounce.copier` touches
tensors.
"""

from kvist.transfer.bounce.bounce import Bounce, BounceStatistics, Lease, Outgoing, RegionBounce, Scattering
from kvist.transfer.bounce.region import BounceConfig, RegionAllocator

__all__ = [
    "Bounce",
    "BounceConfig",
    "BounceStatistics",
    "Lease",
    "Outgoing",
    "RegionAllocator",
    "RegionBounce",
    "Scattering",
]
