-- What a client means to have done elsewhere, and the key under which it asks. Each state is read off the times.
CREATE TABLE taptwice_intents (
    name        text        NOT NULL PRIMARY KEY,  -- the program's own name for what it wants: one name, one effect
    key         text        NOT NULL,              -- the idempotency key that is sent
    fingerprint bytea,                             -- SHA-256 of the request; null before it is first sent
    made_at     timestamptz NOT NULL,
    sent_at     timestamptz,                       -- before the first byte that may have been sent
    done_at     timestamptz,                       -- when the final answer was kept
    dropped_at  timestamptz,                       -- when it was given up: it is never sent again
    status      smallint,                          -- HTTP status of the answer
    headers     bytea,                             -- lines of name:value; null when there is none
    body        bytea                              -- null: not kept
);

CREATE INDEX taptwice_intents_open ON taptwice_intents (made_at) WHERE done_at IS NULL AND dropped_at IS NULL;
