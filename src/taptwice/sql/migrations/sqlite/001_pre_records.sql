-- The finished answers. Rows are inserted once, complete, and never updated.
CREATE TABLE taptwice_records (
    id                  BLOB    NOT NULL PRIMARY KEY,  -- 128 bits of the SHA-256 of (account, key)
    created_at          REAL    NOT NULL,              -- when the work was claimed; seconds since 1970
    expires_at          REAL    NOT NULL,              -- may be forgotten from here on, not before
    fingerprint_version INTEGER NOT NULL,
    status              INTEGER NOT NULL,              -- HTTP status of the answer
    fingerprint         BLOB    NOT NULL,              -- SHA-256 of the request
    account             TEXT    NOT NULL,              -- in the clear for support; both empty when only hashes are kept
    key                 TEXT    NOT NULL,
    headers             BLOB    NOT NULL,              -- lines of name:value
    body                BLOB                           -- bytes as they were sent; null: not kept (tombstone)
);

CREATE INDEX taptwice_records_expires_at ON taptwice_records (expires_at);
