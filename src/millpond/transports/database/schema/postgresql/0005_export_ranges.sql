-- How many messages a lake holds of each range of the archive, and how many of them were purged since. Purge deletes
-- from a range only if the archive has the others.
CREATE TABLE {export_range} (
  lake text COLLATE "C" NOT NULL,
  since bigint NOT NULL,
  until bigint NOT NULL,
  messages bigint NOT NULL,
  purged bigint NOT NULL,
  PRIMARY KEY (lake, since)
);

-- The least and greatest time of each 32 pages: an export reads the pages of its range only. It costs a settle next to
-- nothing; an index of all rows would cost as much as the one of ids.
CREATE INDEX {prefix}archive_time ON {archive} USING brin (archived_at)
  WITH (pages_per_range = 32, autosummarize = on);
