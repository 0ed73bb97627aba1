-- Every statement that taptwice runs on PostgreSQL, by name. The same names stand in each dialect.
-- Times: the database's clock rules; :now is given by tests alone.

-- name: claim
-- Lock the key and look for its record (the function stands in migrations/postgresql/001). Always one row.
SELECT locked, begun, read_only, fingerprint_version, fingerprint, status, headers, body, created_at
  FROM taptwice_claim(CAST(:lock AS bigint), CAST(encode(CAST(:id AS bytea), 'hex') AS uuid), CAST(:wait_ms AS integer));

-- name: insert
-- Save a finished answer (the function stands in migrations/postgresql/001). No row comes back when this is not
-- the transaction that claimed (:begun).
SELECT 1 WHERE taptwice_save(
       CAST(:begun AS float8), CAST(encode(CAST(:id AS bytea), 'hex') AS uuid), CAST(:now AS float8),
       CAST(:window AS float8), CAST(:version AS smallint), CAST(:status AS smallint), CAST(:fingerprint AS bytea),
       CAST(:account AS text), CAST(:key AS text), CAST(:headers AS bytea), CAST(:body AS bytea));

-- name: insert_late
-- Save an answer in a transaction that holds no claim (the function stands in migrations/postgresql/001). No row
-- comes back when the key has a record.
SELECT 1 WHERE taptwice_save_late(
       CAST(encode(CAST(:id AS bytea), 'hex') AS uuid), CAST(:now AS float8), CAST(:window AS float8),
       CAST(:version AS smallint), CAST(:status AS smallint), CAST(:fingerprint AS bytea),
       CAST(:account AS text), CAST(:key AS text), CAST(:headers AS bytea), CAST(:body AS bytea));

-- name: look
-- The record of a key, without a lock.
SELECT fingerprint_version, fingerprint, status, headers, body,
       CAST(extract(epoch FROM created_at) AS float8)
  FROM taptwice_records WHERE id = CAST(encode(CAST(:id AS bytea), 'hex') AS uuid);

-- name: inspect
-- The record of a key and its account, with what support wants to know.
SELECT encode(uuid_send(id), 'hex'), account, key, fingerprint_version, fingerprint, status, headers, body,
       CAST(extract(epoch FROM created_at) AS float8), CAST(extract(epoch FROM expires_at) AS float8)
  FROM taptwice_records WHERE id = CAST(encode(CAST(:id AS bytea), 'hex') AS uuid);

-- name: search
-- The records of a key in whichever account. No index serves this: it reads the whole table.
SELECT encode(uuid_send(id), 'hex'), account, key, fingerprint_version, fingerprint, status, headers, body,
       CAST(extract(epoch FROM created_at) AS float8), CAST(extract(epoch FROM expires_at) AS float8)
  FROM taptwice_records WHERE key = CAST(:key AS text) ORDER BY created_at LIMIT 100;

-- name: sweep
-- Forget one batch of records whose window is over; one row comes back for each. Where the table is partitioned
-- these are records of its DEFAULT partition (the function stands in migrations/postgresql/001).
SELECT 1 FROM taptwice_sweep(CAST(:now AS float8), CAST(:batch AS integer));

-- name: partitions
-- Make the partitions of the coming days, drop those whose records are all past their window; one row comes back
-- for each. Nothing where the table is not partitioned.
SELECT change, partition FROM taptwice_partitions(CAST(:now AS float8));

-- name: intent_make
-- Write down an intent that is not sent yet. One that is there stays as it is.
INSERT INTO taptwice_intents (name, key, made_at)
SELECT CAST(:name AS text), CAST(:key AS text), coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp())
ON CONFLICT (name) DO NOTHING;

-- name: intent_remember
-- The one write before the first byte: bind a name to its key and to the request, where that is not done yet. No
-- row comes back when the intent was dropped. Waits 5 s at most for a transaction that is making the same intent:
-- it may be the caller's own, on another connection, and would never end.
INSERT INTO taptwice_intents (name, key, fingerprint, made_at, sent_at)
SELECT CAST(:name AS text), CAST(:key AS text), CAST(:fingerprint AS bytea), moment, moment
  FROM (SELECT coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp()) AS moment,
               set_config('lock_timeout', '5s', true) AS patience) AS beginning
 WHERE patience <> ''
ON CONFLICT (name) DO UPDATE
   SET sent_at = coalesce(taptwice_intents.sent_at, excluded.sent_at),
       fingerprint = coalesce(taptwice_intents.fingerprint, excluded.fingerprint)
 WHERE taptwice_intents.dropped_at IS NULL
RETURNING name, key, fingerprint, CAST(extract(epoch FROM made_at) AS float8),
       CAST(extract(epoch FROM sent_at) AS float8), CAST(extract(epoch FROM done_at) AS float8),
       CAST(extract(epoch FROM dropped_at) AS float8), status, headers, body,
       coalesce(CAST(:now AS float8), CAST(extract(epoch FROM clock_timestamp()) AS float8));

-- name: intent_settle
-- The one write after: keep the answer. The first one counts, and none to a key that was renewed meanwhile.
UPDATE taptwice_intents
   SET done_at = coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp()), dropped_at = NULL,
       status = CAST(:status AS smallint), headers = CAST(:headers AS bytea), body = CAST(:body AS bytea)
 WHERE name = CAST(:name AS text) AND key = CAST(:key AS text) AND done_at IS NULL;

-- name: intent_drop
-- Give up an intent that has no answer.
UPDATE taptwice_intents SET dropped_at = coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp())
 WHERE name = CAST(:name AS text) AND done_at IS NULL AND dropped_at IS NULL
RETURNING 1;

-- name: intent_renew
-- A new key, for any request. Never for what has succeeded.
UPDATE taptwice_intents
   SET key = CAST(:key AS text), made_at = coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp()),
       fingerprint = NULL, sent_at = NULL, done_at = NULL, dropped_at = NULL,
       status = NULL, headers = NULL, body = NULL
 WHERE name = CAST(:name AS text) AND (status IS NULL OR status >= 400)
RETURNING 1;

-- name: intent_look
SELECT name, key, fingerprint, CAST(extract(epoch FROM made_at) AS float8),
       CAST(extract(epoch FROM sent_at) AS float8), CAST(extract(epoch FROM done_at) AS float8),
       CAST(extract(epoch FROM dropped_at) AS float8), status, headers, body,
       coalesce(CAST(:now AS float8), CAST(extract(epoch FROM clock_timestamp()) AS float8))
  FROM taptwice_intents WHERE name = CAST(:name AS text);

-- name: intents_open
-- Those that nobody has answered or given up, the oldest first.
SELECT name, key, fingerprint, CAST(extract(epoch FROM made_at) AS float8),
       CAST(extract(epoch FROM sent_at) AS float8), CAST(extract(epoch FROM done_at) AS float8),
       CAST(extract(epoch FROM dropped_at) AS float8), status, headers, body,
       coalesce(CAST(:now AS float8), CAST(extract(epoch FROM clock_timestamp()) AS float8))
  FROM taptwice_intents WHERE done_at IS NULL AND dropped_at IS NULL
 ORDER BY made_at LIMIT CAST(:batch AS integer);

-- name: intents_all
-- The newest first. No index serves this: it reads the whole table.
SELECT name, key, fingerprint, CAST(extract(epoch FROM made_at) AS float8),
       CAST(extract(epoch FROM sent_at) AS float8), CAST(extract(epoch FROM done_at) AS float8),
       CAST(extract(epoch FROM dropped_at) AS float8), status, headers, body,
       coalesce(CAST(:now AS float8), CAST(extract(epoch FROM clock_timestamp()) AS float8))
  FROM taptwice_intents ORDER BY made_at DESC LIMIT CAST(:batch AS integer);

-- name: intents_purge
-- Forget one batch of those that ended longer ago than :window; one row comes back for each.
DELETE FROM taptwice_intents WHERE name IN (
    SELECT name FROM taptwice_intents
     WHERE coalesce(done_at, dropped_at) < coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp())
                                           - make_interval(secs => CAST(:window AS float8))
     LIMIT CAST(:batch AS integer))
RETURNING 1;

-- name: applied
-- The migrations that were applied.
SELECT name FROM taptwice_migrations ORDER BY name;

-- name: record_migration
INSERT INTO taptwice_migrations (name) VALUES (CAST(:name AS text));
