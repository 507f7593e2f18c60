-- The lakes that the archive is exported to. While there is one, purge deletes only messages that were archived before
-- `until`, which every lake durably holds. None: nothing yet.
CREATE TABLE {export} (
  lake text COLLATE "C" PRIMARY KEY,
  shard integer NOT NULL,
  until bigint,
  at bigint NOT NULL,
  path text NOT NULL
);
