"""Try policies and fleet sizes before buying: traces, simulated workers, and the router's own policy code between them.

`make_driver` lets any other simulator drive that policy.
"""

from kvist.simulate.driver import Driver, PricedDriver, make_driver

__all__ = ["Driver", "PricedDriver", "make_driver"]
