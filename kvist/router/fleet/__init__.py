"""Who the workers are: found, asked what they serve, checked, and how much each has to do.

`fleet` holds them all and `worker` is one; `membership` has them come, be checked and go, `discovery` says who is
wanted, `identity` is what each says of itself, `load` what it was given and has not ended.
"""
