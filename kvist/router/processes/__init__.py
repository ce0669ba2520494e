"""A router of several processes: fronts take requests, a keeper knows the fleet, and a supervisor starts them all.

    supervisor   holds the port, restarts the others when they die, passes signals on
    keeper       one process: follows streams and workers, writes the index, answers operators
    front        takes requests on the shared port; decides from the index and the board that all map
    messages     what keeper and fronts send each other over a Unix socket

What is read at each decision lies in memory that all map: the index (`kvist.radix`) and the board of loads
(`kvist.router.fleet.board`). The rest is sent. No process waits for another: without a keeper, fronts route by load.
"""
