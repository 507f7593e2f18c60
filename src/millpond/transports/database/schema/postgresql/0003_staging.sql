-- Rows that the tasks of a bulk write load before its commit. No claim reads them. UNLOGGED: a crash of the server
-- empties both tables together, and the commit notices that rows are missing.
CREATE UNLOGGED TABLE {lot} (
  lot bigint PRIMARY KEY,
  batch bigint NOT NULL,
  at bigint NOT NULL,
  writer text COLLATE "C" NOT NULL
);

CREATE INDEX {prefix}lot_writer ON {lot} (writer, batch);

CREATE UNLOGGED TABLE {staging} (
  lot bigint NOT NULL,
  id uuid NOT NULL,
  -- Null: when the write is committed.
  due_at bigint,
  priority smallint NOT NULL,
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  headers text,
  payload bytea NOT NULL
);

CREATE INDEX {prefix}staging_lot ON {staging} (lot);

-- The last batch that each writer has published: the whole of it (part -1), and each part where parts go alone.
CREATE TABLE {written} (
  writer text COLLATE "C" NOT NULL,
  part integer NOT NULL,
  batch bigint NOT NULL,
  size bigint NOT NULL,
  at bigint NOT NULL,
  PRIMARY KEY (writer, part)
);
