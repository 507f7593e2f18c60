-- How many messages a lake holds of each range of the archive, and how many of them were purged since. Purge deletes
-- from a range only if the archive has the others.
CREATE TABLE {export_range} (
  lake TEXT NOT NULL,
  since INTEGER NOT NULL,
  until INTEGER NOT NULL,
  messages INTEGER NOT NULL,
  purged INTEGER NOT NULL,
  PRIMARY KEY (lake, since)
) WITHOUT ROWID;

-- An export and a check of a range read the rows of the range only.
CREATE INDEX {prefix}archive_time ON {archive} (archived_at);
