"""Who the workers are: found, asked what they serve, checked, and how much each has to do.

`fleet` holds them all and `worker` is one; `identity` is what it says of itself, `health` whether it may be used,
`load` what it was given and has not ended.
"""
