"""The hot loops of the index: plain loops over arrays of records, which Numba compiles.

`layout` says what the arrays are. Functions that Python calls take the arrays; helpers take a record, which costs as
little as a pointer where an array costs a reference count. **Trap:** an int64 with a uint64 becomes a float64, so all
that is combined with a hash is a `np.uint64`. `table` finds and places rows, `sets` interns who holds them, `blocks`
stores and removes, `matching` looks a prompt up, `housekeeping` goes over all rows in slices. Other folders may build
on the functions that have no underscore; their `jit_for` must then name this folder, too.
"""
