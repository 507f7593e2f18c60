-- FAILED messages that were published again. Beside the archive, whose rows never change.
CREATE TABLE IF NOT EXISTS {retried} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  queue VARCHAR(255) NOT NULL,
  at BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Purge deletes old entries of `once` by their age.
CREATE INDEX /*M! IF NOT EXISTS */ {prefix}once_at ON {once} (at);
