-- Attempts that failed, one line each, oldest first. Null: none failed.
ALTER TABLE {message} ADD COLUMN history TEXT;

ALTER TABLE {archive} ADD COLUMN history TEXT;

-- Fingerprint of the error of a FAILED message that was not published again. Null: no open failure.
ALTER TABLE {archive} ADD COLUMN failure INTEGER;

CREATE INDEX {prefix}archive_failure ON {archive} (failure, queue, archived_at) WHERE failure IS NOT NULL;

-- Queues of a worker as JSON; null: not recorded.
ALTER TABLE {worker} ADD COLUMN queues TEXT;

-- Tokens of the server. Only hashes are here.
CREATE TABLE {token} (
  id TEXT NOT NULL PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  hash TEXT NOT NULL,
  roles TEXT NOT NULL,
  queues TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER
) WITHOUT ROWID;

-- Actions of operators that changed something.
CREATE TABLE {audit} (
  id BLOB NOT NULL PRIMARY KEY,
  at INTEGER NOT NULL,
  actor TEXT NOT NULL,
  action TEXT NOT NULL,
  queue TEXT,
  detail TEXT
) WITHOUT ROWID;

CREATE INDEX {prefix}audit_time ON {audit} (at, id);
