"""Who asks: a tenant is whom a key belongs to.

    keys       which tenant a request is of, by the SHA-256 of its key, as a file or an `authoriser` knows
    tenant     what a tenant may do, and the file that says so
    isolation  caches that tenants cannot see into
    limits     what it may ask at a time and in a minute
    rows       what the processes of a router know of it together
    accounts   what each has used

Where nothing is said of tenants, all requests are of one that may do everything.
"""
