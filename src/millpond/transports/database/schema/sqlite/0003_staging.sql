-- Rows that the tasks of a bulk write load before its commit. No claim reads them.
CREATE TABLE {lot} (
  lot INTEGER NOT NULL PRIMARY KEY,
  batch INTEGER NOT NULL,
  at INTEGER NOT NULL,
  writer TEXT NOT NULL
);

CREATE INDEX {prefix}lot_writer ON {lot} (writer, batch);

CREATE TABLE {staging} (
  lot INTEGER NOT NULL,
  id BLOB NOT NULL,
  -- Null: when the write is committed.
  due_at INTEGER,
  priority INTEGER NOT NULL,
  queue TEXT NOT NULL,
  key TEXT,
  headers TEXT,
  payload BLOB NOT NULL
);

CREATE INDEX {prefix}staging_lot ON {staging} (lot, id);

-- The last batch that each writer has published: the whole of it (part -1), and each part where parts go alone.
CREATE TABLE {written} (
  writer TEXT NOT NULL,
  part INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  size INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (writer, part)
) WITHOUT ROWID;
