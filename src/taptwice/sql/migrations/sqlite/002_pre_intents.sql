-- What a client means to have done elsewhere, and the key under which it asks. Each state is read off the times.
CREATE TABLE taptwice_intents (
    name        TEXT NOT NULL PRIMARY KEY,  -- the program's own name for what it wants: one name, one effect
    key         TEXT NOT NULL,              -- the idempotency key that is sent
    fingerprint BLOB,                       -- SHA-256 of the request; null before it is first sent
    made_at     REAL NOT NULL,              -- seconds since 1970, as all times here
    sent_at     REAL,                       -- before the first byte that may have been sent
    done_at     REAL,                       -- when the final answer was kept
    dropped_at  REAL,                       -- when it was given up: it is never sent again
    status      INTEGER,                    -- HTTP status of the answer
    headers     BLOB,                       -- lines of name:value; null when there is none
    body        BLOB                        -- null: not kept
);

CREATE INDEX taptwice_intents_open ON taptwice_intents (made_at) WHERE done_at IS NULL AND dropped_at IS NULL;
