"""Who the workers are: how they are found, what they serve, whether they are healthy, and how much each has to do.

`fleet` holds them all and `worker` is one; `membership` adds, checks and removes them, `discovery` finds who is wanted,
`identity` is what each says of itself, `load` the requests that it was given and that have not ended.
"""
