-- The lakes that the archive is exported to. While there is one, purge deletes only messages that were archived before
-- `until`, which every lake durably holds. None: nothing yet.
CREATE TABLE {export} (
  lake TEXT NOT NULL PRIMARY KEY,
  shard INTEGER NOT NULL,
  until INTEGER,
  at INTEGER NOT NULL,
  path TEXT NOT NULL
);
