-- Every statement that taptwice runs on SQLite, by name. The same names stand in each dialect.
-- Times: the database's clock rules; :now is given by tests alone.

-- name: lock
-- Take the right to write, of which a database has one, without changing anything.
DELETE FROM taptwice_records WHERE 0;

-- name: claim
-- Look for the record of a key. SQLite has one writer: whoever is in a writing transaction has the lock.
SELECT 1, (julianday('now') - 2440587.5) * 86400.0, 0,
       fingerprint_version, fingerprint, status, headers, body, created_at
  FROM (SELECT 1) LEFT JOIN taptwice_records ON id = :id;

-- name: insert
-- Save a finished answer. A transaction that was ended under the claim is noticed by its savepoint.
INSERT INTO taptwice_records
       (id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key, headers, body)
SELECT :id, moment, moment + :window, :version, :status, :fingerprint, :account, :key, :headers, :body
  FROM (SELECT coalesce(:now, :begun) AS moment)
RETURNING 1;

-- name: insert_late
-- Save an answer in a transaction that holds no claim; no row comes back when the key has a record.
INSERT INTO taptwice_records
       (id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key, headers, body)
SELECT :id, moment, moment + :window, :version, :status, :fingerprint, :account, :key, :headers, :body
  FROM (SELECT coalesce(:now, (julianday('now') - 2440587.5) * 86400.0) AS moment)
 WHERE 1
ON CONFLICT (id) DO NOTHING
RETURNING 1;

-- name: look
-- The record of a key, without a lock.
SELECT fingerprint_version, fingerprint, status, headers, body, created_at FROM taptwice_records WHERE id = :id;

-- name: inspect
-- The record of a key and its account, with what support wants to know.
SELECT lower(hex(id)), account, key, fingerprint_version, fingerprint, status, headers, body, created_at, expires_at
  FROM taptwice_records WHERE id = :id;

-- name: search
-- The records of a key in whichever account. No index serves this: it reads the whole table.
SELECT lower(hex(id)), account, key, fingerprint_version, fingerprint, status, headers, body, created_at, expires_at
  FROM taptwice_records WHERE key = :key ORDER BY created_at LIMIT 100;

-- name: sweep
-- Forget one batch of records whose window is over; one row comes back for each.
DELETE FROM taptwice_records WHERE rowid IN (
    SELECT rowid FROM taptwice_records
     WHERE expires_at < coalesce(:now, (julianday('now') - 2440587.5) * 86400.0)
     LIMIT :batch)
RETURNING 1;

-- name: applied
-- The migrations that were applied.
SELECT name FROM taptwice_migrations ORDER BY name;

-- name: record_migration
INSERT INTO taptwice_migrations (name) VALUES (:name);
