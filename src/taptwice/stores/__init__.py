"""How a kind of storage keeps records. Plans only: no I/O, no driver.

A store with the **joined** capability answers these, inside a transaction that somebody else began and
will commit. It never begins, commits or rolls back, and never catches a database error:

- ``claim(keyed, wait, before, after)``: lock the key and look for its record, in one `Together` with the
  commands that stand before and after it, so that a driver can send all of them in one round trip;
- ``insert(entry, before, after)``: save a finished answer; False when the transaction is not the one
  that claimed;
- ``insert_late(entry)``: the same without a claim; False when the key has a record by now;
- ``look(keyed)``: the record, without a lock.
"""
