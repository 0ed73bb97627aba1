-- taptwice_records, partitioned by the day (UTC) on which its records expire. A day whose end has passed is
-- dropped, whatever the windows of its records were, where one table would delete them one by one.
--
-- No primary key can span the partitions without the day in it, so none can see a key of another day. What keeps
-- a key from having two records is the lock: the claim looks into every partition behind it. Answers saved late,
-- without the claim's lock, are kept apart by a second lock, which is taken by every save.

-- The table that is there becomes the DEFAULT partition, with the rows that it has: nothing is copied. Days of
-- which it holds rows stay in it until they have expired.
DO $$
DECLARE
    callers_timeout text := current_setting('lock_timeout');
    granted text;
BEGIN
    -- Whoever waits for this lock keeps every claim waiting behind it.
    PERFORM set_config('lock_timeout', '5s', true);
    LOCK TABLE taptwice_records IN ACCESS EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', callers_timeout, true);
    ALTER TABLE taptwice_records DROP CONSTRAINT taptwice_records_pkey;
    ALTER TABLE taptwice_records RENAME TO taptwice_records_default;
    CREATE TABLE taptwice_records (
        LIKE taptwice_records_default INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (id, expires_at)
    ) PARTITION BY RANGE (expires_at);
    ALTER TABLE taptwice_records ATTACH PARTITION taptwice_records_default DEFAULT;
    FOR granted IN
        SELECT 'ALTER TABLE taptwice_records OWNER TO ' || CAST(CAST(relowner AS regrole) AS text)
          FROM pg_class WHERE oid = CAST('taptwice_records_default' AS regclass)
        UNION ALL
        SELECT 'GRANT ' || privilege_type || ' ON taptwice_records TO '
               || CASE grantee WHEN 0 THEN 'PUBLIC' ELSE CAST(CAST(grantee AS regrole) AS text) END
               || CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
          FROM pg_class CROSS JOIN aclexplode(relacl)
         WHERE oid = CAST('taptwice_records_default' AS regclass) AND grantee <> relowner
    LOOP
        EXECUTE granted;
    END LOOP;
    EXECUTE 'CREATE FUNCTION taptwice_isolation() RETURNS text LANGUAGE sql IMMUTABLE AS '
        || quote_literal('SELECT ' || quote_literal(
               CASE current_setting('default_transaction_isolation')
               WHEN 'serializable' THEN 'serializable' ELSE 'read committed' END));
END
$$;

-- The one isolation level of all who claim: SERIALIZABLE if that is the default of the session that partitions the
-- table, else READ COMMITTED. A snapshot that is older than the lock may not show the record in another partition,
-- and no primary key stands behind the look-up. READ COMMITTED has no such snapshots. SERIALIZABLE notices, but
-- only what other SERIALIZABLE transactions did; REPEATABLE READ notices nothing.
CREATE FUNCTION taptwice_refuse_isolation() RETURNS void LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'TT001', MESSAGE =
        'taptwice_records is partitioned, and this transaction, which is '
        || upper(current_setting('transaction_isolation')) || ', may not see that a key was used: set its isolation '
        || 'level to ' || upper(taptwice_isolation()) || ', as that of all who claim';
END
$$;

-- As in one table, but for the isolation level.
CREATE OR REPLACE FUNCTION taptwice_claim(
    lock bigint, record uuid, wait_ms integer,
    OUT locked boolean, OUT begun double precision, OUT read_only boolean,
    OUT fingerprint_version smallint, OUT fingerprint bytea, OUT status smallint,
    OUT headers bytea, OUT body bytea, OUT created_at double precision
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    callers_timeout text;
BEGIN
    IF current_setting('transaction_isolation') <> taptwice_isolation() THEN
        PERFORM taptwice_refuse_isolation();
    END IF;
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

-- As in one table; what the primary key did there is done by the second lock and another look behind it.
CREATE OR REPLACE FUNCTION taptwice_save(
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
    IF NOT taptwice_save_late(record, pretended_now, window_s, fingerprint_version, status, fingerprint,
                              account, key, headers, body) THEN
        RAISE unique_violation USING MESSAGE = 'this key has a record in a partition of taptwice_records';
    END IF;
    RETURN true;
END
$$;

-- The second lock is on another hash than the claim's, so that it never waits for somebody's work, only for the
-- end of a transaction that has saved. As in taptwice_claim the look comes in a statement of its own.
CREATE OR REPLACE FUNCTION taptwice_save_late(
    record uuid, pretended_now double precision, window_s double precision,
    fingerprint_version smallint, status smallint, fingerprint bytea,
    account text, key text, headers bytea, body bytea
) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    moment timestamptz := coalesce(to_timestamp(pretended_now), transaction_timestamp());
BEGIN
    IF current_setting('transaction_isolation') <> taptwice_isolation() THEN
        PERFORM taptwice_refuse_isolation();
    END IF;
    PERFORM pg_advisory_xact_lock(uuid_hash_extended(record, 0));
    IF EXISTS (SELECT FROM taptwice_records r WHERE r.id = record) THEN
        RETURN false;
    END IF;
    INSERT INTO taptwice_records
    VALUES (record, moment, moment + make_interval(secs => window_s), fingerprint_version, status, fingerprint,
            account, key, headers, body);
    RETURN true;
END
$$;

-- The role that owns the table, or an error: it alone may make partitions and drop them.
CREATE FUNCTION taptwice_owner() RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    owner oid := relowner FROM pg_class WHERE oid = CAST('taptwice_records' AS regclass);
BEGIN
    IF NOT pg_has_role(owner, 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'TT001', MESSAGE =
            'taptwice_records is partitioned, and swept by its owner alone: sweep as the role '
            || CAST(CAST(owner AS regrole) AS text);
    END IF;
    RETURN CAST(owner AS regrole);
END
$$;

-- Rows are deleted from the DEFAULT partition alone: the others are dropped.
CREATE OR REPLACE FUNCTION taptwice_sweep(pretended_now double precision, batch integer)
RETURNS SETOF boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    moment timestamptz := coalesce(to_timestamp(pretended_now), clock_timestamp());
BEGIN
    PERFORM taptwice_owner();
    RETURN QUERY
    DELETE FROM taptwice_records_default WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM taptwice_records_default WHERE expires_at < moment LIMIT batch FOR UPDATE SKIP LOCKED))
    RETURNING true;
END
$$;

-- Make the partitions of the coming days and drop those whose end has passed. The coming days are today, the two
-- that follow, and on to the day after the last one that has rows, for at most 31 days: so they follow the longest
-- window, if a sweep comes once a day. A day of which the DEFAULT partition holds rows stays in it.
CREATE OR REPLACE FUNCTION taptwice_partitions(pretended_now double precision)
RETURNS TABLE (change text, partition text) LANGUAGE plpgsql VOLATILE
SET timezone = 'UTC' SET datestyle = 'ISO'
SET lock_timeout = '1s'  -- for so long all claims may have to wait behind this
AS $$
DECLARE
    moment timestamptz := coalesce(to_timestamp(pretended_now), clock_timestamp());
    today date := CAST(moment AS date);
    latest date := today + 1;
    covered tstzrange[] := '{}';
    past text[] := '{}';
    coming date[];
    each record;
    owner text := taptwice_owner();
    home text;
    day date;
BEGIN
    FOR each IN
        SELECT CAST(CAST(inhrelid AS regclass) AS text) AS name,
               tstzrange(CAST(bounds[1] AS timestamptz), CAST(bounds[2] AS timestamptz)) AS span
          FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
         CROSS JOIN regexp_match(pg_get_expr(relpartbound, inhrelid), '\(''(.+)''\) TO \(''(.+)''\)') AS bounds
         WHERE inhparent = CAST('taptwice_records' AS regclass) AND bounds IS NOT NULL
    LOOP
        covered := covered || each.span;
        IF upper(each.span) <= moment THEN
            past := past || each.name;
        ELSIF lower(each.span) > moment THEN
            IF EXISTS (SELECT FROM taptwice_records
                        WHERE expires_at >= lower(each.span) AND expires_at < upper(each.span)) THEN
                latest := greatest(latest, CAST(lower(each.span) AS date));
            END IF;
        END IF;
    END LOOP;
    SELECT greatest(latest, CAST(max(expires_at) AS date)) INTO latest FROM taptwice_records_default
     WHERE expires_at >= today + 2 AND expires_at < today + 32;
    SELECT array_agg(CAST(next AS date) ORDER BY next) INTO coming
      FROM generate_series(today, least(latest + 1, today + 31), interval '1 day') AS next
     WHERE NOT tstzrange(next, next + interval '1 day') && ANY (covered)
       AND NOT EXISTS (SELECT FROM taptwice_records_default
                        WHERE expires_at >= next AND expires_at < next + interval '1 day');
    IF past = '{}' AND coming IS NULL THEN
        RETURN;
    END IF;

    SELECT CAST(relnamespace AS regnamespace) INTO home
      FROM pg_class WHERE oid = CAST('taptwice_records' AS regclass);
    LOCK TABLE taptwice_records IN ACCESS EXCLUSIVE MODE;
    change := 'dropped';
    FOREACH partition IN ARRAY past LOOP
        EXECUTE 'DROP TABLE IF EXISTS ' || partition;
        RETURN NEXT;
    END LOOP;
    change := 'created';
    FOREACH day IN ARRAY coalesce(coming, '{}') LOOP
        partition := 'taptwice_records_' || to_char(day, 'YYYYMMDD');
        BEGIN
            EXECUTE 'CREATE TABLE ' || home || '.' || partition || ' PARTITION OF taptwice_records FOR VALUES FROM ('
                || quote_literal(CAST(day AS timestamptz)) || ') TO ('
                || quote_literal(CAST(day + 1 AS timestamptz)) || ')';
            EXECUTE 'ALTER TABLE ' || home || '.' || partition || ' OWNER TO ' || owner;
            RETURN NEXT;
        EXCEPTION WHEN check_violation OR duplicate_table OR invalid_object_definition THEN
            NULL;  -- since we looked a row of that day went to DEFAULT, or another sweep was here first
        END;
    END LOOP;
END
$$;

SELECT change, partition FROM taptwice_partitions(NULL);
