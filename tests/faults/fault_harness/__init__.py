"""Random lives of a fleet under faults, and what its index must be in the end.

`engine` makes histories and keeps, by brute force, what each engine holds. `virtual` is an event loop whose time is
simulated, `wire` a network in it that loses, repeats, delays and reorders; `play` plays a `plan` of faults on a `fleet`
of real publishers, real followers and a real index. `processes` does it with processes, sockets and brokers.
"""
