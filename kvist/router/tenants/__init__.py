"""Tenants: a tenant is the owner of a key.

    keys       finds a request's tenant by the SHA-256 of its key, in a file or by asking an `authoriser`
    tenant     what a tenant may do, and the file that says so
    isolation  keeps tenants from seeing into each other's caches
    limits     bounds a tenant's running requests, and its requests and tokens a minute
    rows       the state of tenants that the processes of a router share
    accounts   what each tenant has used

Where no tenants are configured, all requests are of one that may do everything.
"""
