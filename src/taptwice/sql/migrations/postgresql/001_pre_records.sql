-- The finished answers. Rows are inserted once, complete, and never updated.
CREATE TABLE taptwice_records (
    id                  uuid        PRIMARY KEY,   -- 128 bits of the SHA-256 of (account, key)
    created_at          timestamptz NOT NULL,      -- when the work was claimed
    expires_at          timestamptz NOT NULL,      -- may be forgotten from here on, not before
    fingerprint_version smallint    NOT NULL,
    status              smallint    NOT NULL,      -- HTTP status of the answer
    fingerprint         bytea       NOT NULL,      -- SHA-256 of the request
    account             text        NOT NULL,      -- in the clear for support; both empty when only hashes are kept
    key                 text        NOT NULL,
    headers             bytea       NOT NULL,      -- lines of name:value
    body                bytea                      -- bytes as they were sent; null: not kept (tombstone)
);

-- Rows arrive in the order of their expiry, so block ranges are enough to find the old ones.
CREATE INDEX taptwice_records_expires_at ON taptwice_records USING brin (expires_at) WITH (autosummarize = on);

-- Lock the key, then look for its record: two statements, because the second one's snapshot must be
-- younger than the lock (a VOLATILE function takes a new snapshot for each of its statements under
-- READ COMMITTED), and one round trip. The lock ends with the transaction; nothing outlives it.
CREATE FUNCTION taptwice_claim(
    lock bigint, record uuid, wait_ms integer,
    OUT locked boolean, OUT begun double precision, OUT read_only boolean,
    OUT fingerprint_version smallint, OUT fingerprint bytea, OUT status smallint,
    OUT headers bytea, OUT body bytea, OUT created_at double precision
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    callers_timeout text;
BEGIN
    begun := extract(epoch FROM transaction_timestamp());
    read_only := current_setting('transaction_read_only') = 'on';
    locked := pg_try_advisory_xact_lock(lock);
    IF NOT locked AND wait_ms > 0 THEN
        callers_timeout := current_setting('lock_timeout');
        PERFORM set_config('lock_timeout', wait_ms::text, true);
        BEGIN
            PERFORM pg_advisory_xact_lock(lock);
            locked := true;
        EXCEPTION WHEN lock_not_available THEN
            NULL;  -- waited in vain: the caller's transaction is as it was
        END;
        PERFORM set_config('lock_timeout', callers_timeout, true);
    END IF;
    IF locked THEN
        SELECT r.fingerprint_version, r.fingerprint, r.status, r.headers, r.body, extract(epoch FROM r.created_at)
          INTO taptwice_claim.fingerprint_version, taptwice_claim.fingerprint, taptwice_claim.status,
               taptwice_claim.headers, taptwice_claim.body, taptwice_claim.created_at
          FROM taptwice_records r WHERE r.id = record;
    END IF;
END
$$;

-- Save a finished answer in the transaction that claimed its key, and in no other: false, and nothing is saved.
-- A function, so that it is planned once a session whichever way a driver sends it. The two moments are compared
-- as text: where extra_float_digits is 0, a driver that reads text got a shortened one. Who cannot read the
-- result, because it is sent in one message with COMMIT, finds record and claim in the setting taptwice.torn.
CREATE FUNCTION taptwice_save(
    begun double precision, record uuid, pretended_now double precision, window_s double precision,
    fingerprint_version smallint, status smallint, fingerprint bytea,
    account text, key text, headers bytea, body bytea
) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    moment timestamptz := transaction_timestamp();
BEGIN
    IF CAST(CAST(extract(epoch FROM moment) AS double precision) AS text) <> CAST(begun AS text) THEN
        PERFORM set_config('taptwice.torn', record::text || '/' || begun::text, false);
        RETURN false;
    END IF;
    IF pretended_now IS NOT NULL THEN
        moment := to_timestamp(pretended_now);
    END IF;
    INSERT INTO taptwice_records
    VALUES (record, moment, moment + make_interval(secs => window_s), fingerprint_version, status, fingerprint,
            account, key, headers, body);
    RETURN true;
END
$$;

-- Save an answer in a transaction that holds no claim; false, and nothing is saved, when the key has a record.
CREATE FUNCTION taptwice_save_late(
    record uuid, pretended_now double precision, window_s double precision,
    fingerprint_version smallint, status smallint, fingerprint bytea,
    account text, key text, headers bytea, body bytea
) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    moment timestamptz := coalesce(to_timestamp(pretended_now), transaction_timestamp());
BEGIN
    INSERT INTO taptwice_records
    VALUES (record, moment, moment + make_interval(secs => window_s), fingerprint_version, status, fingerprint,
            account, key, headers, body)
    ON CONFLICT (id) DO NOTHING;
    RETURN FOUND;
END
$$;

-- Forget one batch of records whose window is over; one row comes back for each.
CREATE FUNCTION taptwice_sweep(pretended_now double precision, batch integer)
RETURNS SETOF boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    moment timestamptz := coalesce(to_timestamp(pretended_now), clock_timestamp());
BEGIN
    RETURN QUERY
    DELETE FROM taptwice_records WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM taptwice_records WHERE expires_at < moment LIMIT batch FOR UPDATE SKIP LOCKED))
    RETURNING true;
END
$$;

-- What has become of the partitions: nothing, in one table. `taptwice init --partition-by day` replaces this
-- function, and those above.
CREATE FUNCTION taptwice_partitions(pretended_now double precision)
RETURNS TABLE (change text, partition text) LANGUAGE sql STABLE AS $$
    SELECT CAST(NULL AS text), CAST(NULL AS text) WHERE false
$$;
