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
-- Save an answer in a transaction that holds no claim; no row comes back when the key has a record.
INSERT INTO taptwice_records
       (id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key, headers, body)
SELECT CAST(encode(CAST(:id AS bytea), 'hex') AS uuid), moment, moment + make_interval(secs => CAST(:window AS float8)),
       CAST(:version AS smallint), CAST(:status AS smallint), CAST(:fingerprint AS bytea),
       CAST(:account AS text), CAST(:key AS text), CAST(:headers AS bytea), CAST(:body AS bytea)
  FROM (SELECT coalesce(to_timestamp(CAST(:now AS float8)), transaction_timestamp()) AS moment) AS claimed
ON CONFLICT (id) DO NOTHING
RETURNING 1;

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
-- Forget one batch of records whose window is over; one row comes back for each. The moment stands in a SELECT
-- of its own because no index can serve a comparison with a volatile function.
DELETE FROM taptwice_records WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM taptwice_records
     WHERE expires_at < (SELECT coalesce(to_timestamp(CAST(:now AS float8)), clock_timestamp()))
     LIMIT CAST(:batch AS integer) FOR UPDATE SKIP LOCKED))
RETURNING 1;

-- name: applied
-- The migrations that were applied.
SELECT name FROM taptwice_migrations ORDER BY name;

-- name: record_migration
INSERT INTO taptwice_migrations (name) VALUES (CAST(:name AS text));
