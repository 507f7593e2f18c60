-- The lakes that the archive is exported to. While there is one, purge deletes only messages that were archived before
-- `until`, which every lake durably holds. None: nothing yet.
CREATE TABLE IF NOT EXISTS {export} (
  lake VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
  shard INT NOT NULL,
  until BIGINT,
  at BIGINT NOT NULL,
  path TEXT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
