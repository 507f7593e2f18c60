-- FAILED messages that were published again. Beside the archive, whose rows never change.
CREATE TABLE {retried} (
  id uuid PRIMARY KEY,
  queue text COLLATE "C" NOT NULL,
  at bigint NOT NULL
);

-- Purge deletes old entries of `once` by their age.
CREATE INDEX {prefix}once_at ON {once} (at);
