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
-- Save a finished answer. A transaction that was ended under the claim is noticed by its savepoint, or by COMMIT: this
-- gives back no row, and so costs half.
INSERT INTO taptwice_records
       (id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key, headers, body)
VALUES (:id, coalesce(:now, :begun), coalesce(:now, :begun) + :window, :version, :status, :fingerprint,
        :account, :key, :headers, :body);

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

-- name: intent_make
-- Write down an intent that is not sent yet. One that is there stays as it is.
INSERT INTO taptwice_intents (name, key, made_at)
SELECT :name, :key, moment FROM (SELECT coalesce(:now, (julianday('now') - 2440587.5) * 86400.0) AS moment) WHERE 1
ON CONFLICT (name) DO NOTHING;

-- name: intent_remember
-- The one write before the first byte: bind a name to its key and to the request, where that is not done yet. No
-- row comes back when the intent was dropped.
INSERT INTO taptwice_intents (name, key, fingerprint, made_at, sent_at)
SELECT :name, :key, :fingerprint, moment, moment
  FROM (SELECT coalesce(:now, (julianday('now') - 2440587.5) * 86400.0) AS moment) WHERE 1
ON CONFLICT (name) DO UPDATE
   SET sent_at = coalesce(taptwice_intents.sent_at, excluded.sent_at),
       fingerprint = coalesce(taptwice_intents.fingerprint, excluded.fingerprint)
 WHERE taptwice_intents.dropped_at IS NULL
RETURNING name, key, fingerprint, made_at, sent_at, done_at, dropped_at, status, headers, body,
       coalesce(:now, (julianday('now') - 2440587.5) * 86400.0);

-- name: intent_settle
-- The one write after: keep the answer. The first one counts, and none to a key that was renewed meanwhile.
UPDATE taptwice_intents
   SET done_at = coalesce(:now, (julianday('now') - 2440587.5) * 86400.0), dropped_at = NULL,
       status = :status, headers = :headers, body = :body
 WHERE name = :name AND key = :key AND done_at IS NULL;

-- name: intent_drop
-- Give up an intent that has no answer.
UPDATE taptwice_intents SET dropped_at = coalesce(:now, (julianday('now') - 2440587.5) * 86400.0)
 WHERE name = :name AND done_at IS NULL AND dropped_at IS NULL
RETURNING 1;

-- name: intent_renew
-- A new key, for any request. Never for what has succeeded.
UPDATE taptwice_intents
   SET key = :key, made_at = coalesce(:now, (julianday('now') - 2440587.5) * 86400.0), fingerprint = NULL,
       sent_at = NULL, done_at = NULL, dropped_at = NULL, status = NULL, headers = NULL, body = NULL
 WHERE name = :name AND (status IS NULL OR status >= 400)
RETURNING 1;

-- name: intent_look
SELECT name, key, fingerprint, made_at, sent_at, done_at, dropped_at, status, headers, body,
       coalesce(:now, (julianday('now') - 2440587.5) * 86400.0)
  FROM taptwice_intents WHERE name = :name;

-- name: intents_open
-- Those that nobody has answered or given up, the oldest first.
SELECT name, key, fingerprint, made_at, sent_at, done_at, dropped_at, status, headers, body,
       coalesce(:now, (julianday('now') - 2440587.5) * 86400.0)
  FROM taptwice_intents WHERE done_at IS NULL AND dropped_at IS NULL ORDER BY made_at LIMIT :batch;

-- name: intents_all
-- The newest first. No index serves this: it reads the whole table.
SELECT name, key, fingerprint, made_at, sent_at, done_at, dropped_at, status, headers, body,
       coalesce(:now, (julianday('now') - 2440587.5) * 86400.0)
  FROM taptwice_intents ORDER BY made_at DESC LIMIT :batch;

-- name: intents_purge
-- Forget one batch of those that ended longer ago than :window; one row comes back for each.
DELETE FROM taptwice_intents WHERE name IN (
    SELECT name FROM taptwice_intents
     WHERE coalesce(done_at, dropped_at) < coalesce(:now, (julianday('now') - 2440587.5) * 86400.0) - :window
     LIMIT :batch)
RETURNING 1;

-- name: applied
-- The migrations that were applied.
SELECT name FROM taptwice_migrations ORDER BY name;

-- name: record_migration
INSERT INTO taptwice_migrations (name) VALUES (:name);
