-- FAILED messages that were published again. Beside the archive, whose rows never change.
CREATE TABLE {retried} (
  id BLOB NOT NULL PRIMARY KEY,
  queue TEXT NOT NULL,
  at INTEGER NOT NULL
) WITHOUT ROWID;

-- Purge deletes old entries of `once` by their age.
CREATE INDEX {prefix}once_at ON {once} (at);
